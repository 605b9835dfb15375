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

// New returns what times kernels of a context. So many bytes are overwritten before each launch
// that is timed: CacheBytes empties any GPU's cache.
func New(ctx gpu.Context, cache int, report func(Measurement) error) *B {
	b := &B{Ctx: ctx, Set: kernel.New(ctx), size: cache, report: report,
		Random: rand.New(rand.NewPCG(rand.Uint64(), 0))}
	b.open()
	return b
}

// Close gives everything back and returns the first error.
func (b *B) Close() error {
	b.close()
	return b.Err
}

// B is a stream and what is measured on it. After an error, which it keeps, it does nothing any
// more.
type B struct {
	*kernel.Set
	Ctx    gpu.Context
	Stream gpu.Stream
	report func(Measurement) error
	Random *rand.Rand
	cache  gpu.Ptr     // overwritten before each launch that is timed
	size   int         // of that, in bytes
	events []gpu.Event // two for each launch that is timed
	held   []gpu.Ptr   // until the next free
	plans  []gpu.MatmulPlan
	Err    error
}

// CacheBytes is several times any GPU's cache.
const CacheBytes = 256 << 20

const (
	warmUp      = 25 * time.Millisecond
	measuring   = 100 * time.Millisecond
	maxLaunches = 500
)

func (b *B) Do(err error) {
	if b.Err == nil {
		b.Err = err
	}
}

func (b *B) open() {
	var err error
	if b.Stream, err = b.Ctx.NewStream(); err != nil {
		b.Do(err)
		return
	}
	b.cache, err = b.Ctx.Alloc(b.size)
	b.Do(err)
	for range 2 * maxLaunches {
		e, err := b.Ctx.NewEvent(true)
		if err != nil {
			b.Do(err)
			return
		}
		b.events = append(b.events, e)
	}
}

func (b *B) close() {
	b.Free()
	for _, e := range b.events {
		b.Do(b.Ctx.DestroyEvent(e))
	}
	if b.cache != 0 {
		b.Do(b.Ctx.Free(b.cache))
	}
	b.Do(b.Set.Close())
	if b.Stream != 0 {
		b.Do(b.Ctx.DestroyStream(b.Stream))
	}
}

// Free waits for the device and gives back what alloc has taken.
func (b *B) Free() {
	if b.Stream != 0 {
		b.Do(b.Ctx.SyncStream(b.Stream))
	}
	for _, p := range b.held {
		b.Do(b.Ctx.Free(p))
	}
	for _, p := range b.plans {
		b.Do(p.Close())
	}
	b.held, b.plans = nil, nil
}

// Alloc returns memory for n elements, which are not set.
func (b *B) Alloc(n int, t gpu.DType) gpu.Ptr {
	if b.Err != nil {
		return 0
	}
	p, err := b.Ctx.Alloc(max(1, n*t.Size()))
	if err != nil {
		b.Do(err)
		return 0
	}
	b.held = append(b.held, p)
	return p
}

// Upload returns a copy of data on the device.
func (b *B) Upload(data []byte) gpu.Ptr {
	p := b.Alloc((len(data)+3)/4, gpu.Float32)
	if b.Err == nil {
		b.Do(b.Ctx.CopyToDevice(p, data, b.Stream))
	}
	return p
}

// Zeros returns memory for n numbers, which are 0.
func (b *B) Zeros(n int, t gpu.DType) gpu.Ptr {
	p := b.Alloc(n, t)
	if b.Err == nil {
		b.Do(b.Ctx.Memset8(p, 0, n*t.Size(), b.Stream))
	}
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
	if b.Err != nil {
		return 0
	}
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
	for done, all := len(data), n*t.Size(); done < all && b.Err == nil; {
		more := min(done, all-done)
		b.Do(b.Ctx.CopyOnDevice(p.Offset(done), p, more, b.Stream))
		done += more
	}
	return p
}

// Moves times launches, one behind the other, that have so many bytes to move.
func (b *B) Moves(name string, bytes float64, launches ...kernel.Launch) {
	b.Time(Measurement{Name: name, Bytes: bytes}, func() error { return b.launch(launches...) })
}

// Computes times a launch that has so many operations to compute.
func (b *B) Computes(name string, flops float64, launch kernel.Launch) {
	b.Time(Measurement{Name: name, FLOPs: flops}, func() error { return b.launch(launch) })
}

func (b *B) launch(launches ...kernel.Launch) error {
	for _, l := range launches {
		if err := l.Launch(b.Set, b.Stream); err != nil {
			return err
		}
	}
	return nil
}

// Launch enqueues what is not timed.
func (b *B) Launch(l kernel.Launch) {
	if b.Err == nil {
		b.Do(b.launch(l))
	}
}

// Time measures what launch enqueues, and reports it.
func (b *B) Time(m Measurement, launch func() error) {
	if b.Err != nil {
		return
	}
	times, err := b.launches(1, launch) // which loads the kernel
	if err == nil {
		times, err = b.launches(5, launch)
	}
	if err != nil {
		b.Do(fmt.Errorf("%s: %w", m.Name, err))
		return
	}
	once := max(median(times), time.Microsecond)
	if _, err = b.launches(min(max(1, int(warmUp/once)), maxLaunches), launch); err == nil {
		times, err = b.launches(min(max(5, int(measuring/once)), maxLaunches), launch)
	}
	if err != nil {
		b.Do(fmt.Errorf("%s: %w", m.Name, err))
		return
	}
	m.Time = median(times)
	b.Do(b.report(m))
}

// launches returns what each of n launches takes with nothing of use in the cache.
func (b *B) launches(n int, launch func() error) ([]time.Duration, error) {
	for i := range n {
		if err := errors.Join(b.Ctx.Memset8(b.cache, 0, b.size, b.Stream),
			b.Ctx.Record(b.events[2*i], b.Stream),
			launch(), b.Ctx.Record(b.events[2*i+1], b.Stream)); err != nil {
			return nil, err
		}
	}
	if err := b.Ctx.SyncStream(b.Stream); err != nil {
		return nil, err
	}
	times := make([]time.Duration, n)
	for i := range times {
		var err error
		if times[i], err = b.Ctx.Elapsed(b.events[2*i], b.events[2*i+1]); err != nil {
			return nil, err
		}
	}
	return times, nil
}

func median(times []time.Duration) time.Duration {
	slices.Sort(times)
	return times[len(times)/2]
}

// Plan returns what enqueues matrix products.
func (b *B) Plan(spec gpu.MatmulSpec) func(gpu.MatmulArgs) error {
	const size = 32 << 20
	if b.Err != nil {
		return nil
	}
	workspace := b.Alloc(size/4, gpu.Float32)
	blas, err := b.Ctx.Blas()
	if err != nil {
		b.Do(err)
		return nil
	}
	plan, err := blas.Plan(spec, size, 1)
	if err != nil {
		b.Do(err)
		return nil
	}
	b.plans = append(b.plans, plan)
	return func(a gpu.MatmulArgs) error {
		a.Workspace, a.WorkspaceSize = workspace, size
		return plan.Run(0, a, b.Stream)
	}
}

// Ceilings times what bounds the rest.
func Ceilings(b *B) {
	const size = 2 << 30
	x, y := b.Normal(size/2, gpu.BFloat16), b.Alloc(size/2, gpu.BFloat16)
	b.Time(Measurement{Name: "copy_2GiB", Bytes: 2 * size}, func() error {
		return b.Ctx.CopyOnDevice(y, x, size, b.Stream)
	})
	b.Free()

	const n = 8192
	p, c, d := b.Normal(n*n, gpu.BFloat16), b.Normal(n*n, gpu.BFloat16), b.Alloc(n*n, gpu.BFloat16)
	product := b.Plan(gpu.MatmulSpec{M: n, N: n, K: n, A: gpu.BFloat16,
		B: gpu.BFloat16, D: gpu.BFloat16})
	b.Time(Measurement{Name: "gemm_8192_bf16", FLOPs: 2 * n * n * n}, func() error {
		return product(gpu.MatmulArgs{Alpha: 1, A: p, B: c, D: d})
	})
	b.Free()
}
