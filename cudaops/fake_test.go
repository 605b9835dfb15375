package cudaops

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/attention"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/crossentropy"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/decode"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/embedding"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/layout"
	normkernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/normalize"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	preferencekernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/preference"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/reduce"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/rope"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/sample"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/silu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/softmax"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/cpu/array"
	cpuattention "github.com/kasmina-go/kasmina/internal/cpu/attention"
	cpucrossentropy "github.com/kasmina-go/kasmina/internal/cpu/crossentropy"
	cpugemm "github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	cpuoptimizer "github.com/kasmina-go/kasmina/internal/cpu/optimizer"
	"github.com/kasmina-go/kasmina/internal/cpu/preference"
	"github.com/kasmina-go/kasmina/internal/cpu/sampling"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/quant"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/splitmix"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// fakeKernels implements the kernels in Go, in float32, on the fake driver's memory and in the order of
// its streams. Every launch is a launch of the same fake kernel. Its argument is the index of the call to
// compute.
type fakeKernels struct {
	ctx    gpu.Context
	module gpu.Module
	call   *gpu.Function // nil until the first launch

	computes map[reflect.Type]reflect.Value // methods by the type of launch that they compute

	mu    sync.Mutex
	calls []func(*fake.Launch)
}

// openFake returns a device of a fake driver. Its machines use fakeKernels.
func openFake(t testing.TB, c fake.Config) (*Device, *fake.Driver) {
	t.Helper()
	k := &fakeKernels{computes: map[reflect.Type]reflect.Value{}}
	for i := range reflect.TypeOf(k).NumMethod() {
		f := reflect.ValueOf(k).Method(i)
		if f.Type().NumIn() == 2 && f.Type().In(0) == reflect.TypeFor[*fake.Launch]() {
			k.computes[f.Type().In(1)] = f
		}
	}

	c.Kernels = map[string]fake.Kernel{"call": func(l *fake.Launch) {
		i := fake.Arg[int32](l)
		k.mu.Lock()
		f := k.calls[i]
		k.mu.Unlock()
		f(l)
	}}

	d := fake.New(c)
	device, err := Open(withDriver(d))
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, device.Close())
	})
	k.ctx, device.kernels = device.ctx, k
	return device, d
}

// load loads the module, as the first launch of a kernel does on a GPU.
func (k *fakeKernels) load() (err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.call != nil {
		return nil
	}

	if k.module, err = k.ctx.LoadModule([]byte("fake")); err != nil {
		return err
	}

	if k.call, err = k.ctx.Function(k.module, "call"); err != nil {
		return errors.Join(err, k.ctx.UnloadModule(k.module))
	}

	return nil
}

// Close unloads the module. The next launch loads it again.
func (k *fakeKernels) Close() error {
	if k.call == nil {
		return nil
	}
	k.call = nil
	err := k.ctx.UnloadModule(k.module)
	if lost := new(gpu.Error); errors.As(err, &lost) && lost.Sticky() {
		return nil // the module went with the context
	}
	return err
}

// requireNoLeaks checks that closed machines have released everything.
func requireNoLeaks(t testing.TB, device *Device, args ...any) {
	t.Helper()
	require.NoError(t, device.kernels.Close(), args...)
	require.Empty(t, device.ctx.(*fake.Context).Leaks(), args...)
}

func (k *fakeKernels) launch(s gpu.Stream, f func(*fake.Launch)) error {
	if err := k.load(); err != nil {
		return err
	}
	k.mu.Lock()
	k.calls = append(k.calls, f)
	i := len(k.calls) - 1
	k.mu.Unlock()
	var args gpu.Args
	gpu.Add(&args, int32(i))
	return k.ctx.Launch(k.call, gpu.LaunchConfig{}, s, &args)
}

// Launch enqueues the computation for params.
func (k *fakeKernels) Launch(s gpu.Stream, params any) error {
	compute, ok := k.computes[reflect.TypeOf(params)]
	if !ok {
		return fmt.Errorf("the fake driver has no kernel for %T", params)
	}
	return k.launch(s, func(l *fake.Launch) {
		compute.Call([]reflect.Value{reflect.ValueOf(l), reflect.ValueOf(params)})
	})
}

// Variants returns the variants of the kernels that the fake implements.
func (k *fakeKernels) Variants(params any) []kernel.Variant {
	switch p := params.(type) {
	case gemm.SiLUProduct, gemm.SiLUProductBackward, gemm.RoPEProduct, gemm.LinearCrossEntropy,
		gemm.ProductSum, gemm.RowProduct, gemm.ColumnProduct, gemm.NarrowProducts:
		return []kernel.Variant{{Family: "fused"}}
	case gemm.Symmetric:
		if p.N%8 == 0 && p.Depth%8 == 0 {
			return []kernel.Variant{{Family: "half"}}
		}
	}
	return nil
}

func (k *fakeKernels) Dropout(l *fake.Launch, a elementwise.Dropout) {
	key := splitmix.Mix(uint64(fake.Slice[int64](l, a.Key, 1)[0])) ^ splitmix.Mix(a.Salt)
	layer.Dropout(floatsAt(l, a.Y, a.N), floatsAt(l, a.X, a.N), a.P, func(i int) bool {
		return float64(splitmix.Mix(key+uint64(i))>>11) >= a.P*(1<<53)
	})
}

func (k *fakeKernels) Unary(l *fake.Launch, a elementwise.Unary) {
	out, in := fake.Slice[float32](l, a.Y, a.N), fake.Slice[float32](l, a.X, a.N)
	for i, v := range in {
		out[i] = float32(unaryOps[a.Op](float64(v), a.P))
	}
}

// unaryOps implements the elementwise ops on a number v and a parameter p.
var unaryOps = map[elementwise.UnaryOp]func(v, p float64) float64{
	elementwise.Identity:    func(v, p float64) float64 { return v },
	elementwise.Step:        func(v, p float64) float64 { return truth(v > 0) },
	elementwise.Neg:         func(v, p float64) float64 { return -v },
	elementwise.Abs:         func(v, p float64) float64 { return math.Abs(v) },
	elementwise.Square:      func(v, p float64) float64 { return v * v },
	elementwise.Cube:        func(v, p float64) float64 { return v * v * v },
	elementwise.Sqrt:        func(v, p float64) float64 { return math.Sqrt(v) },
	elementwise.Inverse:     func(v, p float64) float64 { return 1 / v },
	elementwise.InverseSqrt: func(v, p float64) float64 { return 1 / math.Sqrt(v) },
	elementwise.Exp:         func(v, p float64) float64 { return math.Exp(v) },
	elementwise.Expm1:       func(v, p float64) float64 { return math.Expm1(v) },
	elementwise.Log:         func(v, p float64) float64 { return math.Log(v) },
	elementwise.Log1p:       func(v, p float64) float64 { return math.Log1p(v) },
	elementwise.Log2:        func(v, p float64) float64 { return math.Log2(v) },
	elementwise.Tanh:        func(v, p float64) float64 { return math.Tanh(v) },
	elementwise.Sigmoid:     func(v, p float64) float64 { return 1 / (1 + math.Exp(-v)) },
	elementwise.Softplus:    func(v, p float64) float64 { return math.Log1p(math.Exp(v)) },
	elementwise.Sin:         func(v, p float64) float64 { return math.Sin(v) },
	elementwise.Cos:         func(v, p float64) float64 { return math.Cos(v) },
	elementwise.Ceil:        func(v, p float64) float64 { return math.Ceil(v) },
	elementwise.Floor:       func(v, p float64) float64 { return math.Floor(v) },
	elementwise.Sign:        func(v, p float64) float64 { return truth(v > 0) - truth(v < 0) },
	elementwise.AddScalar:   func(v, p float64) float64 { return v + p },
	elementwise.MulScalar:   func(v, p float64) float64 { return v * p },
	elementwise.SubFrom:     func(v, p float64) float64 { return p - v },
	elementwise.DivideInto:  func(v, p float64) float64 { return p / v },
	elementwise.PowScalar:   func(v, p float64) float64 { return math.Pow(v, p) },
	elementwise.PowOf:       func(v, p float64) float64 { return math.Pow(p, v) },
	elementwise.GELU: func(v, _ float64) float64 {
		y := []float64{0}
		layer.GELU(y, []float64{v})
		return y[0]
	},
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// binaryOps implements the elementwise ops on two numbers.
var binaryOps = map[elementwise.BinaryOp]func(a, b float64) float64{
	elementwise.Add:          func(a, b float64) float64 { return a + b },
	elementwise.Sub:          func(a, b float64) float64 { return a - b },
	elementwise.Mul:          func(a, b float64) float64 { return a * b },
	elementwise.Div:          func(a, b float64) float64 { return a / b },
	elementwise.Pow:          math.Pow,
	elementwise.Maximum:      math.Max,
	elementwise.Minimum:      math.Min,
	elementwise.Less:         func(a, b float64) float64 { return truth(a < b) },
	elementwise.LessEqual:    func(a, b float64) float64 { return truth(a <= b) },
	elementwise.Greater:      func(a, b float64) float64 { return truth(a > b) },
	elementwise.GreaterEqual: func(a, b float64) float64 { return truth(a >= b) },
	elementwise.Equal:        func(a, b float64) float64 { return truth(a == b) },
	elementwise.NotEqual:     func(a, b float64) float64 { return truth(a != b) },
	elementwise.GELUGradient: func(a, b float64) float64 {
		dx := []float64{0}
		layer.GELUBackward(dx, []float64{a}, []float64{b})
		return dx[0]
	},
}

func (k *fakeKernels) Binary(l *fake.Launch, a elementwise.Binary) {
	out := fake.Slice[float32](l, a.Y, a.N)
	element := func(o elementwise.Operand) func(int) float32 {
		period := a.N
		if o.Period != 0 {
			period = o.Period
		}
		x := fake.Slice[float32](l, o.Ptr, period)
		return func(i int) float32 { return x[i/max(1, o.Repeat)%period] }
	}

	x, z := element(a.A), element(a.B)
	for i := range out {
		out[i] = float32(binaryOps[a.Op](float64(x(i)), float64(z(i))))
	}
}

func (k *fakeKernels) Softmax(l *fake.Launch, a softmax.Forward) {
	in, out := floatsAt(l, a.X, a.Rows*a.N), floatsAt(l, a.Y, a.Rows*a.N)
	for r := range a.Rows {
		largest, sum := slices.Max(in[r*a.N:][:a.N]), 0.0
		for _, v := range in[r*a.N:][:a.N] {
			sum += math.Exp(float64(v - largest))
		}
		for i := r * a.N; i < r*a.N+a.N; i++ {
			out[i] = float32(math.Exp(float64(in[i]-largest)) / sum)
		}
	}
}

func (k *fakeKernels) SoftmaxBackward(l *fake.Launch, a softmax.Backward) {
	size := a.Rows * a.N
	up, out, d := floatsAt(l, a.G, size), floatsAt(l, a.Y, size), floatsAt(l, a.DX, size)
	for r := range a.Rows {
		dot := 0.0
		for i := r * a.N; i < r*a.N+a.N; i++ {
			dot += float64(up[i] * out[i])
		}
		for i := r * a.N; i < r*a.N+a.N; i++ {
			d[i] = out[i] * (up[i] - float32(dot))
		}
	}
}

func (k *fakeKernels) Copy(l *fake.Launch, a layout.Copy) {
	extent := func(strides []int) int {
		last := 0
		for i, d := range a.Dims {
			last += (d - 1) * strides[i]
		}
		return (last + 1) * a.Size
	}

	y, x := fake.Slice[byte](l, a.Y, extent(a.YStrides)),
		fake.Slice[byte](l, a.X, extent(a.XStrides))
	var walk func(dim, to, from int)
	walk = func(dim, to, from int) {
		if dim == len(a.Dims) {
			copy(y[to*a.Size:][:a.Size], x[from*a.Size:])
			return
		}
		for i := range a.Dims[dim] {
			walk(dim+1, to+i*a.YStrides[dim], from+i*a.XStrides[dim])
		}
	}

	walk(0, 0, 0)
}

func floatsAt(l *fake.Launch, p gpu.Ptr, n int) []float32 { return fake.Slice[float32](l, p, n) }

func intsAt(l *fake.Launch, p gpu.Ptr, n int) []int {
	ids := make([]int, n)
	for i, v := range fake.Slice[int64](l, p, n) {
		ids[i] = int(v)
	}
	return ids
}

func (k *fakeKernels) Cast(l *fake.Launch, a elementwise.Cast) {
	if a.YType == a.XType {
		n := a.N * a.YType.Size()
		copy(fake.Slice[byte](l, a.Y, n), fake.Slice[byte](l, a.X, n))
		return
	}
	copy(floatsAt(l, a.Y, a.N), floatsAt(l, a.X, a.N))
}

func (k *fakeKernels) Axpby(l *fake.Launch, a elementwise.Axpby) {
	out := floatsAt(l, a.Y, a.N)
	for i, v := range gradientAt(l, optimizer.Tensor{Grad: a.X, GradType: a.XType}, a.N) {
		if a.Beta == 0 { // out may hold anything
			out[i] = float32(a.Alpha) * v
			continue
		}
		out[i] = float32(a.Alpha)*v + float32(a.Beta)*out[i]
	}
}

func (k *fakeKernels) RMSNorm(l *fake.Launch, a normkernel.RMSNorm) {
	n := a.Rows * a.D
	x := floatsAt(l, a.X, n)
	if a.Residual != 0 {
		sum, residual := floatsAt(l, a.Sum, n), floatsAt(l, a.Residual, n)
		for i, v := range x {
			sum[i] = v + residual[i]
		}
		x = sum
	}

	layer.RMSNorm(floatsAt(l, a.Y, n), floatsAt(l, a.Rstd, a.Rows), x,
		floatsAt(l, a.W, a.D), a.Eps)
	float8At(l, a.Y8, a.Scale8, rowsAt(l, a.Y, a.Rows, a.D, 0))
}

func (k *fakeKernels) LayerNorm(l *fake.Launch, a normkernel.LayerNorm) {
	n := a.Rows * a.D
	layer.LayerNorm(floatsAt(l, a.Y, n), floatsAt(l, a.Stats, a.Rows*normkernel.LayerNormStats),
		floatsAt(l, a.X, n), floatsAt(l, a.W, a.D), floatsAt(l, a.B, a.D), a.Eps)
}

func (k *fakeKernels) LayerNormBackward(l *fake.Launch, a normkernel.LayerNormBackward) {
	n := a.Rows * a.D
	floatsAt(l, a.Workspace, 2*a.D)
	dx := floatsAt(l, a.DX, n)
	layer.LayerNormBackward(dx, floatsOr(l, a.DW, a.D), floatsOr(l, a.DB, a.D), floatsAt(l, a.G, n),
		floatsAt(l, a.X, n), floatsAt(l, a.W, a.D),
		floatsAt(l, a.Stats, a.Rows*normkernel.LayerNormStats))

	if a.Add != 0 {
		for i, v := range floatsAt(l, a.Add, n) {
			dx[i] += v
		}
	}
}

// floatsOr returns n floats at p, or in memory that nothing reads if p is null.
func floatsOr(l *fake.Launch, p gpu.Ptr, n int) []float32 {
	if p == 0 {
		return make([]float32, n)
	}
	return floatsAt(l, p, n)
}

func (k *fakeKernels) Build() string { return "fake" }

func (k *fakeKernels) RMSNormBackward(l *fake.Launch, a normkernel.RMSNormBackward) {
	n := a.Rows * a.D
	floatsAt(l, a.Workspace, a.D)
	layer.RMSNormBackward(floatsAt(l, a.DX, n), floatsOr(l, a.DW, a.D), floatsAt(l, a.G, n),
		floatsAt(l, a.X, n), floatsAt(l, a.W, a.D), floatsAt(l, a.Rstd, a.Rows))
	if a.Add != 0 {
		dx := floatsAt(l, a.DX, n)
		for i, v := range floatsAt(l, a.Add, n) {
			dx[i] += v
		}
	}

	float8At(l, a.DX8, a.Scale8, rowsAt(l, a.DX, a.Rows, a.D, 0))
}

func (k *fakeKernels) RoPE(l *fake.Launch, a rope.Rotate) {
	width, h := a.Heads*a.HeadDim, a.HeadDim/2
	cos, sin := floatsAt(l, a.Cos, a.Seq*h), floatsAt(l, a.Sin, a.Seq*h)
	y, x := rowsAt(l, a.Y, a.Rows, width, a.YStride), rowsAt(l, a.X, a.Rows, width, a.XStride)
	for i := range y {
		at := i % a.Seq * h
		layer.RoPE(y[i], x[i], cos[at:], sin[at:], 1, a.Heads, a.HeadDim, a.Inverse)
	}
}

// rowsAt returns rows of f floats at distance stride, or f if stride is 0.
func rowsAt(l *fake.Launch, p gpu.Ptr, rows, f, stride int) [][]float32 {
	if stride == 0 {
		stride = f
	}
	r := make([][]float32, rows)
	for i := range r {
		r[i] = floatsAt(l, p.Offset(4*i*stride), f)
	}
	return r
}

// halvesAt returns the left and right halves of rows of 2f floats.
func halvesAt(l *fake.Launch, p gpu.Ptr, rows, f int) (a, b [][]float32) {
	for _, row := range rowsAt(l, p, rows, 2*f, 0) {
		a, b = append(a, row[:f]), append(b, row[f:])
	}
	return a, b
}

func (k *fakeKernels) SiLUMul(l *fake.Launch, a silu.Mul) {
	x, y := halvesAt(l, a.AB, a.Rows, a.F)
	h := make([][]float32, a.Rows)
	for i := range h {
		h[i] = make([]float32, a.F)
	}

	if a.H != 0 {
		h = rowsAt(l, a.H, a.Rows, a.F, 0)
	}

	mul := layer.SiLUMul[float32]
	if a.GELU {
		mul = layer.GELUMul[float32]
	}

	for i := range h {
		mul(h[i], x[i], y[i])
	}

	float8At(l, a.H8, a.Scale8, h)
}

func (k *fakeKernels) SiLUMulBackward(l *fake.Launch, a silu.MulBackward) {
	h, dh := rowsAt(l, a.H, a.Rows, a.F, 0), rowsAt(l, a.DH, a.Rows, a.F, 0)
	x, y := halvesAt(l, a.AB, a.Rows, a.F)
	dx, dy := halvesAt(l, a.DAB, a.Rows, a.F)
	backward := layer.SiLUMulBackward[float32]
	if a.GELU {
		backward = layer.GELUMulBackward[float32]
	}

	for i := range h {
		backward(h[i], dx[i], dy[i], dh[i], x[i], y[i])
	}

	float8At(l, a.DAB8, a.Scale8, rowsAt(l, a.DAB, a.Rows, 2*a.F, 0))
}

func (k *fakeKernels) Embedding(l *fake.Launch, a embedding.Forward) {
	layer.Embedding(floatsAt(l, a.Y, a.Rows*a.D), intsAt(l, a.IDs, a.Rows),
		floatsAt(l, a.Table, a.Vocab*a.D), a.D)
}

func (k *fakeKernels) EmbeddingBackward(l *fake.Launch, a embedding.Backward) {
	fake.Slice[byte](l, a.Workspace, a.WorkspaceBytes(gpu.DeviceInfo{}))
	dt := floatsAt(l, a.DT, a.Vocab*a.D)
	old := slices.Clone(dt)
	layer.EmbeddingBackward(dt, intsAt(l, a.IDs, a.Rows), floatsAt(l, a.G, a.Rows*a.D), a.D)
	if a.Accumulate {
		for i, v := range old {
			dt[i] += v
		}
	}
}

func (k *fakeKernels) CrossEntropyScale(l *fake.Launch, a crossentropy.Scale) {
	floatsAt(l, a.Scale, 1)[0] = 1 / float32(cpucrossentropy.Targets(intsAt(l, a.Targets, a.Rows)))
}

func (k *fakeKernels) CrossEntropy(l *fake.Launch, a crossentropy.Forward) {
	logits, losses, targets := floatsAt(l, a.Logits, a.Rows*a.V), floatsAt(l, a.Losses, a.Rows),
		intsAt(l, a.Targets, a.Rows)
	normalizers := make([]float32, 2*a.Rows)
	if a.Normalizers != 0 {
		normalizers = floatsAt(l, a.Normalizers, 2*a.Rows)
	}

	for r, target := range targets {
		losses[r] = 0
		if row := logits[r*a.V:][:a.V]; target >= 0 {
			losses[r] = float32(cpucrossentropy.Forward(normalizers[2*r:2*r+2], row,
				targets[r:r+1], a.V))
		}
	}

	if a.Scale != 0 {
		cpucrossentropy.Backward(logits, logits, normalizers, targets, a.V,
			floatsAt(l, a.Scale, 1)[0]*upstream(l, a))
	}
}

func upstream(l *fake.Launch, a crossentropy.Forward) float32 {
	if a.Grad == 0 {
		return 1
	}
	return floatsAt(l, a.Grad, 1)[0]
}

func (k *fakeKernels) CrossEntropyMean(l *fake.Launch, a crossentropy.Mean) {
	var sum float32
	for _, v := range floatsAt(l, a.Losses, a.Rows) {
		sum += v
	}
	floatsAt(l, a.Mean, 1)[0] = sum * floatsAt(l, a.Scale, 1)[0]
}

func (k *fakeKernels) CrossEntropyBackward(l *fake.Launch, a crossentropy.Backward) {
	n := a.Rows * a.V
	cpucrossentropy.Backward(floatsAt(l, a.Out, n), floatsAt(l, a.Logits, n),
		floatsAt(l, a.Normalizers, 2*a.Rows), intsAt(l, a.Targets, a.Rows), a.V,
		floatsAt(l, a.Scale, 1)[0]*upstream(l, a.Forward))
}

func (k *fakeKernels) PreferenceLoss(l *fake.Launch, a preferencekernel.Forward) {
	pairs := make([]preference.Pair, a.Rows)
	n := preference.Gather(pairs, floatsAt(l, a.LogProbs, a.Rows), floatsAt(l, a.Reference, a.Rows),
		intsAt(l, a.Answers, a.Rows))
	figures, gradients := floatsAt(l, a.Figures, preferencekernel.FigureCount), floatsAt(l, a.Gradients, 2*a.Rows)
	clear(figures)

	figures[0] = float32(n)
	loss := 0.0
	for i, x := range pairs {
		if !x.Present() {
			continue
		}
		one, grad := a.Pair.Of(x)
		loss += one
		gradients[2*i], gradients[2*i+1] = float32(grad[0]), float32(grad[1])
		if x.Ratio[0] > x.Ratio[1] {
			figures[1]++
		}
		figures[2] += float32(a.Pair.Beta * x.Ratio[0])
		figures[3] += float32(a.Pair.Beta * x.Ratio[1])
	}
	floatsAt(l, a.Loss, 1)[0] = float32(loss / float64(n))
}

func (k *fakeKernels) PreferenceLossGradient(l *fake.Launch, a preferencekernel.Backward) {
	dx, gradients := floatsAt(l, a.DX, a.Rows), floatsAt(l, a.Gradients, 2*a.Rows)
	each := floatsAt(l, a.Grad, 1)[0] / floatsAt(l, a.Figures, 1)[0]
	for r, answer := range intsAt(l, a.Answers, a.Rows) {
		if dx[r] = 0; answer >= 0 {
			dx[r] = each * gradients[answer]
		}
	}
}

func (k *fakeKernels) GradSquares(l *fake.Launch, a optimizer.GradSquares) {
	out := floatsAt(l, a.Squares, a.Table.Chunks)
	clear(out)
	for _, p := range a.Table.Tensors {
		chunk := int(p.FirstChunk)
		for part := range slices.Chunk(gradientAt(l, p, p.Size), optimizer.Chunk) {
			for _, g := range part {
				out[chunk] += g * g
			}
			if math.IsInf(float64(out[chunk]), 1) {
				out[chunk] = -float32(math.Sqrt(array.SumSquares(part))) // as optim.cu does
			}
			chunk++
		}
	}
}

// gradientAt returns the first n elements of a gradient: its memory if it is one float32 array, otherwise
// a copy.
func gradientAt(l *fake.Launch, p optimizer.Tensor, n int) []float32 {
	if other := p.Other; other != 0 {
		p.Other = 0
		g := slices.Clone(gradientAt(l, p, n))
		p.Grad = other
		for i, v := range gradientAt(l, p, n) {
			g[i] += v
		}
		return g
	}

	if p.GradType != gpu.BFloat16 {
		return floatsAt(l, p.Grad, n)
	}

	g := make([]float32, n)
	for i, v := range fake.Slice[uint16](l, p.Grad, n) {
		g[i] = math.Float32frombits(uint32(v) << 16)
	}

	return g
}

// control returns the control block, its contents, and the function that GradNorm has determined for
// scaling the gradients of a tensor.
func control(l *fake.Launch, p gpu.Ptr) (b []byte, c optimizer.Control,
	multiplier func(optimizer.Tensor) float64) {
	b = fake.Slice[byte](l, p, optimizer.ControlBytes)
	c = optimizer.DecodeControl(b)
	return b, c, func(t optimizer.Tensor) float64 {
		if t.Apart {
			return float64(c.Apart)
		}
		return float64(c.Multiplier)
	}
}

func (k *fakeKernels) GradNorm(l *fake.Launch, a optimizer.GradNorm) {
	b, c, _ := control(l, a.Control)
	var sum, other float64
	flags := make([]byte, a.Count)
	if a.Apart != 0 {
		flags = fake.Slice[byte](l, a.Apart, a.Count)
	}

	for i, v := range floatsAt(l, a.Squares, a.Count) {
		square := float64(v)
		if square < 0 { // the negative root, because float32 cannot hold the square
			square *= square
		}
		if flags[i] != 0 {
			other += square
		} else {
			sum += square
		}
	}

	multiplier := c.GradScale
	if a.Scale != 0 {
		multiplier /= float64(floatsAt(l, a.Scale, 1)[0])
	}

	norm, own := float32(math.Sqrt(sum)*multiplier), float32(math.Sqrt(other)*multiplier)
	multiplierApart := multiplier
	c.Skipped = norm-norm != 0 || own-own != 0
	if c.MaxNorm > 0 {
		multiplier *= min(1, c.MaxNorm/(float64(norm)+1e-6))
		multiplierApart *= min(1, c.MaxNorm/(float64(own)+1e-6))
	}

	if c.Skipped {
		norm += own
	}

	c.Norm, c.Multiplier, c.Apart = norm, float32(multiplier), float32(multiplierApart)
	if a.Scale != 0 {
		c.Next = nextLossScale(fake.Slice[byte](l, a.Scale, optimizer.LossScaleBytes), c.Skipped)
	}

	copy(b, c.Bytes())
}

// nextLossScale updates the loss scale after a step.
func nextLossScale(at []byte, skipped bool) optimizer.LossScale {
	s := optimizer.LossScale{Scale: gpu.View[float32](at)[0], Good: gpu.View[int32](at)[1] + 1,
		Skipped: gpu.View[int32](at)[2]}
	switch {
	case skipped:
		s = optimizer.LossScale{Scale: max(1, s.Scale/2), Skipped: s.Skipped + 1}
	case s.Good == 2000:
		s.Scale, s.Good = 2*s.Scale, 0
	}
	copy(at, s.Bytes())
	return s
}

// fakeSteps contains the elementwise optimizers. Each function gets a tensor's parameter, its scaled
// gradient and the step's learning rate.
var fakeSteps = map[string]func(l *fake.Launch, t optimizer.Tensor, p, g []float32, lr, eps float64){
	"AdamW": func(l *fake.Launch, t optimizer.Tensor, p, g []float32, lr, eps float64) {
		cpuoptimizer.AdamW(p, g, floatsAt(l, t.Moments[0], t.Size), floatsAt(l, t.Moments[1], t.Size),
			cpuoptimizer.AdamWStep{LR: lr, Beta1: t.Beta1, Beta2: t.Beta2, Eps: eps, Decay: t.Decay,
				Step: int(t.Step)})
	},
	"AdamW8bit": func(l *fake.Launch, t optimizer.Tensor, p, g []float32, lr, eps float64) {
		blocks := (t.Size + cpuoptimizer.Block8 - 1) / cpuoptimizer.Block8
		cpuoptimizer.AdamW8bit(p, g, fake.Slice[uint8](l, t.Moments[0], t.Size),
			fake.Slice[uint8](l, t.Moments[2], t.Size), floatsAt(l, t.Moments[1], blocks),
			floatsAt(l, t.Moments[3], blocks), cpuoptimizer.AdamWStep{LR: lr, Beta1: t.Beta1,
				Beta2: t.Beta2, Eps: eps, Decay: t.Decay, Step: int(t.Step)})
	},
	"Lion": func(l *fake.Launch, t optimizer.Tensor, p, g []float32, lr, _ float64) {
		cpuoptimizer.Lion(p, g, floatsAt(l, t.Moments[0], t.Size),
			cpuoptimizer.LionStep{LR: lr, Beta1: t.Beta1, Beta2: t.Beta2, Decay: t.Decay})
	},
}

func (k *fakeKernels) Elementwise(l *fake.Launch, a optimizer.Elementwise) {
	_, c, scale := control(l, a.Control)
	if c.Skipped {
		return
	}

	for i := range a.Table.Tensors {
		t := &a.Table.Tensors[i]
		t.Step++
		g := slices.Clone(gradientAt(l, *t, t.Size))
		array.ScaleBy(g, scale(*t))
		fakeSteps[a.Kernel](l, *t, floatsAt(l, t.Param, t.Size), g, c.LR*t.LRScale, c.Eps)
		writeCopy(l, *t)
	}
}

func writeCopy(l *fake.Launch, p optimizer.Tensor) {
	if p.Copy != 0 {
		copy(floatsAt(l, p.Copy, p.Size), floatsAt(l, p.Param, p.Size))
	}
}

func (k *fakeKernels) Direction(l *fake.Launch, a optimizer.Direction) {
	_, c, scale := control(l, a.Control)
	if c.Skipped {
		return
	}

	workspace := floatsAt(l, a.Squares, a.Table.Chunks)
	for i := range workspace {
		workspace[i] = float32(math.NaN())
	}

	for _, p := range a.Table.Tensors {
		g, m, u := gradientAt(l, p, p.Size), floatsAt(l, p.Moments[0], p.Size),
			floatsAt(l, p.Direction, p.Size)
		mu := float32(p.Beta1)
		var sum float64
		for i, v := range g {
			v = max(-0x1p126, min(0x1p126, v*float32(scale(p))))
			m[i] += (1 - mu) * (v - m[i])
			u[i] = m[i]
			if a.Nesterov {
				u[i] = v + mu*(m[i]-v)
			}
			sum += float64(u[i]) * float64(u[i])
		}
		array.ScaleBy(u, 1/(math.Sqrt(sum)+1e-7))
	}
}

func (k *fakeKernels) Apply(l *fake.Launch, a optimizer.Apply) {
	_, c, _ := control(l, a.Control)
	if c.Skipped {
		return
	}

	for _, p := range a.Table.Tensors {
		w, r := floatsAt(l, p.Param, p.Size), floatsAt(l, p.Result, p.Size)
		lr := c.LR * p.LRScale
		for i, v := range r {
			w[i] = float32(1-lr*p.Decay)*w[i] - float32(lr*p.ShapeScale)*v
		}
		writeCopy(l, p)
	}
}

func (k *fakeKernels) Reduce(l *fake.Launch, a reduce.Reduce) {
	x, y := floatsAt(l, a.X, a.Outer*a.N*a.Inner), floatsAt(l, a.Y, a.Outer*a.Inner)
	for o := range a.Outer {
		for i := range a.Inner {
			r := x[o*a.N*a.Inner+i]
			for j := 1; j < a.N; j++ {
				v := x[(o*a.N+j)*a.Inner+i]
				if a.Op == reduce.Max {
					r = max(r, v)
				} else {
					r += v
				}
			}
			if a.Scale != 0 {
				r *= float32(a.Scale)
			}
			y[o*a.Inner+i] = r
		}
	}
}

func (k *fakeKernels) Attention(l *fake.Launch, p attention.Forward) {
	a := p.Geometry
	out := denseRows(l, a, a.Heads, p.Y)
	pairs := floatsAt(l, p.Normalizers, 2*a.Batch*a.Heads*a.Seq)
	cpuattention.Forward(out, pairs, denseRows(l, a, a.Heads, p.Q), denseRows(l, a, a.KVHeads, p.K),
		denseRows(l, a, a.KVHeads, p.V), cpuShape(l, a))
	for i := 1; i < len(pairs); i += 2 {
		pairs[i] = float32(math.Log(float64(pairs[i])))
	}
	spreadRows(l, a, a.Heads, p.Y, out)
}

func (k *fakeKernels) AttentionBackward(l *fake.Launch, p attention.Backward) {
	a := p.Geometry
	rows := func(heads int, r kernel.Rows) []float32 { return denseRows(l, a, heads, r) }
	dq, dk, dv := rows(a.Heads, p.DQ), rows(a.KVHeads, p.DK), rows(a.KVHeads, p.DV)
	if p.HasStatistics {
		want := statisticsOf(l, a, rows(a.Heads, p.G), rows(a.Heads, p.Y),
			p.Normalizers)
		if !slices.Equal(floatsAt(l, p.Workspace, len(want)), want) {
			panic("the backward pass found unexpected statistics")
		}
	}

	pairs := slices.Clone(floatsAt(l, p.Normalizers, 2*a.Batch*a.Heads*a.Seq))
	for i := 1; i < len(pairs); i += 2 {
		pairs[i] = float32(math.Exp(float64(pairs[i])))
	}

	cpuattention.Backward(dq, dk, dv, rows(a.Heads, p.G), rows(a.Heads, p.Q),
		rows(a.KVHeads, p.K), rows(a.KVHeads, p.V), rows(a.Heads, p.Y), pairs, cpuShape(l, a))
	if a.Cos != 0 {
		cos, sin := floatsAt(l, a.Cos, a.Seq*a.HeadDim/2), floatsAt(l, a.Sin, a.Seq*a.HeadDim/2)
		layer.RoPE(dq, dq, cos, sin, a.Seq, a.Heads, a.HeadDim, true)
		layer.RoPE(dk, dk, cos, sin, a.Seq, a.KVHeads, a.HeadDim, true)
	}

	spreadRows(l, a, a.Heads, p.DQ, dq)
	spreadRows(l, a, a.KVHeads, p.DK, dk)
	spreadRows(l, a, a.KVHeads, p.DV, dv)
}

func (k *fakeKernels) AttentionStatistics(l *fake.Launch, p attention.Statistics) {
	a := p.Geometry
	stats := statisticsOf(l, a, denseRows(l, a, a.Heads, p.G), denseRows(l, a, a.Heads, p.Y),
		p.Normalizers)
	copy(floatsAt(l, p.Workspace, len(stats)), stats)
}

func (k *fakeKernels) StatisticsProduct(l *fake.Launch, p gemm.StatisticsProduct) {
	a := p.Geometry
	rows, columns := a.Batch*a.Seq, a.Heads*a.HeadDim
	g := floatsAt(l, p.G, rows*columns)
	cpugemm.Mul(false, false, rows, columns, p.D, 1, floatsAt(l, p.X, rows*p.D), p.D,
		floatsAt(l, p.W, p.D*columns), columns, 0, g, columns)
	addTerm(l, p.Term, false, g, rows, columns)
	stats := statisticsOf(l, a, g, floatsAt(l, p.Y, rows*columns), p.Normalizers)
	copy(floatsAt(l, p.Workspace, len(stats)), stats)
}

// statisticsOf returns the statistics of every head's queries in the layout of the attention kernels: the
// exponent of the normalizer, Σ g·y, and the factor that corrects the exponent's rounding.
func statisticsOf(l *fake.Launch, a attention.Geometry, g, y []float32,
	normalizers gpu.Ptr) []float32 {
	rows := kernel.CeilDiv(a.Seq, attention.StatisticsTile) * attention.StatisticsTile
	stats := make([]float32, 3*a.Batch*a.Heads*rows)
	pairs := floatsAt(l, normalizers, 2*a.Batch*a.Heads*a.Seq)
	for i := range a.Batch * a.Heads * a.Seq {
		of, position := i/a.Seq, i%a.Seq
		at := ((of/a.Heads*a.Seq+position)*a.Heads + of%a.Heads) * a.HeadDim
		exact := (float64(pairs[2*i]) + float64(pairs[2*i+1])) * math.Log2E
		h := float32(exact)
		stats[3*of*rows+position] = h
		stats[(3*of+1)*rows+position] = vec.Dot(g[at:][:a.HeadDim], y[at:][:a.HeadDim])
		stats[(3*of+2)*rows+position] = float32(math.Exp2(float64(h) - exact))
	}

	return stats
}

func (k *fakeKernels) DecodeAttention(l *fake.Launch, a decode.Attention) {
	p, qd, kd := int(fake.Slice[int64](l, a.Position, 1)[0]), a.Heads*a.HeadDim,
		a.KVHeads*a.HeadDim
	keys, values := floatsAt(l, a.Keys, a.Capacity*kd), floatsAt(l, a.Values, a.Capacity*kd)
	fake.Slice[byte](l, a.Parts, a.PartsBytes(gpu.DeviceInfo{SMs: 1}))
	for _, n := range fake.Slice[uint32](l, a.Arrived, a.Counters()) {
		if n != 0 {
			panic("counters are not zero")
		}
	}

	q, key := slices.Clone(floatsAt(l, a.Q, qd)), keys[p*kd:][:kd]
	copy(key, floatsAt(l, a.K, kd))
	copy(values[p*kd:], floatsAt(l, a.V, kd))
	if a.Cos != 0 {
		half := a.HeadDim / 2
		cos, sin := floatsAt(l, a.Cos, a.Capacity*half)[p*half:][:half],
			floatsAt(l, a.Sin, a.Capacity*half)[p*half:][:half]
		layer.RoPE(q, q, cos, sin, 1, a.Heads, a.HeadDim, false)
		layer.RoPE(key, key, cos, sin, 1, a.KVHeads, a.HeadDim, false)
	}

	cpuattention.At(floatsAt(l, a.Y, qd), q, keys, values, p, 1, cpuattention.Shape{Heads: a.Heads,
		KVHeads: a.KVHeads, HeadDim: a.HeadDim, Scale: a.Scale, Window: a.Window})
}

func (k *fakeKernels) SampleFeed(l *fake.Launch, a sample.Feed) {
	ids := fake.Slice[int64](l, a.IDs, a.Rows)
	for i, from := range fake.Slice[int64](l, a.From, a.Rows) {
		if from >= 0 {
			ids[i] = max(0, fake.Slice[int64](l, a.Tokens, int(from)+1)[from])
		}
	}
}

func (k *fakeKernels) SampleTokens(l *fake.Launch, a sample.Tokens) {
	for _, v := range fake.Slice[byte](l, a.State, sample.StateBytes(a.Rows)) {
		if v != 0 {
			panic("the state is not zero")
		}
	}

	var d sampling.Drawer[float32]
	words := fake.Slice[int64](l, a.Rules, a.Rows*sample.RuleWords)
	entries := fake.Slice[int64](l, a.Entries, sampling.MostEntries*sample.EntryWords)
	for row := range a.Rows {
		token := &fake.Slice[int64](l, a.Tokens, a.Rows)[row]
		*token = -1
		rule := words[row*sample.RuleWords:][:sample.RuleWords]
		ids := []int64(nil)
		if n := int(rule[10]) + 1; n > 0 {
			ids = fake.Slice[int64](l, a.IDs, n)
		}
		if r, ok := sample.Decode(rule, entries, ids); ok {
			if id, err := d.Draw(floatsAt(l, a.Logits, a.Rows*a.N)[row*a.N:][:a.N], &r); err == nil {
				*token = int64(id)
			}
		}
	}
}

func (k *fakeKernels) DecodeProduct(l *fake.Launch, a decode.Product) {
	y := rowProduct(l, a.X, a.W, a.Columns, a.D, a.Norm)
	if a.C != 0 {
		for i, c := range floatsAt(l, a.C, a.Columns) {
			y[i] += c
		}
	}
	copy(floatsAt(l, a.Y, a.Columns), y)
}

func (k *fakeKernels) DecodeGated(l *fake.Launch, a decode.Gated) {
	y, h := rowProduct(l, a.X, a.W, 2*a.F, a.D, a.Norm), floatsAt(l, a.H, a.F)
	if a.GELU {
		layer.GELUMul(h, y[:a.F], y[a.F:])
	} else {
		layer.SiLUMul(h, y[:a.F], y[a.F:])
	}
}

func (k *fakeKernels) DecodeNormRows(l *fake.Launch, a decode.NormRows) {
	layer.RMSNorm(floatsAt(l, a.Y, a.Rows*a.D), make([]float32, a.Rows), floatsAt(l, a.X, a.Rows*a.D),
		floatsAt(l, a.W, a.D), a.Eps)
}

func (k *fakeKernels) DecodePaged(l *fake.Launch, a decode.Paged) {
	qd, kd := a.Heads*a.HeadDim, a.KVHeads*a.HeadDim
	q, y := rowsAt(l, a.Q.Ptr, a.Rows, qd, a.Q.Stride), rowsAt(l, a.Y, a.Rows, qd, qd)
	ks, vs := rowsAt(l, a.K.Ptr, a.Rows, kd, a.K.Stride), rowsAt(l, a.V.Ptr, a.Rows, kd, a.V.Stride)
	table := fake.Slice[int64](l, a.Table, a.Rows*a.Columns)
	fake.Slice[byte](l, a.Parts, a.PartsBytes(k.ctx.Device()))
	for _, n := range fake.Slice[uint32](l, a.Arrived, a.Counters()) {
		if n != 0 {
			panic("counters are not zero")
		}
	}

	for row := range a.Rows {
		p, pages := int(table[row*a.Columns]), table[row*a.Columns+1:][:a.Columns-1]
		clear(y[row])
		if p < 0 {
			continue
		}
		var keys, values []float32
		for i := range p/decode.PageTokens + 1 {
			at := int(pages[i]) * decode.PageTokens * kd * 4
			held := floatsAt(l, a.Keys.Offset(at), decode.PageTokens*kd)
			heldValues := floatsAt(l, a.Values.Offset(at), decode.PageTokens*kd)
			if i == p/decode.PageTokens {
				key := held[p%decode.PageTokens*kd:][:kd]
				copy(key, ks[row])
				copy(heldValues[p%decode.PageTokens*kd:], vs[row])
				if a.Cos != 0 {
					cos, sin := k.angles(l, a, p)
					layer.RoPE(key, key, cos, sin, 1, a.KVHeads, a.HeadDim, false)
				}
			}
			keys, values = append(keys, held...), append(values, heldValues...)
		}
		query := slices.Clone(q[row])
		if a.Cos != 0 {
			cos, sin := k.angles(l, a, p)
			layer.RoPE(query, query, cos, sin, 1, a.Heads, a.HeadDim, false)
		}
		cpuattention.At(y[row], query, keys, values, p, 1, cpuattention.Shape{Heads: a.Heads,
			KVHeads: a.KVHeads, HeadDim: a.HeadDim, Scale: a.Scale, Window: a.Window})
	}
}

// angles returns the cosines and sines of a position.
func (k *fakeKernels) angles(l *fake.Launch, a decode.Paged, position int) (cos, sin []float32) {
	half := a.HeadDim / 2
	at := func(p gpu.Ptr) []float32 { return floatsAt(l, p, a.Capacity*half)[position*half:][:half] }
	return at(a.Cos), at(a.Sin)
}

// rowProduct returns x·wᵀ for one row x, which is normalized first if there is a norm.
func rowProduct(l *fake.Launch, x, w gpu.Ptr, columns, d int, n decode.Norm) []float32 {
	row, all, y := floatsAt(l, x, d), floatsAt(l, w, columns*d), make([]float32, columns)
	if n.W != 0 {
		normed, rstd := make([]float32, d), make([]float32, 1)
		layer.RMSNorm(normed, rstd, row, floatsAt(l, n.W, d), n.Eps)
		row = normed
	}
	for i := range y {
		for j, v := range row {
			y[i] += v * all[i*d+j]
		}
	}
	return y
}

// denseRows returns a copy of an operand of attention, without gaps between rows.
func denseRows(l *fake.Launch, a attention.Geometry, heads int, r kernel.Rows) []float32 {
	return slices.Concat(rowsAt(l, r.Ptr, a.Batch*a.Seq, heads*a.HeadDim, r.Stride)...)
}

// spreadRows writes a result of attention, with gaps between rows.
func spreadRows(l *fake.Launch, a attention.Geometry, heads int, r kernel.Rows, x []float32) {
	width := heads * a.HeadDim
	for i, row := range rowsAt(l, r.Ptr, a.Batch*a.Seq, width, r.Stride) {
		copy(row, x[i*width:])
	}
}

func cpuShape(l *fake.Launch, a attention.Geometry) cpuattention.Shape {
	s := cpuattention.Shape{Batch: a.Batch, Seq: a.Seq, Heads: a.Heads, KVHeads: a.KVHeads,
		HeadDim: a.HeadDim, Causal: a.Causal, Scale: a.Scale}
	if a.Documents != 0 {
		for _, start := range fake.Slice[int32](l, a.Documents, a.Batch*a.Seq) {
			s.Starts = append(s.Starts, int(start))
		}
	}
	return s
}

// AttentionDocuments omits the ends of documents, which only the real kernels read.
func (k *fakeKernels) AttentionDocuments(l *fake.Launch, a attention.Documents) {
	to := fake.Slice[int32](l, a.Table, attention.DocumentsBytes(a.Batch, a.Seq)/4)
	for i := range a.Batch * a.Seq {
		start := int64(0)
		if a.Starts != 0 {
			start = fake.Slice[int64](l, a.Starts, a.Batch*a.Seq)[i]
		}
		if a.Window > 0 {
			start = max(start, int64(i%a.Seq-a.Window+1))
		}
		to[i] = int32(start)
	}
}

func (k *fakeKernels) Normalize(l *fake.Launch, a normalize.Forward) {
	floatsAt(l, a.Workspace, normalize.WorkspaceBytes/4)
	x, y := floatsAt(l, a.X, a.N), floatsAt(l, a.Y, a.N)
	r := float32(1 / (math.Sqrt(array.SumSquares(x)) + 1e-7))
	for i, v := range x {
		y[i] = v * r
	}
}

func (k *fakeKernels) Symmetric(l *fake.Launch, a gemm.Symmetric) {
	n, part, stride := a.N, a.N*a.Depth, a.Depth
	if a.Tall {
		stride = n
	}

	for b := range a.Batch {
		left, right := floatsAt(l, a.Left.Offset(4*b*part), part),
			floatsAt(l, a.Right.Offset(4*b*part), part)
		d := floatsAt(l, a.D.Offset(4*b*n*n), n*n)
		clear(d)
		if a.C != 0 {
			copy(d, floatsAt(l, a.C.Offset(4*b*n*n), n*n))
		}
		cpugemm.Mul(a.Tall, !a.Tall, n, n, a.Depth, float32(a.Alpha), left, stride,
			right, stride, float32(a.Beta), d, n)
		for i := range n {
			d[i*n+i] += float32(a.Delta)
		}
	}
}

func (k *fakeKernels) NormalizeBackward(l *fake.Launch, a normalize.Backward) {
	floatsAt(l, a.Workspace, normalize.WorkspaceBytes/4)
	x, g, dx := floatsAt(l, a.X, a.N), floatsAt(l, a.G, a.N), floatsAt(l, a.DX, a.N)
	norm, dot := math.Sqrt(array.SumSquares(x)), 0.0
	for i, v := range x {
		dot += float64(v) * float64(g[i])
	}
	r := norm + 1e-7
	for i, v := range x {
		dx[i] = float32(float64(g[i])/r - float64(v)*dot/(r*r*norm))
	}
}

// float8Products enables the products of [Float8] without the storage of BFloat16, which fakeKernels does
// not support.
func float8Products(c *machineConfig) error {
	c.Float8 = true
	return nil
}

// quantizedRow converts a row to float8 and returns its scale.
func quantizedRow(y []byte, x []float32) float32 {
	largest := float32(0)
	for _, v := range x {
		largest = max(largest, float32(math.Abs(float64(v))))
	}

	scale := largest / half.MaxE4M3
	if scale == 0 {
		scale = 1
	}

	inverse := 1 / scale
	for i, v := range x {
		y[i] = half.E4M3(v * inverse)
	}

	return scale
}

// float8At converts rows to float8 if y is not 0.
func float8At(l *fake.Launch, y, scale gpu.Ptr, x [][]float32) {
	if y == 0 {
		return
	}
	d := len(x[0])
	values, scales := fake.Slice[byte](l, y, len(x)*d), floatsAt(l, scale, len(x))
	for i, row := range x {
		scales[i] = quantizedRow(values[i*d:][:d], row)
	}
}

func (k *fakeKernels) Quantize(l *fake.Launch, a quantize.Rows) {
	float8At(l, a.Y, a.Scale, rowsAt(l, a.X, a.Rows, a.D, a.XStride))
}

func (k *fakeKernels) QuantizeColumns(l *fake.Launch, a quantize.Columns) {
	copy(floatsAt(l, a.Workspace, a.D), make([]float32, a.D))
	float8At(l, a.Y, a.Scale, columnsAt(l, a.X, a.Rows, a.D))
}

func (k *fakeKernels) QuantizeWeights(l *fake.Launch, a quantize.Weights) {
	for _, w := range a.Table.Weights {
		float8At(l, w.Y, w.Scale, rowsAt(l, w.X, int(w.Rows), int(w.D), 0))
		float8At(l, w.Turned, w.TurnedScale, columnsAt(l, w.X, int(w.Rows), int(w.D)))
	}
}

func (k *fakeKernels) WidenFloat8(l *fake.Launch, a quantize.WidenFloat8) {
	y, scales := floatsAt(l, a.Y, a.Rows*a.D), floatsAt(l, a.Scales, a.Rows)
	for i, code := range fake.Slice[byte](l, a.Codes, len(y)) {
		y[i] = half.FromE4M3(code) * scales[i/a.D]
	}
}

func (k *fakeKernels) WidenNF4(l *fake.Launch, a quantize.WidenNF4) {
	copy(floatsAt(l, a.Y, a.N), nf4At(l, quantize.NF4{Codes: a.Codes, Nested: a.Nested, Scales: a.Scales,
		Table: a.Table, Offset: a.Offset}, a.N))
}

// nf4At returns the numbers of a matrix in NF4.
func nf4At(l *fake.Launch, a quantize.NF4, n int) []float32 {
	blocks := (n + quant.BlockNF4 - 1) / quant.BlockNF4
	codes, nested := fake.Slice[byte](l, a.Codes, (n+1)/2), fake.Slice[byte](l, a.Nested, blocks)
	table, scales := floatsAt(l, a.Table, 256), floatsAt(l, a.Scales, (blocks+255)/256)
	y := make([]float32, n)
	for i := range y {
		b := i / quant.BlockNF4
		scale := float32(table[nested[b]]*scales[b/256]) + a.Offset
		y[i] = quant.ValueNF4(codes[i/2]>>(4-i%2*4)&15) * scale
	}
	return y
}

func (k *fakeKernels) Float8NF4(l *fake.Launch, a quantize.Float8NF4) {
	y, factors := fake.Slice[byte](l, a.Y, a.Rows*a.D), floatsAt(l, a.Factors, a.Rows)
	for i, v := range nf4At(l, a.NF4, len(y)) {
		y[i] = half.E4M3(v * factors[i/a.D])
	}
}

func (k *fakeKernels) Float8Columns(l *fake.Launch, a quantize.Float8Columns) {
	factors := floatsAt(l, a.Factors, a.Rows)
	var w []float32
	if a.Nested != 0 {
		w = nf4At(l, a.NF4, a.Rows*a.D)
	} else {
		for _, code := range fake.Slice[byte](l, a.Codes, a.Rows*a.D) {
			w = append(w, half.FromE4M3(code))
		}
	}
	for c := range a.D {
		column := fake.Slice[byte](l, a.Y.Offset(c*a.Stride), a.Rows)
		for r := range column {
			column[r] = half.E4M3(w[r*a.D+c] * factors[r])
		}
	}
}

// columnsAt returns the columns of a matrix.
func columnsAt(l *fake.Launch, p gpu.Ptr, rows, d int) [][]float32 {
	turned := make([][]float32, d)
	for i, v := range floatsAt(l, p, rows*d) {
		turned[i%d] = append(turned[i%d], v)
	}
	return turned
}

// operandAt returns a matrix of float32 or, if scale is not 0, of float8 with one scale per row.
func operandAt(l *fake.Launch, p, scale gpu.Ptr, rows, d int) []float32 {
	if scale == 0 {
		return floatsAt(l, p, rows*d)
	}
	values, factors := make([]float32, rows*d), floatsAt(l, scale, rows)
	for i, b := range fake.Slice[byte](l, p, rows*d) {
		values[i] = half.FromE4M3(b) * factors[i/d]
	}
	return values
}

// The remaining methods are matrix products with this module's own kernels.

func (k *fakeKernels) SiLUProduct(l *fake.Launch, a gemm.SiLUProduct) {
	ab := floatsAt(l, a.AB, 2*a.Rows*a.F)
	cpugemm.Mul(false, true, a.Rows, 2*a.F, a.D, 1, floatsAt(l, a.X, a.Rows*a.D), a.D,
		floatsAt(l, a.Weights, 2*a.F*a.D), a.D, 0, ab, 2*a.F)
	addTerm(l, a.Term, true, ab, a.Rows, 2*a.F)
	for i, h := range rowsAt(l, a.H, a.Rows, a.F, 0) {
		layer.SiLUMul(h, ab[2*i*a.F:][:a.F], ab[(2*i+1)*a.F:][:a.F])
	}
}

func (k *fakeKernels) SiLUProductBackward(l *fake.Launch, a gemm.SiLUProductBackward) {
	dh, ab, dab := make([]float32, a.Rows*a.F), floatsAt(l, a.AB, 2*a.Rows*a.F),
		floatsAt(l, a.DAB, 2*a.Rows*a.F)
	cpugemm.Mul(false, false, a.Rows, a.F, a.D, 1, floatsAt(l, a.G, a.Rows*a.D), a.D,
		floatsAt(l, a.Down, a.D*a.F), a.F, 0, dh, a.F)
	addTerm(l, a.Term, false, dh, a.Rows, a.F)
	h := make([]float32, a.Rows*a.F)
	if a.H != 0 {
		h = floatsAt(l, a.H, len(h))
	}

	for i := range a.Rows {
		left, right := 2*i*a.F, (2*i+1)*a.F
		layer.SiLUMulBackward(h[i*a.F:][:a.F], dab[left:][:a.F], dab[right:][:a.F],
			dh[i*a.F:][:a.F], ab[left:][:a.F], ab[right:][:a.F])
	}
}

func (k *fakeKernels) RoPEProduct(l *fake.Launch, a gemm.RoPEProduct) {
	h := a.HeadDim / 2
	y, table := floatsAt(l, a.Y, a.Rows*a.Columns),
		floatsAt(l, a.Angles, gemm.RoPEAnglesLen(a.Seq, h))
	cos, sin := make([]float32, a.Seq*h), make([]float32, a.Seq*h)
	for i := range cos {
		at := gemm.RoPEAngleAt(i/h, i%h, h)
		cos[i], sin[i] = table[at], table[at+2]
	}

	cpugemm.Mul(false, true, a.Rows, a.Columns, a.D, 1,
		operandAt(l, a.X, a.ScaleX, a.Rows, a.D), a.D,
		operandAt(l, a.Weights, a.ScaleWeights, a.Columns, a.D), a.D, 0, y, a.Columns)
	addTerm(l, a.Term, true, y, a.Rows, a.Columns)
	for i := range a.Rows {
		turned, at := y[i*a.Columns:][:a.Turned], i%a.Seq*h
		layer.RoPE(turned, turned, cos[at:], sin[at:], 1, a.Turned/a.HeadDim, a.HeadDim, false)
	}
}

func (k *fakeKernels) Product(l *fake.Launch, a gemm.Product) {
	y, c := floatsAt(l, a.Y, a.Rows*a.Columns), make([]float32, a.Rows*a.Columns)
	if a.C != 0 {
		copy(c, floatsAt(l, a.C, len(c)))
	}

	stride := a.Columns
	if a.TransW {
		stride = a.D
	}

	cpugemm.Mul(false, a.TransW, a.Rows, a.Columns, a.D, 1,
		operandAt(l, a.X, a.ScaleX, a.Rows, a.D), a.D,
		operandAt(l, a.W, a.ScaleW, a.Columns, a.D), stride, 0, y, a.Columns)
	for i, v := range c {
		y[i] += v
	}
}

func (k *fakeKernels) ProductSum(l *fake.Launch, a gemm.ProductSum) {
	k.Product(l, a.Product)
	addTerm(l, a.Term, a.TransW, floatsAt(l, a.Y, a.Rows*a.Columns), a.Rows, a.Columns)
}

func (k *fakeKernels) RowProduct(l *fake.Launch, a gemm.RowProduct) {
	stride := a.Columns
	if a.TransW {
		stride = a.D
	}

	y := floatsAt(l, a.Y, a.Rows*a.Columns)
	cpugemm.Mul(false, a.TransW, a.Rows, a.Columns, a.D, float32(a.Scale), floatsAt(l, a.X, a.Rows*a.D), a.D,
		floatsAt(l, a.W, a.D*a.Columns), stride, 0, y, a.Columns)
	if a.Scaled == 0 {
		return
	}

	scaled, factors := floatsAt(l, a.Scaled, len(y)), floatsAt(l, a.Factors, a.Rows)
	for i, v := range y {
		scaled[i] = v * factors[i/a.Columns]
	}
}

func (k *fakeKernels) NarrowProducts(l *fake.Launch, a gemm.NarrowProducts) {
	k.RowProduct(l, gemm.RowProduct{Y: a.V, X: a.X, W: a.W, Scaled: a.Scaled, Factors: a.Factors, Rows: a.Rows,
		Columns: a.Narrow, D: a.Columns, Scale: a.Scale})
	k.ColumnProduct(l, gemm.ColumnProduct{Y: a.DW, X: a.X, V: a.U, Rows: a.Rows, Columns: a.Columns,
		Narrow: a.Narrow})
}

func (k *fakeKernels) ScaledRows(l *fake.Launch, a gemm.ScaledRows) {
	y, x, factors := floatsAt(l, a.Y, a.Rows*a.Columns), floatsAt(l, a.X, a.Rows*a.Columns),
		floatsAt(l, a.Factors, a.Rows)
	for i, v := range x {
		y[i] = v * factors[i/a.Columns]
	}
}

func (k *fakeKernels) BlockDiagonal(l *fake.Launch, a gemm.BlockDiagonal) {
	height, width := 0, 0
	for i := range a.Blocks {
		height, width = height+a.Rows[i], width+a.Columns[i]
	}

	y := floatsAt(l, a.Y, height*width)
	if !a.Back {
		clear(y)
	}
	at := 0
	for i, p := range a.Blocks {
		for r := range a.Rows[i] {
			if a.Columns[i] > 0 {
				block := floatsAt(l, p, a.Rows[i]*a.Columns[i])[r*a.Columns[i]:][:a.Columns[i]]
				if a.Back {
					copy(block, y[at:])
				} else {
					copy(y[at:], block)
				}
			}
			at += width
		}
		at += a.Columns[i]
	}
}

func (k *fakeKernels) ColumnProduct(l *fake.Launch, a gemm.ColumnProduct) {
	y, x, v := floatsAt(l, a.Y, a.Columns*a.Narrow), slices.Clone(floatsAt(l, a.X, a.Rows*a.Columns)),
		floatsAt(l, a.V, a.Rows*a.Narrow)
	if a.Factors != 0 {
		factors := floatsAt(l, a.Factors, a.Columns)
		for i := range x {
			x[i] *= factors[i%a.Columns]
		}
	}

	if a.Transposed {
		cpugemm.Mul(true, false, a.Narrow, a.Columns, a.Rows, 1, v, a.Narrow, x, a.Columns, 0, y, a.Columns)
		return
	}
	cpugemm.Mul(true, false, a.Columns, a.Narrow, a.Rows, 1, x, a.Columns, v, a.Narrow, 0, y, a.Narrow)
}

// addTerm adds a term to the result y of a product.
func addTerm(l *fake.Launch, t gemm.Term, trans bool, y []float32, rows, columns int) {
	if t.D == 0 {
		return
	}
	stride := columns
	if trans {
		stride = t.D
	}
	cpugemm.Mul(false, trans, rows, columns, t.D, 1, floatsAt(l, t.X, rows*t.D), t.D,
		floatsAt(l, t.W, t.D*columns), stride, 1, y, columns)
}

// withKernels replaces a machine's kernels by the result of wrap.
func withKernels(wrap func(run.Launcher) run.Launcher) MachineOption {
	return func(c *machineConfig) error {
		c.kernels = wrap
		return nil
	}
}

// fakeOf returns the fake that implements a machine's kernels.
func fakeOf(k run.Launcher) *fakeKernels { return k.(*fakeKernels) }

// isOp reports whether a node's op has type T.
func isOp[T any](n *gorgonia.Node) bool {
	_, ok := n.Op().(T)
	return ok
}

// relativeDistance returns ‖x − y‖/‖y‖.
func relativeDistance(x, y []float32) float64 {
	var diff, norm float64
	for i := range x {
		d := float64(x[i]) - float64(y[i])
		diff += d * d
		norm += float64(y[i]) * float64(y[i])
	}
	if diff == 0 {
		return 0
	}
	return math.Sqrt(diff / norm)
}

// OpenFakeDriver exports openFake to the external test package, which uses packages that import this one.
func OpenFakeDriver(t testing.TB) (*Device, *fake.Driver) { return openFake(t, fake.Config{}) }

// OpenFake returns only the device of OpenFakeDriver.
func OpenFake(t testing.TB) *Device {
	device, _ := OpenFakeDriver(t)
	return device
}

// Float8Products exports float8Products to the external test package.
func Float8Products() MachineOption { return float8Products }

// RequireNoLeaks exports requireNoLeaks to the external test package.
func RequireNoLeaks(t testing.TB, device *Device) { requireNoLeaks(t, device) }

// NarrowGradients exports narrowGradients to the external test package.
func NarrowGradients() MachineOption { return narrowGradients }

// batch is a model's graph together with inputs for it.
type batch struct {
	*llm.Graph
	ids, targets []int
}

// few returns n, or short in short mode. Under compute-sanitizer, a launch on a GPU takes tens of
// milliseconds.
func few(n, short int) int {
	if testing.Short() {
		return short
	}
	return n
}

// newBatch returns a small model with its graph. Odd seeds give its perceptron an odd size, which makes
// matrices unaligned.
func newBatch(t testing.TB, kind llm.GraphKind, seed uint64) (*llm.Model, *batch) {
	t.Helper()
	c := llm.Config{Vocab: 19, Dim: 18, Layers: few(2, 1), Heads: 3, KVHeads: 1, Seq: 6, FF: 64,
		Kasmina: []int{0}, Seeds: 6}.Default()
	if seed%2 == 1 {
		c.FF = 33
	}

	m, err := llm.NewModel(c, tensor.Float32, seed, state.WithoutGates())
	require.NoError(t, err)
	g, err := m.Graph(kind, 3)
	require.NoError(t, err)
	b := &batch{Graph: g}
	b.draw(t, seed)
	return m, b
}

// draw sets random ids and targets.
func (b *batch) draw(t testing.TB, seed uint64) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 3))
	n := b.IDs.Shape()[0]
	b.ids, b.targets = make([]int, n), make([]int, n)
	for i := range n {
		b.ids[i], b.targets[i] = r.IntN(19), r.IntN(19)
	}

	for node, x := range map[*gorgonia.Node][]int{b.IDs: b.ids, b.Targets: b.targets} {
		require.NoError(t, gorgonia.Let(node, tensor.New(tensor.WithShape(n),
			tensor.WithBacking(x))))
	}
}

func distance(t testing.TB, got, want gorgonia.Value) float64 {
	t.Helper()
	a, b := flat(t, got), flat(t, want)
	if len(a) != len(b) {
		return math.Inf(1)
	}

	var diff, norm float64
	for i := range a {
		diff += float64(a[i]-b[i]) * float64(a[i]-b[i])
		norm += float64(b[i]) * float64(b[i])
	}

	if diff == 0 {
		return 0
	}

	return math.Sqrt(diff / norm)
}

func flat(t testing.TB, v gorgonia.Value) []float32 {
	t.Helper()
	switch x := v.Data().(type) {
	case []float32:
		return x
	case float32:
		return []float32{x}
	}
	t.Fatalf("a value of type %T", v.Data())
	return nil
}

// openGPU returns the GPU, or skips the test on a computer without one.
func openGPU(t testing.TB) *Device {
	t.Helper()
	device, err := Open()
	if errors.Is(err, ErrNoDevice) {
		t.Skip("needs an NVIDIA GPU: ", err)
	}
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, device.Close())
	})
	return device
}

// openMachine returns a machine that is closed at the end of the test.
func openMachine(t testing.TB, device *Device, g *gorgonia.ExprGraph,
	opts ...MachineOption) *Machine {
	t.Helper()
	m, err := NewMachine(device, g, opts...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	return m
}

// randomNode returns an input of normally distributed numbers.
func randomNode(g *gorgonia.ExprGraph, r *rand.Rand, deviation float64, name string,
	s ...int) *gorgonia.Node {
	x := make([]float32, opbase.Size(s))
	for i := range x {
		x[i] = float32(deviation * r.NormFloat64())
	}
	return floatNode(g, name, x, s...)
}

// rangeNode returns an input with the elements 0, 1, 2 and so on.
func rangeNode(g *gorgonia.ExprGraph, name string, s ...int) *gorgonia.Node {
	return floatNode(g, name, tensor.Range(tensor.Float32, 0, opbase.Size(s)).([]float32), s...)
}

// floatNode returns an input with the given elements.
func floatNode(g *gorgonia.ExprGraph, name string, x []float32, s ...int) *gorgonia.Node {
	return gorgonia.NewTensor(g, tensor.Float32, len(s), gorgonia.WithName(name),
		gorgonia.WithShape(s...),
		gorgonia.WithValue(tensor.New(tensor.WithShape(s...), tensor.WithBacking(x))))
}

// intNode returns an input of ids.
func intNode(g *gorgonia.ExprGraph, name string, ids []int) *gorgonia.Node {
	return gorgonia.NewVector(g, tensor.Int, gorgonia.WithName(name),
		gorgonia.WithShape(len(ids)),
		gorgonia.WithValue(tensor.New(tensor.WithShape(len(ids)), tensor.WithBacking(ids))))
}

// places maps the test environments to options: the fake driver, or a GPU with activations of a given
// type.
var places = map[string][]MachineOption{"fake": nil, "scaled": {scaledGradients}, "float32": nil,
	"float16": {WithPrecision(Float16)}, "bfloat16": {WithPrecision(BFloat16)}}

// onEach runs a test in the given places, and passes it the tolerance for each place.
func onEach(t *testing.T, test func(t *testing.T, device *Device, tolerance float64,
	opts ...MachineOption), tolerances map[string]float64) {
	for name, tolerance := range tolerances {
		t.Run(name, func(t *testing.T) {
			device, _ := openFake(t, fake.Config{})
			if name != "fake" && name != "scaled" {
				device = openGPU(t)
			}
			test(t, device, tolerance, slices.Clone(places[name])...)
		})
	}
}

// exactly returns places for tests that do not use the tolerance.
func exactly(names ...string) map[string]float64 {
	tolerances := map[string]float64{}
	for _, name := range names {
		tolerances[name] = 0
	}
	return tolerances
}

// randomSeed returns a random seed and logs it.
func randomSeed(t testing.TB) uint64 {
	t.Helper()
	seed := randtest.Seed(t)
	return seed
}

// errOf returns only the error of a function's results.
func errOf(_ any, err error) error { return err }

// tapeMachine returns Gorgonia's machine, which is closed at the end of the test.
func tapeMachine(t testing.TB, g *gorgonia.ExprGraph, opts ...gorgonia.VMOpt) gorgonia.VM {
	tape := gorgonia.NewTapeMachine(g, opts...)
	t.Cleanup(func() { require.NoError(t, tape.Close()) })
	return tape
}

// logTo makes a machine write its log to w.
func logTo(w io.Writer) MachineOption { return WithLogger(slog.New(slog.NewTextHandler(w, nil))) }

// optimize sets a machine's optimizer.
func optimize(t testing.TB, m *Machine, newOptimizer func() (optim.Optimizer, error),
	maxNorm float64) optim.Optimizer {
	t.Helper()
	o, err := newOptimizer()
	require.NoError(t, err)
	require.NoError(t, m.SetOptimizer(o, maxNorm))
	return o
}

// step performs a run and an update.
func step(t testing.TB, m *Machine) {
	t.Helper()
	require.NoError(t, m.RunAll())
	require.NoError(t, errOf(m.Update()))
}

// valueIn returns a node's value in a machine.
func valueIn(t testing.TB, m *Machine, n *gorgonia.Node) gorgonia.Value {
	t.Helper()
	v, err := m.Value(n)
	require.NoError(t, err)
	return v
}
