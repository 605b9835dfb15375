// Package bench times kernels on random data. A time is the median of launches between two events.
// The cache is overwritten before each, since in a model other work stands between a kernel and
// what it reads. Triton's do_bench does the same, so the times compare with those that it takes.
package bench

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Measurement is what a kernel takes. Where memory bounds it, Bytes is what it has to move: each
// input read once, each output written once. Where arithmetic does, FLOPs is what it has to
// compute. The other is 0.
type Measurement struct {
	Name  string // of kernel, pass and shape, as in rmsnorm_fwd_32768x4096
	Time  time.Duration
	Bytes float64
	FLOPs float64
}

// B is a stream and what is measured on it. What a benchmark takes is freed behind it. An error
// ends all benchmarks: Run returns it.
type B struct {
	*kernel.Set
	Stream gpu.Stream
	Random *rand.Rand
	report func(Measurement) error
	cache  gpu.Ptr // overwritten before each launch that is timed
	size   int     // of that, in bytes
	events [2 * maxLaunches]gpu.Event
	held   []gpu.Ptr // until the next Free
	plans  []gpu.MatmulPlan
}

// CacheBytes is several times any GPU's cache.
const CacheBytes = 256 << 20

const (
	warmUp      = 25 * time.Millisecond
	measuring   = 100 * time.Millisecond
	maxLaunches = 500
)

// failure is what ends a benchmark from within.
type failure struct{ error }

// Do ends all benchmarks if there is an error.
func (b *B) Do(err error) {
	if err != nil {
		panic(failure{err})
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(failure{err})
	}
	return v
}

// Run runs benchmarks of a context's kernels, and reports each measurement. So many bytes are
// overwritten before each launch that is timed: CacheBytes empties any GPU's cache.
func Run(ctx gpu.Context, cache int, report func(Measurement) error,
	benchmarks ...func(*B)) (err error) {
	b := &B{Set: kernel.New(ctx), size: cache, report: report,
		Random: rand.New(rand.NewPCG(rand.Uint64(), 0))}
	defer func() {
		if r := recover(); r != nil {
			f, ok := r.(failure)
			if !ok {
				panic(r)
			}
			err = f.error
		}
		err = errors.Join(err, b.close())
	}()
	b.Stream, b.cache = must(ctx.NewStream()), must(ctx.Alloc(cache))
	for i := range b.events {
		b.events[i] = must(ctx.NewEvent(true))
	}
	for _, benchmark := range benchmarks {
		benchmark(b)
		b.Free()
	}
	return nil
}

// close gives everything back.
func (b *B) close() error {
	err := b.free()
	for _, e := range b.events {
		if e != 0 {
			err = errors.Join(err, b.Ctx.DestroyEvent(e))
		}
	}
	err = errors.Join(err, b.Ctx.Free(b.cache), b.Set.Close())
	if b.Stream != 0 {
		err = errors.Join(err, b.Ctx.DestroyStream(b.Stream))
	}
	return err
}

// Free waits for the device and gives back what Alloc has taken.
func (b *B) Free() { b.Do(b.free()) }

func (b *B) free() error {
	err := b.Ctx.SyncStream(b.Stream)
	for _, p := range b.held {
		err = errors.Join(err, b.Ctx.Free(p))
	}
	for _, p := range b.plans {
		err = errors.Join(err, p.Close())
	}
	b.held, b.plans = nil, nil
	return err
}

// Alloc returns memory for n elements, which are not set.
func (b *B) Alloc(n int, t gpu.DType) gpu.Ptr {
	p := must(b.Ctx.Alloc(max(1, n*t.Size())))
	b.held = append(b.held, p)
	return p
}

// Upload returns a copy of data on the device.
func (b *B) Upload(data []byte) gpu.Ptr {
	p := b.Alloc((len(data)+3)/4, gpu.Float32)
	b.Do(b.Ctx.CopyToDevice(p, data, b.Stream))
	return p
}

// Zeros returns memory for n numbers, which are 0.
func (b *B) Zeros(n int, t gpu.DType) gpu.Ptr {
	p := b.Alloc(n, t)
	b.Do(b.Ctx.Memset8(p, 0, n*t.Size(), b.Stream))
	return p
}

// IDs returns n numbers below limit on the device as int32.
func (b *B) IDs(n, limit int) kernel.Ints {
	x := make([]int32, n)
	for i := range x {
		x[i] = b.Random.Int32N(int32(limit))
	}
	return kernel.Ints{Ptr: b.Upload(gpu.Bytes(x))}
}

// Normal returns n numbers of the normal distribution on the device: some hundred thousand, over
// and over.
func (b *B) Normal(n int, t gpu.DType) gpu.Ptr {
	const distinct = 1<<18 - 1 // odd, so that rows differ
	p := b.Alloc(n, t)
	x := make([]float32, min(n, distinct))
	for i := range x {
		x[i] = float32(b.Random.NormFloat64())
	}
	data := gpu.Bytes(x)
	if t == gpu.BFloat16 {
		half := make([]uint16, len(x))
		for i, v := range gpu.View[uint32](data) {
			half[i] = uint16(v >> 16)
		}
		data = gpu.Bytes(half)
	}
	b.Do(b.Ctx.CopyToDevice(p, data, b.Stream))
	for done, all := len(data), n*t.Size(); done < all; {
		more := min(done, all-done)
		b.Do(b.Ctx.CopyOnDevice(p.Offset(done), p, more, b.Stream))
		done += more
	}
	return p
}

// Moves times launches, one behind the other, that have so many bytes to move.
func (b *B) Moves(name string, bytes float64, launches ...kernel.Launch) {
	b.Time(Measurement{Name: name, Bytes: bytes}, func() { b.Launch(launches...) })
}

// Computes times a launch that has so many operations to compute.
func (b *B) Computes(name string, flops float64, launch kernel.Launch) {
	b.Time(Measurement{Name: name, FLOPs: flops}, func() { b.Launch(launch) })
}

// Launch enqueues launches, one behind the other.
func (b *B) Launch(launches ...kernel.Launch) {
	for _, l := range launches {
		b.Do(l.Launch(b.Set, b.Stream))
	}
}

// Time measures what launch enqueues, and reports it.
func (b *B) Time(m Measurement, launch func()) {
	defer func() {
		r := recover()
		if f, ok := r.(failure); ok {
			r = failure{fmt.Errorf("%s: %w", m.Name, f.error)}
		}
		if r != nil {
			panic(r)
		}
	}()
	b.launches(1, launch) // which loads the kernel
	once := max(median(b.launches(5, launch)), time.Microsecond)
	b.launches(min(max(1, int(warmUp/once)), maxLaunches), launch)
	m.Time = median(b.launches(min(max(5, int(measuring/once)), maxLaunches), launch))
	b.Do(b.report(m))
}

// launches returns what each of n launches takes with nothing of use in the cache.
func (b *B) launches(n int, launch func()) []time.Duration {
	for i := range n {
		b.Do(b.Ctx.Memset8(b.cache, 0, b.size, b.Stream))
		b.Do(b.Ctx.Record(b.events[2*i], b.Stream))
		launch()
		b.Do(b.Ctx.Record(b.events[2*i+1], b.Stream))
	}
	b.Do(b.Ctx.SyncStream(b.Stream))
	times := make([]time.Duration, n)
	for i := range times {
		times[i] = must(b.Ctx.Elapsed(b.events[2*i], b.events[2*i+1]))
	}
	return times
}

func median(times []time.Duration) time.Duration {
	slices.Sort(times)
	return times[len(times)/2]
}

// Plan returns what enqueues matrix products.
func (b *B) Plan(spec gpu.MatmulSpec) func(gpu.MatmulArgs) {
	const size = 32 << 20
	workspace := b.Alloc(size/4, gpu.Float32)
	plan := must(must(b.Ctx.Blas()).Plan(spec, size, 1))
	b.plans = append(b.plans, plan)
	return func(a gpu.MatmulArgs) {
		a.Workspace, a.WorkspaceSize = workspace, size
		b.Do(plan.Run(0, a, b.Stream))
	}
}

// Ceilings times what bounds the rest.
func Ceilings(b *B) {
	const size = 2 << 30
	x, y := b.Normal(size/2, gpu.BFloat16), b.Alloc(size/2, gpu.BFloat16)
	b.Time(Measurement{Name: "copy_2GiB", Bytes: 2 * size}, func() {
		b.Do(b.Ctx.CopyOnDevice(y, x, size, b.Stream))
	})
	b.Free()

	const n = 8192
	p, c, d := b.Normal(n*n, gpu.BFloat16), b.Normal(n*n, gpu.BFloat16), b.Alloc(n*n, gpu.BFloat16)
	product := b.Plan(gpu.MatmulSpec{M: n, N: n, K: n, A: gpu.BFloat16,
		B: gpu.BFloat16, D: gpu.BFloat16})
	b.Time(Measurement{Name: "gemm_8192_bf16", FLOPs: 2 * n * n * n}, func() {
		product(gpu.MatmulArgs{Alpha: 1, A: p, B: c, D: d})
	})
}
