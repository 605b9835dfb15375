package kernels

import (
	"encoding/binary"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

var (
	f32  = gpu.Float32
	f16  = gpu.Float16
	bf16 = gpu.BFloat16

	storageTypes = []gpu.DType{f32, bf16, f16}
)

// few is n, and less in short mode: compute-sanitizer's racecheck takes a second for a tile of the plain kernels of attention,
// and tens of milliseconds for any launch.
func few(n, short int) int {
	if testing.Short() {
		return short
	}
	return n
}

// some reports whether to go on with a case: in short mode a third of them, at random.
func (g *rig) some() bool { return !testing.Short() || g.rand.IntN(3) == 0 }

var openGPU = sync.OnceValues(func() (gpu.Context, error) {
	d, err := driver.Open()
	if err != nil {
		return nil, err
	}
	if len(d.Devices()) == 0 {
		return nil, fmt.Errorf("the driver lists no GPU")
	}
	return d.Retain(0)
})

var seedFlag = flag.Uint64("seed", 0, "seed of the tests' random numbers; 0 takes a fresh one")

// rig is a GPU under test: its kernels, a stream, fresh random numbers, and memory that is checked and freed at the end.
type rig struct {
	*testing.T
	*Kernels
	ctx    gpu.Context
	stream gpu.Stream
	rand   *rand.Rand
	bufs   []*buffer
}

// newRig skips the test where there is no GPU.
func newRig(t *testing.T) *rig {
	t.Helper()
	ctx, err := openGPU()
	if err != nil {
		t.Skipf("needs an NVIDIA GPU: %v", err)
	}
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	g := &rig{T: t, Kernels: New(ctx), ctx: ctx, rand: rand.New(rand.NewPCG(seed, 0))}
	g.stream, err = ctx.NewStream()
	g.must(err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
		g.free(0)
		g.must(g.Close())
		g.must(ctx.DestroyStream(g.stream))
	})
	return g
}

func (g *rig) must(err error) {
	g.Helper()
	if err != nil {
		g.Fatal(err)
	}
}

// buffer is an array on the GPU between two guards.
type buffer struct {
	gpu.Ptr
	n     int
	dtype gpu.DType
	base  gpu.Ptr
	lead  int // bytes from base to the array
}

const guard = 256 // bytes on either side

// alloc returns memory for n elements, skew elements past a multiple of 256 bytes; it and the guards are NaN.
func (g *rig) alloc(n int, t gpu.DType, skew int) *buffer {
	g.Helper()
	b := &buffer{n: n, dtype: t, lead: guard + skew*t.Size()}
	var err error
	b.base, err = g.ctx.Alloc(b.total())
	g.must(err)
	g.must(g.ctx.Memset8(b.base, 0xff, b.total(), g.stream))
	b.Ptr = b.base.Offset(b.lead)
	g.bufs = append(g.bufs, b)
	return b
}

func (b *buffer) bytes() int { return b.n * b.dtype.Size() }
func (b *buffer) total() int { return b.lead + b.bytes() + guard }

// free checks the guards of all buffers after the first keep and frees them.
func (g *rig) free(keep int) {
	g.Helper()
	for _, b := range g.bufs[keep:] {
		before, after := make([]byte, b.lead), make([]byte, guard)
		g.must(g.ctx.CopyToHost(before, b.base, g.stream))
		g.must(g.ctx.CopyToHost(after, b.Offset(b.bytes()), g.stream))
		if slices.ContainsFunc(append(before, after...), func(v byte) bool { return v != 0xff }) {
			g.Errorf("a kernel wrote before or behind an array of %d bytes", b.bytes())
		}
		g.must(g.ctx.Free(b.base))
	}
	g.bufs = g.bufs[:keep]
}

// scope runs a subtest whose memory is freed at its end.
func (g *rig) scope(name string, f func(*rig)) {
	g.Helper()
	g.Run(name, func(t *testing.T) {
		sub := *g
		sub.T, sub.bufs = t, nil
		f(&sub)
		sub.free(0)
	})
}

// upload returns the numbers on the GPU, and as they are after rounding to the type.
func (g *rig) upload(x []float64, t gpu.DType, skew int) (*buffer, []float64) {
	g.Helper()
	b := g.alloc(len(x), t, skew)
	raw := encode(x, t)
	g.must(g.ctx.CopyToDevice(b.Ptr, raw, g.stream))
	return b, decode(raw, t)
}

// normal uploads n numbers of the normal distribution.
func (g *rig) normal(n int, t gpu.DType, skew int) (*buffer, []float64) {
	g.Helper()
	x := make([]float64, n)
	for i := range x {
		x[i] = g.rand.NormFloat64()
	}
	return g.upload(x, t, skew)
}

// uploadInts returns ints on the GPU, of 4 or 8 bytes.
func (g *rig) uploadInts(x []int, size int) gpu.Ptr {
	g.Helper()
	var raw []byte
	for _, v := range x {
		if size == 4 {
			raw = binary.LittleEndian.AppendUint32(raw, uint32(int32(v)))
		} else {
			raw = binary.LittleEndian.AppendUint64(raw, uint64(v))
		}
	}
	b := g.alloc(len(raw)/4, f32, 0)
	g.must(g.ctx.CopyToDevice(b.Ptr, raw, g.stream))
	return b.Ptr
}

// read waits for the stream and returns an array's numbers.
func (g *rig) read(b *buffer) []float64 {
	g.Helper()
	raw := make([]byte, b.bytes())
	g.must(g.ctx.CopyToHost(raw, b.Ptr, g.stream))
	return decode(raw, b.dtype)
}

// near fails unless ‖got − want‖ ≤ tol·‖want‖.
func (g *rig) near(what string, b *buffer, want []float64, tol float64) {
	g.Helper()
	if e := distance(g.read(b), want); !(e <= tol) {
		g.Errorf("%s: relative error %.3g, want at most %.3g", what, e, tol)
	}
}

// distance is ‖got − want‖ / ‖want‖; NaN and infinities must stand in the same places.
func distance(got, want []float64) float64 {
	if len(got) != len(want) {
		return math.Inf(1)
	}
	var diff, norm float64
	for i, w := range want {
		switch g := got[i]; {
		case math.IsNaN(w) && math.IsNaN(g), w == g:
		case math.IsNaN(w) || math.IsNaN(g) || math.IsInf(w, 0) || math.IsInf(g, 0):
			return math.NaN()
		default:
			diff += (g - w) * (g - w)
		}
		if w-w == 0 {
			norm += w * w
		}
	}
	if diff == 0 {
		return 0
	}
	return math.Sqrt(diff / norm)
}

// forward is the greatest error that a forward pass in a type may have, backward that of a backward pass.
func forward(t gpu.DType) float64 {
	return map[gpu.DType]float64{f32: 1e-6, f16: 2e-3, bf16: 1e-2}[t]
}

func backward(t gpu.DType) float64 {
	return map[gpu.DType]float64{f32: 1e-5, f16: 2e-3, bf16: 1e-2}[t]
}

// encode rounds numbers to a type, to nearest even.
func encode(x []float64, t gpu.DType) []byte {
	raw := make([]byte, 0, len(x)*t.Size())
	for _, v := range x {
		switch t {
		case f32:
			raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(float32(v)))
		case bf16:
			raw = binary.LittleEndian.AppendUint16(raw, toBF16(float32(v)))
		case f16:
			raw = binary.LittleEndian.AppendUint16(raw, toF16(v))
		case gpu.Float8E4M3:
			raw = append(raw, gpu.E4M3(float32(v)))
		}
	}
	return raw
}

func decode(raw []byte, t gpu.DType) []float64 {
	x := make([]float64, len(raw)/t.Size())
	for i := range x {
		switch t {
		case f32:
			x[i] = float64(math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:])))
		case bf16:
			x[i] = float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(raw[2*i:])) << 16))
		case f16:
			x[i] = fromF16(binary.LittleEndian.Uint16(raw[2*i:]))
		case gpu.Float8E4M3:
			x[i] = float64(gpu.FromE4M3(raw[i]))
		}
	}
	return x
}

func toBF16(v float32) uint16 {
	b := math.Float32bits(v)
	if v != v {
		return 0x7fff
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

func toF16(v float64) uint16 {
	sign := uint16(math.Float64bits(v) >> 48 & 0x8000)
	switch v = math.Abs(v); {
	case v != v:
		return 0x7fff
	case v >= 65520:
		return sign | 0x7c00
	case v < 0x1p-14:
		return sign | uint16(math.RoundToEven(v*0x1p24))
	}
	frac, exp := math.Frexp(v)                                             // frac in [½, 1)
	return sign + uint16(exp+13)<<10 + uint16(math.RoundToEven(frac*2048)) // the leading bit counts towards the exponent
}

func fromF16(h uint16) float64 {
	sign := 1 - 2*float64(h>>15)
	exp, frac := int(h>>10&31), float64(h&1023)
	switch exp {
	case 0:
		return sign * frac * 0x1p-24
	case 31:
		if frac != 0 {
			return math.NaN()
		}
		return sign * math.Inf(1)
	}
	return sign * math.Ldexp(1024+frac, exp-25)
}

// ---- Bandwidth ----

var benchmark = os.Getenv("KASMINA_GPU_BENCH") != ""

// bench reports the bandwidth of a launch that moves so many bytes, as a share of that of a copy in the same run. It runs
// in turn on several sets of arrays, so that none is still in the cache, and inside a CUDA graph, as a machine's step does.
func (g *rig) bench(name string, bytes int, runs []func()) {
	g.Helper()
	d := g.time(runs)
	rate := float64(bytes) / d.Seconds() / 1e9
	g.Logf("%-40s %9.1f µs %6.0f GB/s  %5.1f %% of a copy", name, d.Seconds()*1e6, rate, 100*rate/g.copyRate())
}

// time is the median time of a run, after each has run once.
func (g *rig) time(runs []func()) time.Duration {
	g.Helper()
	const inner = 16
	for _, run := range runs {
		run()
	}
	g.must(g.ctx.BeginCapture(g.stream))
	for i := range inner {
		runs[i%len(runs)]()
	}
	graph, err := g.ctx.EndCapture(g.stream)
	g.must(err)
	defer g.ctx.DestroyGraph(graph)
	return g.clock(func() { g.must(g.ctx.LaunchGraph(graph, g.stream)) }) / inner
}

// clock is the median time of a piece of work on the stream.
func (g *rig) clock(work func()) time.Duration {
	g.Helper()
	var events [12]gpu.Event
	for i := range events {
		var err error
		events[i], err = g.ctx.NewEvent(true)
		g.must(err)
		defer g.ctx.DestroyEvent(events[i])
	}
	work()
	for i, e := range events {
		if i > 0 {
			work()
		}
		g.must(g.ctx.Record(e, g.stream))
	}
	g.must(g.ctx.SyncStream(g.stream))
	times := make([]time.Duration, len(events)-1)
	for i := range times {
		var err error
		times[i], err = g.ctx.Elapsed(events[i], events[i+1])
		g.must(err)
	}
	return median(times)
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

var copyRates struct {
	once sync.Once
	rate float64
}

// copyRate is the bandwidth of a copy of 2 GiB in GB/s, counting bytes read and written.
func (g *rig) copyRate() float64 {
	copyRates.once.Do(func() {
		const n = 1 << 31
		keep := len(g.bufs)
		a, b := g.alloc(n/4, f32, 0), g.alloc(n/4, f32, 0)
		d := g.clock(func() { g.must(g.ctx.CopyOnDevice(a.Ptr, b.Ptr, n, g.stream)) })
		copyRates.rate = 2 * n / d.Seconds() / 1e9
		for _, b := range g.bufs[keep:] {
			g.must(g.ctx.Free(b.base))
		}
		g.bufs = g.bufs[:keep]
		g.Logf("a copy of 2 GiB moves %.0f GB/s", copyRates.rate)
	})
	return copyRates.rate
}

// classes is random targets below v, about one in eight of them negative, the first one not.
func (g *rig) classes(rows, v int) []int {
	ids := make([]int, rows)
	for i := range ids {
		ids[i] = g.rand.IntN(v)
		if i > 0 && g.rand.IntN(8) == 0 {
			ids[i] = -1 - g.rand.IntN(100)
		}
	}
	return ids
}

// large returns n numbers for measuring, which repeat.
func (g *rig) large(n int, t gpu.DType) *buffer {
	g.Helper()
	one, _ := g.normal(1<<16, t, 0)
	b := g.alloc(n, t, 0)
	for at := 0; at < b.bytes(); at += one.bytes() {
		g.must(g.ctx.CopyOnDevice(b.Offset(at), one.Ptr, min(one.bytes(), b.bytes()-at), g.stream))
	}
	return b
}

// fakeAttention is kernels on a GPU of a compute capability that computes nothing, with memory to point to.
func fakeAttention(t *testing.T, capability, sharedPerBlock int) (*Kernels, *fake.Context, gpu.Ptr) {
	d := gpu.DeviceInfo{Name: "Fake", Major: capability / 10, Minor: capability % 10, Memory: 1 << 30, SMs: 100, L2: 40 << 20,
		SharedPerBlock: sharedPerBlock}
	c, err := fake.New(fake.Config{Devices: []gpu.DeviceInfo{d}, AnyKernel: true}).Retain(0)
	if err != nil {
		t.Fatal(err)
	}
	p, err := c.Alloc(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	return New(c), c.(*fake.Context), p
}

// fakeKernels launches on a fake GPU, where every kernel exists and does nothing.
func fakeKernels(t *testing.T) (*Kernels, gpu.Context) {
	t.Helper()
	ctx, err := fake.New(fake.Config{AnyKernel: true}).Retain(0)
	if err != nil {
		t.Fatal(err)
	}
	k := New(ctx)
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	})
	return k, ctx
}

// contiguous is the strides of a tensor without gaps.
func contiguous(dims []int) []int {
	s := make([]int, len(dims))
	n := 1
	for i := len(dims) - 1; i >= 0; i-- {
		s[i] = n
		n *= dims[i]
	}
	return s
}
