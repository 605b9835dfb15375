package cudabench

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
)

// timer times launches on a stream. It reports an error by a panic. The function measure recovers the
// panic and ends all benchmarks.
type timer struct {
	*kernel.Set
	stream gpu.Stream
	random *rand.Rand
	report func(Measurement) error
	timing string  // name of the running measurement
	cache  gpu.Ptr // overwritten before each timed launch
	size   int     // size of the cache buffer in bytes
	// all holds memory for the whole run, and memory for one benchmark or less
	all, memory run.Memory
}

// cacheBytes is several times the size of any GPU's cache.
const cacheBytes = 256 << 20

const (
	warmUp      = 25 * time.Millisecond
	measuring   = 100 * time.Millisecond
	maxLaunches = 500
)

// failure is the panic value that carries an error out of a benchmark.
type failure struct{ error }

func must[T any](v T, err error) T {
	do(err)
	return v
}

func do(err error) {
	if err != nil {
		panic(failure{err})
	}
}

// measure runs benchmarks in a context. Before each timed launch it overwrites the given number of bytes;
// cacheBytes is enough to evict the contents of any GPU's cache.
func measure(ctx gpu.Context, cache int, report func(Measurement) error,
	benchmarks ...func(*timer)) (err error) {
	b := &timer{Set: kernel.New(ctx), size: cache, report: report, all: run.Memory{Ctx: ctx},
		memory: run.Memory{Ctx: ctx}, random: rand.New(rand.NewPCG(rand.Uint64(), 0))}
	if b.stream, err = ctx.NewStream(false); err != nil {
		return err
	}

	defer func() {
		switch r := recover().(type) {
		case nil:
		case failure:
			if err = r.error; b.timing != "" {
				err = fmt.Errorf("%s: %w", b.timing, err)
			}
		default:
			panic(r)
		}
		err = errors.Join(err, b.release(), b.all.Close(), b.Close(), ctx.DestroyStream(b.stream))
	}()

	b.cache = must(b.all.Alloc(cache, "the cache"))
	for _, benchmark := range benchmarks {
		benchmark(b)
		b.free()
	}

	return nil
}

// free waits for the device and frees the memory of a benchmark.
func (b *timer) free() { do(b.release()) }

func (b *timer) release() error {
	return errors.Join(b.Ctx.SyncStream(b.stream), b.memory.Close())
}

// bytes returns n bytes of uninitialized memory.
func (b *timer) bytes(n int) gpu.Ptr { return must(b.memory.Alloc(max(1, n), "a benchmark")) }

// room returns uninitialized memory for n elements.
func (b *timer) room(n int, t gpu.DType) gpu.Ptr { return b.bytes(n * t.Size()) }

// upload returns a copy of data on the device.
func (b *timer) upload(data []byte) gpu.Ptr {
	p := b.bytes(len(data))
	do(b.Ctx.CopyToDevice(p, data, b.stream))
	return p
}

// zeros returns memory for n four-byte numbers, all zero.
func (b *timer) zeros(n int) gpu.Ptr {
	p := b.bytes(4 * n)
	do(b.Ctx.Memset8(p, 0, 4*n, b.stream))
	return p
}

// ids returns n random numbers below limit, on the device.
func (b *timer) ids(n, limit int) gpu.Ptr {
	x := make([]int, n)
	for i := range x {
		x[i] = b.random.IntN(limit)
	}
	return b.upload(gpu.Bytes(x))
}

// normal returns n normally distributed numbers on the device. They repeat after a while.
func (b *timer) normal(n int, t gpu.DType) gpu.Ptr {
	p := b.room(n, t)
	do(run.Fill(b.Ctx, b.stream, p, n*t.Size(), t, 1, b.random.Uint64()))
	return p
}

// moves times a sequence of launches that have to move the given number of bytes.
func (b *timer) moves(name string, bytes float64, launches ...kernel.Launch) {
	b.time(Measurement{Name: name, Bytes: bytes}, func() { b.launch(launches...) })
}

// computes times a launch that performs the given number of operations.
func (b *timer) computes(name string, flops float64, launch kernel.Launch) {
	b.time(Measurement{Name: name, FLOPs: flops}, func() { b.launch(launch) })
}

// launch enqueues launches in order.
func (b *timer) launch(launches ...kernel.Launch) {
	for _, l := range launches {
		do(b.Launch(b.stream, l))
	}
}

// time measures the work that a function enqueues, and reports the result.
func (b *timer) time(m Measurement, work func()) {
	b.timing = m.Name
	b.repeat(1, work) // load the kernel
	once := max(b.repeat(5, work), time.Microsecond)
	b.repeat(min(max(1, int(warmUp/once)), maxLaunches), work)
	m.Time = b.repeat(min(max(5, int(measuring/once)), maxLaunches), work)
	do(b.report(m))
	b.timing = ""
}

// repeat returns the median time of n calls of work, each after the cache has been overwritten.
func (b *timer) repeat(n int, work func()) time.Duration {
	return run.Median(must(run.Times(b.Ctx, b.stream, n,
		func(int) error { return b.Ctx.Memset8(b.cache, 0, b.size, b.stream) },
		func(int) error {
			work()
			return nil
		})))
}

// plan returns a function that enqueues matrix products of the given kind.
func (b *timer) plan(spec gpu.MatmulSpec) func(gpu.MatmulArgs) {
	workspace := b.bytes(run.WorkspaceBytes)
	plan := must(must(b.Ctx.Blas()).Plan(spec, run.WorkspaceBytes, 1))
	return func(a gpu.MatmulArgs) {
		a.Workspace, a.WorkspaceSize = workspace, run.WorkspaceBytes
		do(plan.Run(0, a, b.stream))
	}
}
