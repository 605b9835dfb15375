// Package cudabench times this module's CUDA kernels one by one, on random data, and beside them what bounds them on the
// same card: a copy in device memory and a large matrix product of cuBLASLt.
//
// A time is the median of launches between two events. The cache is overwritten before each, since in a model other work
// stands between a kernel and what it reads; Triton's do_bench does the same, so the times compare with those that it
// takes of other programs.
package cudabench

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Measurement is what a kernel takes. Where memory bounds it, Bytes is what it has to move: each input read once, each
// output written once. Where arithmetic does, FLOPs is what it has to compute. The other is 0.
type Measurement struct {
	Name  string // of kernel, pass and shape, as in rmsnorm_fwd_32768x4096
	Time  time.Duration
	Bytes float64
	FLOPs float64
}

// groups are the kernels that are measured together, in order.
var groups = []struct {
	name    string
	measure func(*bench)
}{
	{"copy", ceilings}, {"ops", ops}, {"attention", attention}, {"muon", muon}, {"kasmina", kasmina}, {"optim", optimizers},
	{"stock", stock},
}

// Groups returns the names of the groups of kernels.
func Groups() []string {
	var names []string
	for _, g := range groups {
		names = append(names, g.name)
	}
	return names
}

// Run measures the kernels of some groups on a device, in the order of [Groups], and calls report with each measurement. It
// takes up to 10 GiB of device memory. An error of report, an unknown group or a fault of the device ends it.
func Run(d *cudaops.Device, names []string, report func(Measurement) error) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("cudabench.Run: %w", err)
		}
	}()
	if d == nil || report == nil {
		return errors.New("the device or report is nil")
	}
	for _, n := range names {
		if !slices.Contains(Groups(), n) {
			return fmt.Errorf("there is no group %q, want some of %v", n, Groups())
		}
	}
	drv, err := driver.Open()
	if err != nil {
		return err
	}
	ctx, err := drv.Retain(d.Ordinal())
	if err != nil {
		return err
	}
	return errors.Join(measure(ctx, names, report), ctx.Close())
}

func measure(ctx gpu.Context, names []string, report func(Measurement) error) error {
	b := &bench{ctx: ctx, Set: kernel.New(ctx), size: cacheBytes, report: report,
		random: rand.New(rand.NewPCG(rand.Uint64(), 0))}
	b.open()
	for _, g := range groups {
		if b.err == nil && slices.Contains(names, g.name) {
			g.measure(b)
			b.free()
		}
	}
	b.close()
	return b.err
}

// bench is a stream and what is measured on it. After an error, which it keeps, it does nothing any more.
type bench struct {
	*kernel.Set
	ctx    gpu.Context
	stream gpu.Stream
	report func(Measurement) error
	random *rand.Rand
	cache  gpu.Ptr     // overwritten before each launch that is timed
	size   int         // of that, in bytes
	events []gpu.Event // two for each launch that is timed
	held   []gpu.Ptr   // until the next free
	plans  []gpu.MatmulPlan
	err    error
}

const (
	cacheBytes  = 256 << 20 // several times any GPU's cache
	warmUp      = 25 * time.Millisecond
	measuring   = 100 * time.Millisecond
	maxLaunches = 500
)

func (b *bench) do(err error) {
	if b.err == nil {
		b.err = err
	}
}

func (b *bench) open() {
	var err error
	if b.stream, err = b.ctx.NewStream(); err != nil {
		b.do(err)
		return
	}
	b.cache, err = b.ctx.Alloc(b.size)
	b.do(err)
	for range 2 * maxLaunches {
		e, err := b.ctx.NewEvent(true)
		if err != nil {
			b.do(err)
			return
		}
		b.events = append(b.events, e)
	}
}

func (b *bench) close() {
	b.free()
	for _, e := range b.events {
		b.do(b.ctx.DestroyEvent(e))
	}
	if b.cache != 0 {
		b.do(b.ctx.Free(b.cache))
	}
	b.do(b.Set.Close())
	if b.stream != 0 {
		b.do(b.ctx.DestroyStream(b.stream))
	}
}

// free waits for the device and gives back what alloc has taken.
func (b *bench) free() {
	if b.stream != 0 {
		b.do(b.ctx.SyncStream(b.stream))
	}
	for _, p := range b.held {
		b.do(b.ctx.Free(p))
	}
	for _, p := range b.plans {
		b.do(p.Close())
	}
	b.held, b.plans = nil, nil
}

// alloc returns memory for n elements, which are not set.
func (b *bench) alloc(n int, t gpu.DType) gpu.Ptr {
	if b.err != nil {
		return 0
	}
	p, err := b.ctx.Alloc(max(1, n*t.Size()))
	if err != nil {
		b.do(err)
		return 0
	}
	b.held = append(b.held, p)
	return p
}

// upload returns a copy of data on the device.
func (b *bench) upload(data []byte) gpu.Ptr {
	p := b.alloc((len(data)+3)/4, gpu.Float32)
	if b.err == nil {
		b.do(b.ctx.CopyToDevice(p, data, b.stream))
	}
	return p
}

// floats returns numbers on the device as float32.
func (b *bench) floats(x []float32) gpu.Ptr { return b.upload(gpu.Bytes(x)) }

// ids returns n numbers below limit on the device as int32.
func (b *bench) ids(n, limit int) kernel.Ints {
	x := make([]int32, n)
	for i := range x {
		x[i] = b.random.Int32N(int32(limit))
	}
	return kernel.Ints{Ptr: b.upload(gpu.Bytes(x))}
}

// normal returns n numbers of the normal distribution on the device: some hundred thousand, over and over.
func (b *bench) normal(n int, t gpu.DType) gpu.Ptr {
	const distinct = 1<<18 - 1 // odd, so that rows differ
	p := b.alloc(n, t)
	if b.err != nil {
		return 0
	}
	x := make([]float32, min(n, distinct))
	for i := range x {
		x[i] = float32(b.random.NormFloat64())
	}
	data := gpu.Bytes(x)
	if t == gpu.BFloat16 {
		half := make([]uint16, len(x))
		for i, v := range gpu.View[uint32](data) {
			half[i] = uint16(v >> 16)
		}
		data = gpu.Bytes(half)
	}
	b.do(b.ctx.CopyToDevice(p, data, b.stream))
	for done, all := len(data), n*t.Size(); done < all && b.err == nil; {
		more := min(done, all-done)
		b.do(b.ctx.CopyOnDevice(p.Offset(done), p, more, b.stream))
		done += more
	}
	return p
}

// time measures what launch enqueues, and reports it.
func (b *bench) time(m Measurement, launch func() error) {
	if b.err != nil {
		return
	}
	times, err := b.launches(1, launch) // which loads the kernel
	if err == nil {
		times, err = b.launches(5, launch)
	}
	if err != nil {
		b.do(fmt.Errorf("%s: %w", m.Name, err))
		return
	}
	once := max(median(times), time.Microsecond)
	if _, err = b.launches(min(max(1, int(warmUp/once)), maxLaunches), launch); err == nil {
		times, err = b.launches(min(max(5, int(measuring/once)), maxLaunches), launch)
	}
	if err != nil {
		b.do(fmt.Errorf("%s: %w", m.Name, err))
		return
	}
	m.Time = median(times)
	b.do(b.report(m))
}

// launches returns what each of n launches takes with nothing of use in the cache.
func (b *bench) launches(n int, launch func() error) ([]time.Duration, error) {
	for i := range n {
		if err := errors.Join(b.ctx.Memset8(b.cache, 0, b.size, b.stream), b.ctx.Record(b.events[2*i], b.stream),
			launch(), b.ctx.Record(b.events[2*i+1], b.stream)); err != nil {
			return nil, err
		}
	}
	if err := b.ctx.SyncStream(b.stream); err != nil {
		return nil, err
	}
	times := make([]time.Duration, n)
	for i := range times {
		var err error
		if times[i], err = b.ctx.Elapsed(b.events[2*i], b.events[2*i+1]); err != nil {
			return nil, err
		}
	}
	return times, nil
}

func median(times []time.Duration) time.Duration {
	slices.Sort(times)
	return times[len(times)/2]
}
