package cudaops

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/attention"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/crossentropy"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/decode"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/embedding"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/layout"
	normkernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/normalize"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/reduce"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/rope"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/silu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/softmax"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/cpu/array"
	cpuattention "github.com/kasmina-go/kasmina/internal/cpu/attention"
	cpucrossentropy "github.com/kasmina-go/kasmina/internal/cpu/crossentropy"
	cpugemm "github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	cpuoptimizer "github.com/kasmina-go/kasmina/internal/cpu/optimizer"
)

// fakeKernels does in Go, on the fake driver's memory and in its streams' order, what the kernels
// do on a GPU, in float32. Every call is a launch of one kernel, whose argument says which of the
// calls so far to compute.
type fakeKernels struct {
	ctx  gpu.Context
	call *gpu.Function

	mu    sync.Mutex
	calls []func(*fake.Launch)

	tables  map[*optimizer.Table][]optimizer.Tensor
	weights map[*quantize.Table][]quantize.Weight
}

// openFake returns a device of a fake driver, and the option that makes machines on it use
// fakeKernels.
func openFake(t testing.TB, c fake.Config) (*Device, *fake.Driver, MachineOption) {
	t.Helper()
	k := &fakeKernels{}
	c.Kernels = map[string]fake.Kernel{"call": func(l *fake.Launch) {
		i := l.Int32()
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
	return device, d, func(c *machineConfig) error {
		c.kernels = func(ctx gpu.Context) (run.Launcher, error) {
			k.ctx = ctx
			m, err := ctx.LoadModule([]byte("fake"))
			if err != nil {
				return nil, err
			}
			k.call, err = ctx.Function(m, "call")
			return &moduleOf{k, m}, err
		}
		return nil
	}
}

// moduleOf is fakeKernels with the module that one machine has loaded.
type moduleOf struct {
	*fakeKernels
	module gpu.Module
}

func (m *moduleOf) Close() error { return m.ctx.UnloadModule(m.module) }

func (k *fakeKernels) launch(s gpu.Stream, f func(*fake.Launch)) error {
	k.mu.Lock()
	k.calls = append(k.calls, f)
	i := len(k.calls) - 1
	k.mu.Unlock()
	return k.ctx.Launch(k.call, gpu.LaunchConfig{}, s, new(gpu.Args).Int32(i))
}

// Launch does what a structure says.
func (k *fakeKernels) Launch(s gpu.Stream, params any) error {
	switch p := params.(type) {
	case elementwise.Unary:
		return k.Unary(s, p.Op, p.Y, p.X, p.P, p.N, p.Type)
	case elementwise.Binary:
		return k.Binary(s, p.Op, p.Y, p.A, p.B, p.N, p.Type)
	case elementwise.Cast:
		return k.Cast(s, p.Y, p.YType, p.X, p.XType, p.N)
	case elementwise.Axpby:
		return k.Axpby(s, p.Y, p.YType, p.Alpha, p.X, p.XType, p.Beta, p.N)
	case softmax.Forward:
		return k.Softmax(s, p.Y, p.X, p.Rows, p.N, p.Type)
	case softmax.Backward:
		return k.SoftmaxBackward(s, p.DX, p.G, p.Y, p.Rows, p.N, p.Type)
	case attention.Forward:
		return k.Attention(s, p.Geometry, p.Y, p.LSE, p.Q, p.K, p.V, p.Type)
	case attention.Backward:
		return k.AttentionBackward(s, p.Geometry, p.DQ, p.DK, p.DV, p.Stats, p.G, p.Q, p.K,
			p.V, p.Y, p.LSE, p.Type)
	case attention.Documents:
		return k.AttentionDocuments(s, p)
	case crossentropy.Scale:
		return k.CrossEntropyScale(s, p.Scale, p.Targets, p.Rows)
	case crossentropy.Forward:
		return k.CrossEntropy(s, p)
	case crossentropy.Mean:
		return k.CrossEntropyMean(s, p.Mean, p.Losses, p.Scale, p.Rows)
	case crossentropy.Backward:
		return k.CrossEntropyBackward(s, p.Out, p.Forward)
	case normkernel.RMSNorm:
		return k.RMSNorm(s, p)
	case normkernel.RMSNormBackward:
		return k.RMSNormBackward(s, p)
	case normkernel.SumRMSNormParts:
		return k.AddRMSNormParts(s, values(p.All))
	case rope.Rotate:
		return k.RoPE(s, p)
	case embedding.Forward:
		return k.Embedding(s, p)
	case embedding.Backward:
		return k.EmbeddingBackward(s, p)
	case reduce.Reduce:
		return k.Reduce(s, p)
	case layout.Copy:
		return k.Copy(s, p)
	case silu.Mul:
		return k.SiLUMul(s, p)
	case silu.MulBackward:
		return k.SiLUMulBackward(s, p)
	}
	return k.launchMore(s, params)
}

// launchMore is Launch for products, optimisers and Kasmina layers.
func (k *fakeKernels) launchMore(s gpu.Stream, params any) error {
	switch p := params.(type) {
	case gemm.SiLUProduct:
		return k.SiLUProduct(s, p)
	case gemm.SiLUProductBackward:
		return k.SiLUProductBackward(s, p)
	case gemm.RoPEProduct:
		return k.RoPEProduct(s, p)
	case gemm.LinearCrossEntropy:
		return k.LinearCrossEntropy(s, p)
	case gemm.ScaleRows:
		return k.ScaleRows(s, p.X, p.Factors, p.Rows, p.D)
	case gemm.Product:
		return k.Product(s, p)
	case quantize.Rows:
		return k.Quantize(s, p)
	case quantize.Columns:
		return k.QuantizeColumns(s, p)
	case quantize.Weights:
		return k.QuantizeWeights(s, p.Table)
	case normalize.Forward:
		return k.Normalize(s, p)
	case normalize.Backward:
		return k.NormalizeBackward(s, p)
	case gemm.Symmetric:
		return k.Symmetric(s, p)
	case optimizer.GradSquares:
		return k.GradSquares(s, p.Squares, p.Table)
	case optimizer.GradNorm:
		return k.GradNorm(s, p.Control, p.Squares, p.Count, p.Scale, p.Apart)
	case optimizer.AdamW:
		return k.AdamW(s, p.Control, p.Table)
	case optimizer.MuonDirection:
		return k.MuonDirection(s, p.Control, p.Squares, p.Table, p.Nesterov)
	case optimizer.MuonApply:
		return k.MuonApply(s, p.Control, p.Table)
	case decode.Attention:
		return k.DecodeAttention(s, p)
	case decode.Product:
		return k.DecodeProduct(s, p)
	case decode.Gated:
		return k.DecodeGated(s, p)
	case kasmina.Forward:
		return k.KasminaForward(s, p)
	case kasmina.Backward:
		return k.KasminaBackward(s, p)
	case kasmina.WideForward:
		return k.KasminaWideForward(s, p.Forward, p.Wide)
	case kasmina.WideBackward:
		return k.KasminaWideBackward(s, p.Backward, p.Wide)
	case kasmina.MergeRecords:
		return k.MergeKasminaRecords(s, values(p.All))
	case kasmina.SumParts:
		return k.AddKasminaParts(s, values(p.All))
	}
	return fmt.Errorf("the fake has no %T", params)
}

func values[T any](all []*T) []T {
	v := make([]T, len(all))
	for i, p := range all {
		v[i] = *p
	}
	return v
}

// Ways are those of the kernels that the fake has.
func (k *fakeKernels) Ways(params any) []kernel.Way {
	switch p := params.(type) {
	case gemm.SiLUProduct:
		return k.SiLUProductWays(p.Rows, p.F, p.D, p.Type)
	case gemm.SiLUProductBackward:
		return k.SiLUProductWays(p.Rows, p.F, p.D, p.Type)
	case gemm.RoPEProduct:
		return k.RoPEProductWays(p.RoPEProductShape, p.Type)
	case gemm.LinearCrossEntropy:
		return k.LinearCrossEntropyWays(p.LinearCrossEntropyShape, p.Type)
	case gemm.Symmetric:
		if k.TakesSymmetric(p.SymmetricShape, p.Type) {
			return []kernel.Way{{Family: "half"}}
		}
	}
	return nil
}

func (k *fakeKernels) Unary(s gpu.Stream, op elementwise.UnaryOp, y, x gpu.Ptr, p float64,
	n int, _ gpu.DType) error {
	return k.launch(s, func(l *fake.Launch) {
		out, in := fake.Slice[float32](l, y, n), fake.Slice[float32](l, x, n)
		for i, v := range in {
			out[i] = float32(unaryReference(op, float64(v), p))
		}
	})
}

func unaryReference(op elementwise.UnaryOp, v, p float64) float64 {
	switch op {
	case elementwise.Neg:
		return -v
	case elementwise.Abs:
		return math.Abs(v)
	case elementwise.Square:
		return v * v
	case elementwise.Cube:
		return v * v * v
	case elementwise.Sqrt:
		return math.Sqrt(v)
	case elementwise.Inverse:
		return 1 / v
	case elementwise.InverseSqrt:
		return 1 / math.Sqrt(v)
	case elementwise.Exp:
		return math.Exp(v)
	case elementwise.Expm1:
		return math.Expm1(v)
	case elementwise.Log:
		return math.Log(v)
	case elementwise.Log1p:
		return math.Log1p(v)
	case elementwise.Log2:
		return math.Log2(v)
	case elementwise.Tanh:
		return math.Tanh(v)
	case elementwise.Sigmoid:
		return 1 / (1 + math.Exp(-v))
	case elementwise.Softplus:
		return math.Log1p(math.Exp(v))
	case elementwise.Sin:
		return math.Sin(v)
	case elementwise.Cos:
		return math.Cos(v)
	case elementwise.Ceil:
		return math.Ceil(v)
	case elementwise.Floor:
		return math.Floor(v)
	case elementwise.Sign:
		return truth(v > 0) - truth(v < 0)
	case elementwise.AddScalar:
		return v + p
	case elementwise.MulScalar:
		return v * p
	case elementwise.SubFrom:
		return p - v
	case elementwise.DivideInto:
		return p / v
	case elementwise.PowScalar:
		return math.Pow(v, p)
	case elementwise.PowOf:
		return math.Pow(p, v)
	}
	return math.NaN() // the tests use no others
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func binaryReference(op elementwise.BinaryOp, a, b float64) float64 {
	switch op {
	case elementwise.Add:
		return a + b
	case elementwise.Sub:
		return a - b
	case elementwise.Mul:
		return a * b
	case elementwise.Div:
		return a / b
	case elementwise.Pow:
		return math.Pow(a, b)
	case elementwise.Maximum:
		return math.Max(a, b)
	case elementwise.Minimum:
		return math.Min(a, b)
	case elementwise.Less:
		return truth(a < b)
	case elementwise.LessEqual:
		return truth(a <= b)
	case elementwise.Greater:
		return truth(a > b)
	case elementwise.GreaterEqual:
		return truth(a >= b)
	case elementwise.Equal:
		return truth(a == b)
	case elementwise.NotEqual:
		return truth(a != b)
	}
	return math.NaN()
}

func (k *fakeKernels) Binary(s gpu.Stream, op elementwise.BinaryOp, y gpu.Ptr, a,
	b elementwise.Operand, n int, _ gpu.DType) error {
	return k.launch(s, func(l *fake.Launch) {
		out := fake.Slice[float32](l, y, n)
		element := func(o elementwise.Operand) func(int) float32 {
			period := n
			if o.Period != 0 {
				period = o.Period
			}
			x := fake.Slice[float32](l, o.Ptr, period)
			return func(i int) float32 { return x[i/max(1, o.Repeat)%period] }
		}
		x, z := element(a), element(b)
		for i := range out {
			out[i] = float32(binaryReference(op, float64(x(i)), float64(z(i))))
		}
	})
}

func (k *fakeKernels) Softmax(s gpu.Stream, y, x gpu.Ptr, rows, n int, _ gpu.DType) error {
	return k.launch(s, func(l *fake.Launch) {
		in, out := floatsAt(l, x, rows*n), floatsAt(l, y, rows*n)
		for r := range rows {
			largest, sum := slices.Max(in[r*n:][:n]), 0.0
			for _, v := range in[r*n:][:n] {
				sum += math.Exp(float64(v - largest))
			}
			for i := r * n; i < r*n+n; i++ {
				out[i] = float32(math.Exp(float64(in[i]-largest)) / sum)
			}
		}
	})
}

func (k *fakeKernels) SoftmaxBackward(s gpu.Stream, dx, g, y gpu.Ptr, rows,
	n int, _ gpu.DType) error {
	return k.launch(s, func(l *fake.Launch) {
		up, out, d := floatsAt(l, g, rows*n), floatsAt(l, y, rows*n), floatsAt(l, dx, rows*n)
		for r := range rows {
			dot := 0.0
			for i := r * n; i < r*n+n; i++ {
				dot += float64(up[i] * out[i])
			}
			for i := r * n; i < r*n+n; i++ {
				d[i] = out[i] * (up[i] - float32(dot))
			}
		}
	})
}

func (k *fakeKernels) Copy(s gpu.Stream, a layout.Copy) error {
	return k.launch(s, func(l *fake.Launch) {
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
	})
}

func floatsAt(l *fake.Launch, p gpu.Ptr, n int) []float32 { return fake.Slice[float32](l, p, n) }

func intsAt(l *fake.Launch, p kernel.Ints, n int) []int {
	ids := make([]int, n)
	for i, v := range fake.Slice[int64](l, p.Ptr, n) {
		ids[i] = int(v)
	}
	return ids
}

func (k *fakeKernels) Cast(s gpu.Stream, y gpu.Ptr, yt gpu.DType, x gpu.Ptr,
	xt gpu.DType, n int) error {
	if yt == xt {
		return k.launch(s, func(l *fake.Launch) {
			copy(fake.Slice[byte](l, y, n*yt.Size()), fake.Slice[byte](l, x, n*xt.Size()))
		})
	}
	return k.launch(s, func(l *fake.Launch) { copy(floatsAt(l, y, n), floatsAt(l, x, n)) })
}

func (k *fakeKernels) Axpby(s gpu.Stream, y gpu.Ptr, yt gpu.DType, alpha float64, x gpu.Ptr,
	xt gpu.DType, beta float64, n int) error {
	return k.launch(s, func(l *fake.Launch) {
		out := floatsAt(l, y, n)
		for i, v := range floatsAt(l, x, n) {
			if beta == 0 { // out may hold anything
				out[i] = float32(alpha) * v
				continue
			}
			out[i] = float32(alpha)*v + float32(beta)*out[i]
		}
	})
}

func (k *fakeKernels) RMSNorm(s gpu.Stream, a normkernel.RMSNorm) error {
	return k.launch(s, func(l *fake.Launch) {
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
	})
}

func (k *fakeKernels) RMSNormWays(normkernel.RMSNorm) ([]kernel.Way, error) { return nil, nil }

func (k *fakeKernels) RMSNormBackwardWays(normkernel.RMSNormBackward) ([]kernel.Way, error) {
	return nil, nil
}

func (k *fakeKernels) AttentionVariants(attention.Geometry, gpu.DType,
	...kernel.Rows) []attention.Variant {
	return nil
}

func (k *fakeKernels) Build(units ...string) string { return "fake " + strings.Join(units, " ") }

func (k *fakeKernels) RMSNormWorkspace(d int, _ gpu.DType) int { return 4 * d }

func (k *fakeKernels) AddRMSNormParts(s gpu.Stream, left []normkernel.RMSNormParts) error {
	return k.launch(s, func(l *fake.Launch) {
		for _, p := range left {
			copy(floatsAt(l, p.DW, p.D), floatsAt(l, p.Partial, p.D))
		}
	})
}

func (k *fakeKernels) AttentionStatsBytes(a attention.Geometry, _ gpu.DType) int {
	return 8 * a.Batch * a.Heads * a.Seq
}

func (k *fakeKernels) RMSNormBackward(s gpu.Stream, a normkernel.RMSNormBackward) error {
	dw := a.DW
	if a.Parts != nil {
		dw = a.Workspace
		*a.Parts = normkernel.RMSNormParts{DW: a.DW, Partial: a.Workspace, Parts: 1,
			D: a.D, Type: a.DWType}
	}
	return k.launch(s, func(l *fake.Launch) {
		n := a.Rows * a.D
		floatsAt(l, a.Workspace, a.D)
		layer.RMSNormBackward(floatsAt(l, a.DX, n), floatsAt(l, dw, a.D), floatsAt(l, a.G, n),
			floatsAt(l, a.X, n), floatsAt(l, a.W, a.D),
			floatsAt(l, a.Rstd, a.Rows))
		if a.Add != 0 {
			dx := floatsAt(l, a.DX, n)
			for i, v := range floatsAt(l, a.Add, n) {
				dx[i] += v
			}
		}
		float8At(l, a.DX8, a.Scale8, rowsAt(l, a.DX, a.Rows, a.D, 0))
	})
}

func (k *fakeKernels) RoPE(s gpu.Stream, a rope.Rotate) error {
	return k.launch(s, func(l *fake.Launch) {
		width, h := a.Heads*a.HeadDim, a.HeadDim/2
		cos, sin := floatsAt(l, a.Cos, a.Seq*h), floatsAt(l, a.Sin, a.Seq*h)
		y, x := rowsAt(l, a.Y, a.Rows, width, a.YStride), rowsAt(l, a.X, a.Rows, width, a.XStride)
		for i := range y {
			at := i % a.Seq * h
			layer.RoPE(y[i], x[i], cos[at:], sin[at:], 1, a.Heads, a.HeadDim, a.Inverse)
		}
	})
}

// rowsAt is rows of f floats that lie stride apart, 0 for no gaps.
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

func (k *fakeKernels) SiLUMul(s gpu.Stream, a silu.Mul) error {
	return k.launch(s, func(l *fake.Launch) {
		x, y := rowsAt(l, a.A, a.Rows, a.F, a.Stride), rowsAt(l, a.B, a.Rows, a.F, a.Stride)
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
	})
}

func (k *fakeKernels) SiLUMulBackward(s gpu.Stream, a silu.MulBackward) error {
	return k.launch(s, func(l *fake.Launch) {
		h, dh := rowsAt(l, a.H, a.Rows, a.F, 0), rowsAt(l, a.DH, a.Rows, a.F, 0)
		x, y := rowsAt(l, a.A, a.Rows, a.F, a.Stride), rowsAt(l, a.B, a.Rows, a.F, a.Stride)
		dx, dy := rowsAt(l, a.DA, a.Rows, a.F, a.GradStride),
			rowsAt(l, a.DB, a.Rows, a.F, a.GradStride)
		backward := layer.SiLUMulBackward[float32]
		if a.GELU {
			backward = layer.GELUMulBackward[float32]
		}
		for i := range h {
			backward(h[i], dx[i], dy[i], dh[i], x[i], y[i])
		}
		float8At(l, a.DAB8, a.Scale8, sideBySide(dx, dy))
	})
}

func (k *fakeKernels) Embedding(s gpu.Stream, a embedding.Forward) error {
	return k.launch(s, func(l *fake.Launch) {
		layer.Embedding(floatsAt(l, a.Y, a.Rows*a.D), intsAt(l, a.IDs, a.Rows),
			floatsAt(l, a.Table, a.Vocab*a.D), a.D)
	})
}

func (k *fakeKernels) EmbeddingBackward(s gpu.Stream, a embedding.Backward) error {
	return k.launch(s, func(l *fake.Launch) {
		fake.Slice[byte](l, a.Workspace, embedding.Workspace(a.Rows, a.Vocab, a.D))
		dt := floatsAt(l, a.DT, a.Vocab*a.D)
		old := slices.Clone(dt)
		layer.EmbeddingBackward(dt, intsAt(l, a.IDs, a.Rows), floatsAt(l, a.G, a.Rows*a.D), a.D)
		if a.Accumulate {
			for i, v := range old {
				dt[i] += v
			}
		}
	})
}

func (k *fakeKernels) CrossEntropyScale(s gpu.Stream, scale gpu.Ptr,
	targets kernel.Ints, rows int) error {
	return k.launch(s, func(l *fake.Launch) {
		floatsAt(l, scale, 1)[0] = 1 / float32(cpucrossentropy.Targets(intsAt(l, targets, rows)))
	})
}

func (k *fakeKernels) CrossEntropy(s gpu.Stream, a crossentropy.Forward) error {
	return k.launch(s, func(l *fake.Launch) {
		logits, losses, targets := floatsAt(l, a.Logits, a.Rows*a.V), floatsAt(l, a.Losses, a.Rows),
			intsAt(l, a.Targets, a.Rows)
		lse := make([]float32, a.Rows)
		if a.LSE != 0 {
			lse = floatsAt(l, a.LSE, a.Rows)
		}
		for r, target := range targets {
			losses[r] = 0
			if row := logits[r*a.V:][:a.V]; target >= 0 {
				losses[r] = float32(cpucrossentropy.Forward(lse[r:r+1], row, targets[r:r+1], a.V))
			}
		}
		if a.Scale != 0 {
			cpucrossentropy.Backward(logits, logits, lse, targets, a.V,
				floatsAt(l, a.Scale, 1)[0]*upstream(l, a))
		}
	})
}

func upstream(l *fake.Launch, a crossentropy.Forward) float32 {
	if a.Grad == 0 {
		return 1
	}
	return floatsAt(l, a.Grad, 1)[0]
}

func (k *fakeKernels) CrossEntropyMean(s gpu.Stream, mean, losses, scale gpu.Ptr, rows int) error {
	return k.launch(s, func(l *fake.Launch) {
		var sum float32
		for _, v := range floatsAt(l, losses, rows) {
			sum += v
		}
		floatsAt(l, mean, 1)[0] = sum * floatsAt(l, scale, 1)[0]
	})
}

func (k *fakeKernels) CrossEntropyBackward(s gpu.Stream, out gpu.Ptr,
	a crossentropy.Forward) error {
	return k.launch(s, func(l *fake.Launch) {
		n := a.Rows * a.V
		cpucrossentropy.Backward(floatsAt(l, out, n), floatsAt(l, a.Logits, n),
			floatsAt(l, a.LSE, a.Rows), intsAt(l, a.Targets, a.Rows), a.V,
			floatsAt(l, a.Scale, 1)[0]*upstream(l, a))
	})
}

// NewTable remembers the tensors, whose steps the fake counts.
func (k *fakeKernels) NewTable(tensors []optimizer.Tensor) (*optimizer.Table, error) {
	t, err := optimizer.NewTable(kernel.New(k.ctx), tensors)
	return k.remembered(t, tensors, err)
}

// NewScattered likewise.
func (k *fakeKernels) NewScattered(tensors []optimizer.Tensor, at []int,
	chunks int) (*optimizer.Table, error) {
	t, err := optimizer.NewScattered(kernel.New(k.ctx), tensors, at, chunks)
	return k.remembered(t, tensors, err)
}

func (k *fakeKernels) remembered(t *optimizer.Table, tensors []optimizer.Tensor,
	err error) (*optimizer.Table, error) {
	if err == nil {
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.tables == nil {
			k.tables = map[*optimizer.Table][]optimizer.Tensor{}
		}
		k.tables[t] = slices.Clone(tensors)
	}
	return t, err
}

func (k *fakeKernels) GradSquares(s gpu.Stream, squares gpu.Ptr, t *optimizer.Table) error {
	return k.launch(s, func(l *fake.Launch) {
		out := floatsAt(l, squares, t.Chunks)
		clear(out)
		first := 0 // chunk of the tensor
		for chunk := range t.Chunks {
			i := t.TensorOf(chunk)
			if chunk > 0 && t.TensorOf(chunk-1) != i {
				first = chunk
			}
			if i < 0 {
				continue
			}
			p := k.tables[t][i]
			from := (chunk - first) * optimizer.OptimChunk
			for _, g := range gradientAt(l, p,
				p.Size)[from:min(from+optimizer.OptimChunk, p.Size)] {
				out[chunk] += g * g
			}
		}
	})
}

// gradientAt is the first n elements of a gradient: those of float32, or a copy of others.
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

// control is the block, and what gradients are multiplied by, which GradNorm leaves in it.
func control(l *fake.Launch, p gpu.Ptr) (b []byte, c optimizer.Control,
	multiplier func(optimizer.Tensor) float64) {
	b = fake.Slice[byte](l, p, optimizer.ControlBytes)
	return b, optimizer.DecodeControl(b), func(t optimizer.Tensor) float64 {
		if t.Apart {
			return float64(fake32(b[60:]))
		}
		return float64(fake32(b[44:]))
	}
}

func (k *fakeKernels) GradNorm(s gpu.Stream, at, squares gpu.Ptr, count int, scale,
	apart gpu.Ptr) error {
	return k.launch(s, func(l *fake.Launch) {
		b, c, _ := control(l, at)
		var sum, other float64
		flags := make([]byte, count)
		if apart != 0 {
			flags = fake.Slice[byte](l, apart, count)
		}
		for i, v := range floatsAt(l, squares, count) {
			if flags[i] != 0 {
				other += float64(v)
			} else {
				sum += float64(v)
			}
		}
		multiplier := c.GradScale
		if scale != 0 {
			multiplier /= float64(floatsAt(l, scale, 1)[0])
		}
		norm, own := float32(math.Sqrt(sum)*multiplier), float32(math.Sqrt(other)*multiplier)
		skipped, multiplierApart := uint32(0), multiplier
		if c.SkipNonFinite && (norm-norm != 0 || own-own != 0) {
			skipped = 1
		}
		if c.MaxNorm > 0 {
			multiplier *= min(1, c.MaxNorm/(float64(norm)+1e-6))
			multiplierApart *= min(1, c.MaxNorm/(float64(own)+1e-6))
		}
		if skipped == 1 {
			norm += own
		}
		binary.LittleEndian.PutUint32(b[60:], math.Float32bits(float32(multiplierApart)))
		binary.LittleEndian.PutUint32(b[36:], skipped)
		binary.LittleEndian.PutUint32(b[40:], math.Float32bits(norm))
		binary.LittleEndian.PutUint32(b[44:], math.Float32bits(float32(multiplier)))
		if scale != 0 {
			copy(b[48:], moveOn(fake.Slice[byte](l, scale, optimizer.LossScaleBytes), skipped == 1))
		}
	})
}

// moveOn changes a loss scale by the rule.
func moveOn(at []byte, skipped bool) []byte {
	s := optimizer.LossScale{Scale: fake32(at), Good: int32(binary.LittleEndian.Uint32(at[4:])) + 1,
		Skipped: int32(binary.LittleEndian.Uint32(at[8:]))}
	switch {
	case skipped:
		s = optimizer.LossScale{Scale: max(1, s.Scale/2), Skipped: s.Skipped + 1}
	case s.Good == 2000:
		s.Scale, s.Good = 2*s.Scale, 0
	}
	copy(at, s.Bytes())
	return at
}

func fake32(b []byte) float32 { return math.Float32frombits(binary.LittleEndian.Uint32(b)) }

func (k *fakeKernels) AdamW(s gpu.Stream, at gpu.Ptr, t *optimizer.Table) error {
	return k.launch(s, func(l *fake.Launch) {
		_, c, scale := control(l, at)
		if c.Skipped {
			return
		}
		for i := range k.tables[t] {
			p := &k.tables[t][i]
			p.Step++
			of := func(x gpu.Ptr) []float32 { return floatsAt(l, x, p.Size) }
			g := slices.Clone(gradientAt(l, *p, p.Size))
			array.ScaleBy(g, scale(*p))
			cpuoptimizer.AdamW(of(p.Param), g, of(p.First), of(p.Second),
				cpuoptimizer.AdamWStep{LR: c.LR * p.LRScale, Beta1: p.Beta1, Beta2: p.Beta2,
					Eps: c.Eps, Decay: p.Decay, Step: int(p.Step)})
			if p.Copy != 0 {
				copy(of(p.Copy), of(p.Param))
			}
		}
	})
}

func writeCopy(l *fake.Launch, p optimizer.Tensor) {
	if p.Copy != 0 {
		copy(floatsAt(l, p.Copy, p.Size), floatsAt(l, p.Param, p.Size))
	}
}

func (k *fakeKernels) MuonDirection(s gpu.Stream, at, squares gpu.Ptr, t *optimizer.Table,
	nesterov bool) error {
	return k.launch(s, func(l *fake.Launch) {
		_, c, scale := control(l, at)
		if c.Skipped {
			return
		}
		workspace := floatsAt(l, squares, t.Chunks)
		for i := range workspace {
			workspace[i] = float32(math.NaN())
		}
		for _, p := range k.tables[t] {
			g, m, u := gradientAt(l, p, p.Size), floatsAt(l, p.First, p.Size),
				floatsAt(l, p.Direction, p.Size)
			mu := float32(p.Beta1)
			var sum float64
			for i, v := range g {
				v *= float32(scale(p))
				m[i] += (1 - mu) * (v - m[i])
				u[i] = m[i]
				if nesterov {
					u[i] = v + mu*(m[i]-v)
				}
				sum += float64(u[i]) * float64(u[i])
			}
			array.ScaleBy(u, 1/(math.Sqrt(sum)+1e-7))
		}
	})
}

func (k *fakeKernels) MuonApply(s gpu.Stream, at gpu.Ptr, t *optimizer.Table) error {
	return k.launch(s, func(l *fake.Launch) {
		_, c, _ := control(l, at)
		if c.Skipped {
			return
		}
		for _, p := range k.tables[t] {
			w, r := floatsAt(l, p.Param, p.Size), floatsAt(l, p.Result, p.Size)
			lr := c.LR * p.LRScale
			for i, v := range r {
				w[i] = float32(1-lr*p.Decay)*w[i] - float32(lr*p.ShapeScale)*v
			}
			writeCopy(l, p)
		}
	})
}

func (k *fakeKernels) ReduceWorkspace(reduce.Reduce) int { return 4 }

func (k *fakeKernels) Reduce(s gpu.Stream, a reduce.Reduce) error {
	return k.launch(s, func(l *fake.Launch) {
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
	})
}

func (k *fakeKernels) Attention(s gpu.Stream, a attention.Geometry, y kernel.Rows, lse gpu.Ptr, q,
	key, v kernel.Rows, _ gpu.DType) error {
	return k.launch(s, func(l *fake.Launch) {
		out := denseRows(l, a, a.Heads, y)
		cpuattention.Forward(out, fake.Slice[float32](l, lse, a.Batch*a.Heads*a.Seq),
			denseRows(l, a, a.Heads, q), denseRows(l, a, a.KVHeads, key),
			denseRows(l, a, a.KVHeads, v), cpuShape(l, a))
		spreadRows(l, a, a.Heads, y, out)
	})
}

func (k *fakeKernels) AttentionBackward(s gpu.Stream, a attention.Geometry, dq, dk, dv kernel.Rows,
	stats gpu.Ptr, g, q, key, v, y kernel.Rows,
	lse gpu.Ptr, _ gpu.DType) error {
	return k.launch(s, func(l *fake.Launch) {
		rows := func(heads int, r kernel.Rows) []float32 { return denseRows(l, a, heads, r) }
		outQ, outK, outV := rows(a.Heads, dq), rows(a.KVHeads, dk), rows(a.KVHeads, dv)
		cpuattention.Backward(outQ, outK, outV, rows(a.Heads, g), rows(a.Heads, q),
			rows(a.KVHeads, key), rows(a.KVHeads, v), rows(a.Heads, y),
			fake.Slice[float32](l, lse, a.Batch*a.Heads*a.Seq), cpuShape(l, a))
		if a.Cos != 0 {
			cos, sin := floatsAt(l, a.Cos, a.Seq*a.HeadDim/2), floatsAt(l, a.Sin, a.Seq*a.HeadDim/2)
			layer.RoPE(outQ, outQ, cos, sin, a.Seq, a.Heads, a.HeadDim, true)
			layer.RoPE(outK, outK, cos, sin, a.Seq, a.KVHeads, a.HeadDim, true)
		}
		spreadRows(l, a, a.Heads, dq, outQ)
		spreadRows(l, a, a.KVHeads, dk, outK)
		spreadRows(l, a, a.KVHeads, dv, outV)
	})
}

func (k *fakeKernels) DecodeAttention(s gpu.Stream, a decode.Attention) error {
	return k.launch(s, func(l *fake.Launch) {
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
		cpuattention.At(floatsAt(l, a.Y, qd), q, keys, values, p, cpuattention.Shape{Heads: a.Heads,
			KVHeads: a.KVHeads, HeadDim: a.HeadDim, Scale: a.Scale, Window: a.Window})
	})
}

func (k *fakeKernels) DecodeProduct(s gpu.Stream, a decode.Product) error {
	return k.launch(s, func(l *fake.Launch) {
		y := rowProduct(l, a.X, a.W, a.Columns, a.D)
		if a.C != 0 {
			for i, c := range floatsAt(l, a.C, a.Columns) {
				y[i] += c
			}
		}
		copy(floatsAt(l, a.Y, a.Columns), y)
	})
}

func (k *fakeKernels) DecodeGated(s gpu.Stream, a decode.Gated) error {
	return k.launch(s, func(l *fake.Launch) {
		y, h := rowProduct(l, a.X, a.W, 2*a.F, a.D), floatsAt(l, a.H, a.F)
		if a.GELU {
			layer.GELUMul(h, y[:a.F], y[a.F:])
		} else {
			layer.SiLUMul(h, y[:a.F], y[a.F:])
		}
	})
}

// rowProduct is x·wᵀ of one row.
func rowProduct(l *fake.Launch, x, w gpu.Ptr, columns, d int) []float32 {
	row, all, y := floatsAt(l, x, d), floatsAt(l, w, columns*d), make([]float32, columns)
	for i := range y {
		for j, v := range row {
			y[i] += v * all[i*d+j]
		}
	}
	return y
}

// denseRows is a copy of an operand of attention, without the gaps between its rows.
func denseRows(l *fake.Launch, a attention.Geometry, heads int, r kernel.Rows) []float32 {
	return slices.Concat(rowsAt(l, r.Ptr, a.Batch*a.Seq, heads*a.HeadDim, r.Stride)...)
}

// spreadRows writes a result of attention to where it belongs.
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

// AttentionDocuments leaves the ends out, which are the kernels' alone.
func (k *fakeKernels) AttentionDocuments(s gpu.Stream, a attention.Documents) error {
	return k.launch(s, func(l *fake.Launch) {
		to := fake.Slice[int32](l, a.Table, attention.DocumentsBytes(a.Batch, a.Seq)/4)
		for i := range a.Batch * a.Seq {
			start := int64(0)
			if a.Starts.Ptr != 0 {
				start = fake.Slice[int64](l, a.Starts.Ptr, a.Batch*a.Seq)[i]
			}
			if a.Window > 0 {
				start = max(start, int64(i%a.Seq-a.Window+1))
			}
			to[i] = int32(start)
		}
	})
}

func (k *fakeKernels) Normalize(s gpu.Stream, a normalize.Forward) error {
	return k.launch(s, func(l *fake.Launch) {
		floatsAt(l, a.Workspace, normalize.NormalizeWorkspace/4)
		x, y := floatsAt(l, a.X, a.N), floatsAt(l, a.Y, a.N)
		r := float32(1 / (math.Sqrt(array.SumSquares(x)) + 1e-7))
		for i, v := range x {
			y[i] = v * r
		}
	})
}

func (k *fakeKernels) TakesSymmetric(a gemm.SymmetricShape, _ gpu.DType) bool {
	return a.N%8 == 0 && a.Depth%8 == 0
}

func (k *fakeKernels) Symmetric(s gpu.Stream, a gemm.Symmetric) error {
	return k.launch(s, func(l *fake.Launch) {
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
			cpugemm.Mul(a.Tall, !a.Tall, n, n, a.Depth, a.Alpha, left, stride,
				right, stride, a.Beta, d, n)
			for i := range n {
				d[i*n+i] += a.Delta
			}
		}
	})
}

func (k *fakeKernels) NormalizeBackward(s gpu.Stream, a normalize.Backward) error {
	return k.launch(s, func(l *fake.Launch) {
		floatsAt(l, a.Workspace, normalize.NormalizeWorkspace/4)
		x, g, dx := floatsAt(l, a.X, a.N), floatsAt(l, a.G, a.N), floatsAt(l, a.DX, a.N)
		norm, dot := math.Sqrt(array.SumSquares(x)), 0.0
		for i, v := range x {
			dot += float64(v) * float64(g[i])
		}
		r := norm + 1e-7
		for i, v := range x {
			dx[i] = float32(float64(g[i])/r - float64(v)*dot/(r*r*norm))
		}
	})
}

// float8Products is the products of [Float8] without the storage of BFloat16, which fakeKernels do
// not know.
func float8Products(c *machineConfig) error {
	c.float8 = true
	return nil
}

// quantizedRow puts a row in float8 and returns its scale.
func quantizedRow(y []byte, x []float32) float32 {
	largest := float32(0)
	for _, v := range x {
		largest = max(largest, float32(math.Abs(float64(v))))
	}
	scale := largest / gpu.Float8Max
	if scale == 0 {
		scale = 1
	}
	inverse := 1 / scale
	for i, v := range x {
		y[i] = gpu.E4M3(v * inverse)
	}
	return scale
}

// float8At puts rows in float8, if that is asked for.
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

func (k *fakeKernels) Quantize(s gpu.Stream, a quantize.Rows) error {
	return k.launch(s, func(l *fake.Launch) {
		float8At(l, a.Y, a.Scale, rowsAt(l, a.X, a.Rows, a.D, a.XStride))
	})
}

func (k *fakeKernels) QuantizeColumnsWorkspace(rows, d int) int { return 4 * d }

func (k *fakeKernels) QuantizeColumns(s gpu.Stream, a quantize.Columns) error {
	return k.launch(s, func(l *fake.Launch) {
		copy(floatsAt(l, a.Workspace, a.D), make([]float32, a.D))
		float8At(l, a.Y, a.Scale, columnsAt(l, a.X, a.Rows, a.D))
	})
}

func (k *fakeKernels) NewQuantizeTable(weights []quantize.Weight) (*quantize.Table, error) {
	t, err := quantize.NewTable(kernel.New(k.ctx), weights)
	if err == nil {
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.weights == nil {
			k.weights = map[*quantize.Table][]quantize.Weight{}
		}
		k.weights[t] = weights
	}
	return t, err
}

func (k *fakeKernels) QuantizeWeights(s gpu.Stream, t *quantize.Table) error {
	return k.launch(s, func(l *fake.Launch) {
		for _, w := range k.weights[t] {
			float8At(l, w.Y, w.Scale, rowsAt(l, w.X, w.Rows, w.D, 0))
			float8At(l, w.Turned, w.TurnedScale, columnsAt(l, w.X, w.Rows, w.D))
		}
	})
}

// columnsAt returns the columns of a matrix.
func columnsAt(l *fake.Launch, p gpu.Ptr, rows, d int) [][]float32 {
	turned := make([][]float32, d)
	for i, v := range floatsAt(l, p, rows*d) {
		turned[i%d] = append(turned[i%d], v)
	}
	return turned
}

// sideBySide returns the rows of two matrices side by side.
func sideBySide(a, b [][]float32) (rows [][]float32) {
	for i := range a {
		rows = append(rows, slices.Concat(a[i], b[i]))
	}
	return rows
}

// operandAt returns a matrix: of float32, or where there are factors of its rows of float8.
func operandAt(l *fake.Launch, p, scale gpu.Ptr, rows, d int) []float32 {
	if scale == 0 {
		return floatsAt(l, p, rows*d)
	}
	values, factors := make([]float32, rows*d), floatsAt(l, scale, rows)
	for i, b := range fake.Slice[byte](l, p, rows*d) {
		values[i] = gpu.FromE4M3(b) * factors[i/d]
	}
	return values
}

// The products of this module's own of fakeKernels.

func (k *fakeKernels) SiLUProductWays(int, int, int, gpu.DType) []kernel.Way {
	return []kernel.Way{{Family: "fused"}}
}

func (k *fakeKernels) SiLUProduct(s gpu.Stream, a gemm.SiLUProduct) error {
	return k.launch(s, func(l *fake.Launch) {
		ab := floatsAt(l, a.AB, 2*a.Rows*a.F)
		cpugemm.Mul(false, true, a.Rows, 2*a.F, a.D, 1, floatsAt(l, a.X, a.Rows*a.D), a.D,
			floatsAt(l, a.Weights, 2*a.F*a.D), a.D, 0, ab, 2*a.F)
		for i, h := range rowsAt(l, a.H, a.Rows, a.F, 0) {
			layer.SiLUMul(h, ab[2*i*a.F:][:a.F], ab[(2*i+1)*a.F:][:a.F])
		}
	})
}

func (k *fakeKernels) SiLUProductBackward(s gpu.Stream, a gemm.SiLUProductBackward) error {
	return k.launch(s, func(l *fake.Launch) {
		dh, ab, dab := make([]float32, a.Rows*a.F), floatsAt(l, a.AB, 2*a.Rows*a.F),
			floatsAt(l, a.DAB, 2*a.Rows*a.F)
		cpugemm.Mul(false, false, a.Rows, a.F, a.D, 1, floatsAt(l, a.G, a.Rows*a.D), a.D,
			floatsAt(l, a.Down, a.D*a.F), a.F, 0, dh, a.F)
		h := make([]float32, a.Rows*a.F)
		if a.H != 0 {
			h = floatsAt(l, a.H, len(h))
		}
		for i := range a.Rows {
			left, right := 2*i*a.F, (2*i+1)*a.F
			layer.SiLUMulBackward(h[i*a.F:][:a.F], dab[left:][:a.F], dab[right:][:a.F],
				dh[i*a.F:][:a.F], ab[left:][:a.F], ab[right:][:a.F])
		}
	})
}

func (k *fakeKernels) RoPEProductWays(gemm.RoPEProductShape, gpu.DType) []kernel.Way {
	return []kernel.Way{{Family: "fused"}}
}

func (k *fakeKernels) RoPEProduct(s gpu.Stream, a gemm.RoPEProduct) error {
	return k.launch(s, func(l *fake.Launch) {
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
		for i := range a.Rows {
			turned, at := y[i*a.Columns:][:a.Turned], i%a.Seq*h
			layer.RoPE(turned, turned, cos[at:], sin[at:], 1, a.Turned/a.HeadDim, a.HeadDim, false)
		}
	})
}

func (k *fakeKernels) ProductWays(gemm.ProductShape, gpu.DType) []kernel.Way { return nil }

func (k *fakeKernels) Product(s gpu.Stream, a gemm.Product) error {
	return k.launch(s, func(l *fake.Launch) {
		y, c := floatsAt(l, a.Y, a.Rows*a.Columns), make([]float32, a.Rows*a.Columns)
		if a.C != 0 {
			copy(c, floatsAt(l, a.C, len(c)))
		}
		cpugemm.Mul(false, true, a.Rows, a.Columns, a.D, 1,
			operandAt(l, a.X, a.ScaleX, a.Rows, a.D), a.D,
			operandAt(l, a.W, a.ScaleW, a.Columns, a.D), a.D, 0, y, a.Columns)
		for i, v := range c {
			y[i] += v
		}
	})
}

// withKernels has a machine's kernels be what wrap makes of them.
func withKernels(wrap func(run.Launcher) run.Launcher) MachineOption {
	return func(c *machineConfig) error {
		inner := c.kernels
		c.kernels = func(ctx gpu.Context) (run.Launcher, error) {
			k, err := inner(ctx)
			if err != nil {
				return nil, err
			}
			return wrap(k), nil
		}
		return nil
	}
}

// fakeOf is the fake behind a machine's kernels.
func fakeOf(k run.Launcher) *fakeKernels { return k.(*moduleOf).fakeKernels }

// isOp reports whether a node's op is of a type.
func isOp[T any](n *gorgonia.Node) bool {
	_, ok := n.Op().(T)
	return ok
}

// apartBy is ‖x − y‖/‖y‖.
func apartBy(x, y []float32) float64 {
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

// OpenFake is openFake for tests with packages that import this one.
func OpenFake(t testing.TB) (*Device, MachineOption) {
	device, _, option := openFake(t, fake.Config{})
	return device, option
}

// Wrap puts something around a device's context.
func Wrap(d *Device, around func(gpu.Context) gpu.Context) {
	d.ctx.Context = around(d.ctx.Context)
}
