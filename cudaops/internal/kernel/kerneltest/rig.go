// Package kerneltest helps to test kernels: on a GPU, with a [Rig] that checks memory accesses and
// compares results with references, and without one, on a fake driver that checks the arguments of
// launches.
package kerneltest

import (
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

var (
	F32  = gpu.Float32
	F16  = gpu.Float16
	Bf16 = gpu.BFloat16

	StorageTypes = []gpu.DType{F32, Bf16, F16}
)

// Few returns n, or short in short mode. Compute-sanitizer's racecheck takes about a second for
// each tile of attention's plain kernels and tens of milliseconds for any launch.
func Few(n, short int) int {
	if testing.Short() {
		return short
	}
	return n
}

// Some reports whether to run a case. In short mode it skips about two thirds of the cases at
// random.
func (g *Rig) Some() bool { return !testing.Short() || g.Rand.IntN(3) == 0 }

var openGPU = sync.OnceValues(func() (gpu.Context, error) {
	d, err := driver.Open()
	if err != nil {
		return nil, err
	}
	return d.Retain(0)
})

// Rig is a GPU under test: its kernels, a stream, random numbers, and memory that is checked and
// freed when the test ends.
type Rig struct {
	*testing.T
	*kernel.Set
	Stream gpu.Stream
	Rand   *rand.Rand
	Bufs   []*Buffer
}

// NewRig returns a Rig for the first GPU. It skips the test without a GPU.
func NewRig(t *testing.T) *Rig {
	t.Helper()
	ctx, err := openGPU()
	if err != nil {
		t.Skipf("needs an NVIDIA GPU: %v", err)
	}

	g := &Rig{T: t, Set: kernel.New(ctx), Rand: randtest.New(t)}
	g.Stream, err = ctx.NewStream(false)
	g.Must(err)
	t.Cleanup(func() {
		g.free()
		g.Must(g.Close())
		g.Must(ctx.DestroyStream(g.Stream))
	})

	return g
}

func (g *Rig) Must(err error) {
	g.Helper()
	if err != nil {
		g.Fatal(err)
	}
}

// Buffer is an array on the GPU between two guard regions.
type Buffer struct {
	gpu.Ptr
	N     int
	Dtype gpu.DType
	base  gpu.Ptr
	lead  int // bytes from base to the array
}

const guard = 256 // bytes before and after an array

// Alloc returns memory for n elements, starting skew elements after a multiple of 256 bytes. The
// memory and its guards are filled with NaN.
func (g *Rig) Alloc(n int, t gpu.DType, skew int) *Buffer {
	g.Helper()
	b := &Buffer{N: n, Dtype: t, lead: guard + skew*t.Size()}
	var err error
	b.base, err = g.Ctx.Alloc(b.total())
	g.Must(err)
	g.Must(g.Ctx.Memset8(b.base, 0xff, b.total(), g.Stream))
	b.Ptr = b.base.Offset(b.lead)
	g.Bufs = append(g.Bufs, b)
	return b
}

func (b *Buffer) Bytes() int { return b.N * b.Dtype.Size() }
func (b *Buffer) total() int { return b.lead + b.Bytes() + guard }

// free checks the guards of all buffers and frees the buffers.
func (g *Rig) free() {
	g.Helper()
	for _, b := range g.Bufs {
		before, after := make([]byte, b.lead), make([]byte, guard)
		g.Must(g.Ctx.CopyToHost(before, b.base, g.Stream))
		g.Must(g.Ctx.CopyToHost(after, b.Offset(b.Bytes()), g.Stream))
		if slices.ContainsFunc(append(before, after...), func(v byte) bool { return v != 0xff }) {
			g.Errorf("a kernel wrote before or after an array of %d bytes", b.Bytes())
		}
		g.Must(g.Ctx.Free(b.base))
	}
}

// Scope runs f as a subtest and frees the memory allocated in it.
func (g *Rig) Scope(name string, f func(*Rig)) {
	g.Helper()
	g.Run(name, func(t *testing.T) {
		sub := *g
		sub.T, sub.Bufs = t, nil
		f(&sub)
		sub.free()
	})
}

// Upload copies numbers to the GPU. It also returns them as rounded to the type.
func (g *Rig) Upload(x []float64, t gpu.DType, skew int) (*Buffer, []float64) {
	g.Helper()
	b := g.Alloc(len(x), t, skew)
	raw := Encode(x, t)
	g.Must(g.Ctx.CopyToDevice(b.Ptr, raw, g.Stream))
	return b, Decode(raw, t)
}

// Normal uploads n normally distributed numbers.
func (g *Rig) Normal(n int, t gpu.DType, skew int) (*Buffer, []float64) {
	g.Helper()
	x := make([]float64, n)
	for i := range x {
		x[i] = g.Rand.NormFloat64()
	}
	return g.Upload(x, t, skew)
}

// UploadInts copies ints to the GPU.
func (g *Rig) UploadInts(x []int) gpu.Ptr {
	g.Helper()
	b := g.Alloc(2*len(x), F32, 0)
	g.Must(g.Ctx.CopyToDevice(b.Ptr, gpu.Bytes(x), g.Stream))
	return b.Ptr
}

// Read waits for the stream and returns an array's numbers.
func (g *Rig) Read(b *Buffer) []float64 {
	g.Helper()
	raw := make([]byte, b.Bytes())
	g.Must(g.Ctx.CopyToHost(raw, b.Ptr, g.Stream))
	return Decode(raw, b.Dtype)
}

// Near fails the test unless ‖got − want‖ ≤ tol·‖want‖, with an allowance for float16's precision
// near zero; see Lost.
func (g *Rig) Near(what string, b *Buffer, want []float64, tol float64) {
	g.Helper()
	tol += Lost(want, b.Dtype)
	if e := Distance(g.Read(b), want); !(e <= tol) {
		g.Errorf("%s: relative error %.3g, want at most %.3g", what, e, tol)
	}
}

// Lost returns the relative error ‖got − want‖/‖want‖ that rounding to float16 may cause near zero, where its
// numbers are 2⁻²⁴ apart. It is 0 for float32 and bfloat16, which represent much smaller numbers than any test
// contains.
func Lost(want []float64, t gpu.DType) float64 {
	if norm := Norm(want); t == F16 && norm > 0 {
		return math.Sqrt(float64(len(want))) * 0x1p-25 / norm
	}
	return 0
}

// Norm returns ‖x‖.
func Norm(x []float64) float64 {
	var squares float64
	for _, v := range x {
		squares += v * v
	}
	return math.Sqrt(squares)
}

// Distance returns ‖got − want‖ / ‖want‖. NaN and infinities must be in the same places in both.
func Distance(got, want []float64) float64 {
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

// Forward returns the largest relative error allowed in a forward pass with the given type, and
// Backward the largest error in a backward pass.
func Forward(t gpu.DType) float64 {
	return map[gpu.DType]float64{F32: 1e-6, F16: 2e-3, Bf16: 1e-2}[t]
}

func Backward(t gpu.DType) float64 {
	return map[gpu.DType]float64{F32: 1e-5, F16: 2e-3, Bf16: 1e-2}[t]
}

// Encode rounds numbers to a type.
func Encode(x []float64, t gpu.DType) []byte {
	raw := make([]byte, len(x)*t.Size())
	gpu.Encode(raw, t, x)
	return raw
}

func Decode(raw []byte, t gpu.DType) []float64 {
	x := make([]float64, len(raw)/t.Size())
	gpu.Decode(x, t, raw)
	return x
}

// Classes returns random targets less than v. About one in eight is negative, but never the first.
func (g *Rig) Classes(rows, v int) []int {
	ids := make([]int, rows)
	for i := range ids {
		ids[i] = g.Rand.IntN(v)
		if i > 0 && g.Rand.IntN(8) == 0 {
			ids[i] = -1 - g.Rand.IntN(100)
		}
	}
	return ids
}

// FakeGPU returns the kernels on a fake GPU of the given compute capability, which executes
// nothing, and memory for launches to point to.
func FakeGPU(t *testing.T, capability, sharedPerBlock int) (*kernel.Set,
	*fake.Context, gpu.Ptr) {
	d := gpu.DeviceInfo{Name: "Fake", Major: capability / 10, Minor: capability % 10,
		Memory: 1 << 30, SMs: 100, L2: 40 << 20,
		SharedPerBlock: sharedPerBlock}
	c, err := fake.New(fake.Config{Devices: []gpu.DeviceInfo{d}, Images: Kernels}).Retain(0)
	require.NoError(t, err)
	p, err := c.Alloc(1 << 20)
	require.NoError(t, err)
	return kernel.New(c), c.(*fake.Context), p
}

// MatchSource checks that a source file of the family under test contains the given pieces of text.
// Tests run in the folder of that family.
func MatchSource(t *testing.T, name string, pieces ...string) {
	t.Helper()
	source, err := os.ReadFile(name)
	require.NoError(t, err)
	for _, p := range pieces {
		require.Contains(t, string(source), p, name)
	}
}
