package cudaops

import (
	"math"
	"sync"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/cpu"
)

// fakeKernels does in Go, on the fake driver's memory and in its streams' order, what the kernels do on a GPU, in float32.
// Every call is a launch of one kernel, whose argument says which of the calls so far to compute.
type fakeKernels struct {
	ctx  driver.Context
	call *driver.Function

	mu    sync.Mutex
	calls []func(*fake.Launch)
}

// openFake returns a device of a fake driver, and the option that makes machines on it use fakeKernels.
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
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := device.Close(); err != nil {
			t.Error(err)
		}
	})
	return device, d, func(c *machineConfig) error {
		c.kernels = func(ctx driver.Context) (kernelSet, error) {
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
	module driver.Module
}

func (m *moduleOf) Close() error { return m.ctx.UnloadModule(m.module) }

func (k *fakeKernels) launch(s driver.Stream, f func(*fake.Launch)) error {
	k.mu.Lock()
	k.calls = append(k.calls, f)
	i := len(k.calls) - 1
	k.mu.Unlock()
	return k.ctx.Launch(k.call, driver.LaunchConfig{}, s, new(driver.Args).Int32(i))
}

func (k *fakeKernels) Unary(s driver.Stream, op kernels.UnaryOp, y, x driver.Ptr, p float64, n int, _ driver.DType) error {
	return k.launch(s, func(l *fake.Launch) {
		out, in := fake.Slice[float32](l, y, n), fake.Slice[float32](l, x, n)
		for i, v := range in {
			out[i] = float32(unaryReference(op, float64(v), p))
		}
	})
}

func unaryReference(op kernels.UnaryOp, v, p float64) float64 {
	switch op {
	case kernels.Neg:
		return -v
	case kernels.Square:
		return v * v
	case kernels.Exp:
		return math.Exp(v)
	case kernels.Tanh:
		return math.Tanh(v)
	case kernels.Sigmoid:
		return 1 / (1 + math.Exp(-v))
	case kernels.MulScalar:
		return v * p
	}
	return math.NaN() // the tests use no others
}

func (k *fakeKernels) Binary(s driver.Stream, op kernels.BinaryOp, y driver.Ptr, a, b kernels.Operand, n int, _ driver.DType) error {
	return k.launch(s, func(l *fake.Launch) {
		out := fake.Slice[float32](l, y, n)
		element := func(o kernels.Operand) func(int) float32 {
			period := n
			if o.Period != 0 {
				period = o.Period
			}
			x := fake.Slice[float32](l, o.Ptr, period)
			return func(i int) float32 { return x[i/max(1, o.Repeat)%period] }
		}
		x, z := element(a), element(b)
		for i := range out {
			switch op {
			case kernels.Add:
				out[i] = x(i) + z(i)
			case kernels.Sub:
				out[i] = x(i) - z(i)
			case kernels.Mul:
				out[i] = x(i) * z(i)
			case kernels.Div:
				out[i] = x(i) / z(i)
			default:
				out[i] = float32(math.NaN())
			}
		}
	})
}

func floatsAt(l *fake.Launch, p driver.Ptr, n int) []float32 { return fake.Slice[float32](l, p, n) }

func intsAt(l *fake.Launch, p kernels.Ints, n int) []int {
	ids := make([]int, n)
	for i, v := range fake.Slice[int64](l, p.Ptr, n) {
		ids[i] = int(v)
	}
	return ids
}

func (k *fakeKernels) Cast(s driver.Stream, y driver.Ptr, yt driver.DType, x driver.Ptr, xt driver.DType, n int) error {
	return k.launch(s, func(l *fake.Launch) { copy(floatsAt(l, y, n), floatsAt(l, x, n)) })
}

func (k *fakeKernels) RMSNorm(s driver.Stream, a kernels.RMSNorm) error {
	return k.launch(s, func(l *fake.Launch) {
		n := a.Rows * a.D
		cpu.RMSNorm(floatsAt(l, a.Y, n), floatsAt(l, a.Rstd, a.Rows), floatsAt(l, a.X, n), floatsAt(l, a.W, a.D), a.Eps)
	})
}

func (k *fakeKernels) RMSNormWorkspace(d int) int { return 4 * d }

func (k *fakeKernels) RMSNormBackward(s driver.Stream, a kernels.RMSNormBackward) error {
	return k.launch(s, func(l *fake.Launch) {
		n := a.Rows * a.D
		floatsAt(l, a.Workspace, a.D)
		cpu.RMSNormBackward(floatsAt(l, a.DX, n), floatsAt(l, a.DW, a.D), floatsAt(l, a.G, n), floatsAt(l, a.X, n), floatsAt(l, a.W, a.D),
			floatsAt(l, a.Rstd, a.Rows))
	})
}

func (k *fakeKernels) RoPE(s driver.Stream, a kernels.RoPE) error {
	return k.launch(s, func(l *fake.Launch) {
		n, h := a.Rows*a.Heads*a.HeadDim, a.Seq*a.HeadDim/2
		cpu.RoPE(floatsAt(l, a.Y, n), floatsAt(l, a.X, n), floatsAt(l, a.Cos, h), floatsAt(l, a.Sin, h), a.Seq, a.Heads, a.HeadDim, a.Inverse)
	})
}

func (k *fakeKernels) SiLUMul(s driver.Stream, a kernels.SiLUMul) error {
	return k.launch(s, func(l *fake.Launch) {
		n := a.Rows * a.F
		cpu.SiLUMul(floatsAt(l, a.H, n), floatsAt(l, a.A, n), floatsAt(l, a.B, n))
	})
}

func (k *fakeKernels) SiLUMulBackward(s driver.Stream, a kernels.SiLUMulBackward) error {
	return k.launch(s, func(l *fake.Launch) {
		n := a.Rows * a.F
		cpu.SiLUMulBackward(floatsAt(l, a.H, n), floatsAt(l, a.DA, n), floatsAt(l, a.DB, n), floatsAt(l, a.DH, n), floatsAt(l, a.A, n), floatsAt(l, a.B, n))
	})
}

func (k *fakeKernels) Embedding(s driver.Stream, a kernels.Embedding) error {
	return k.launch(s, func(l *fake.Launch) {
		cpu.Embedding(floatsAt(l, a.Y, a.Rows*a.D), intsAt(l, a.IDs, a.Rows), floatsAt(l, a.Table, a.Vocab*a.D), a.D)
	})
}

func (k *fakeKernels) EmbeddingBackward(s driver.Stream, a kernels.EmbeddingBackward) error {
	return k.launch(s, func(l *fake.Launch) {
		fake.Slice[byte](l, a.Workspace, kernels.EmbeddingWorkspace(a.Rows, a.Vocab))
		cpu.EmbeddingBackward(floatsAt(l, a.DT, a.Vocab*a.D), intsAt(l, a.IDs, a.Rows), floatsAt(l, a.G, a.Rows*a.D), a.D)
	})
}

func (k *fakeKernels) CrossEntropyScale(s driver.Stream, scale driver.Ptr, targets kernels.Ints, rows int) error {
	return k.launch(s, func(l *fake.Launch) { floatsAt(l, scale, 1)[0] = 1 / float32(cpu.Targets(intsAt(l, targets, rows))) })
}

func (k *fakeKernels) CrossEntropy(s driver.Stream, a kernels.CrossEntropy) error {
	return k.launch(s, func(l *fake.Launch) {
		logits, losses, targets := floatsAt(l, a.Logits, a.Rows*a.V), floatsAt(l, a.Losses, a.Rows), intsAt(l, a.Targets, a.Rows)
		lse := make([]float32, a.Rows)
		if a.LSE != 0 {
			lse = floatsAt(l, a.LSE, a.Rows)
		}
		for r, target := range targets {
			losses[r] = 0
			if row := logits[r*a.V:][:a.V]; target >= 0 {
				losses[r] = float32(cpu.CrossEntropy(lse[r:r+1], row, targets[r:r+1], a.V))
			}
		}
		if a.Scale != 0 {
			cpu.CrossEntropyBackward(logits, logits, lse, targets, a.V, floatsAt(l, a.Scale, 1)[0]*upstream(l, a))
		}
	})
}

func upstream(l *fake.Launch, a kernels.CrossEntropy) float32 {
	if a.Grad == 0 {
		return 1
	}
	return floatsAt(l, a.Grad, 1)[0]
}

func (k *fakeKernels) CrossEntropyMean(s driver.Stream, mean, losses, scale driver.Ptr, rows int) error {
	return k.launch(s, func(l *fake.Launch) {
		var sum float32
		for _, v := range floatsAt(l, losses, rows) {
			sum += v
		}
		floatsAt(l, mean, 1)[0] = sum * floatsAt(l, scale, 1)[0]
	})
}

func (k *fakeKernels) CrossEntropyBackward(s driver.Stream, out driver.Ptr, a kernels.CrossEntropy) error {
	return k.launch(s, func(l *fake.Launch) {
		n := a.Rows * a.V
		cpu.CrossEntropyBackward(floatsAt(l, out, n), floatsAt(l, a.Logits, n), floatsAt(l, a.LSE, a.Rows), intsAt(l, a.Targets, a.Rows), a.V,
			floatsAt(l, a.Scale, 1)[0]*upstream(l, a))
	})
}

func (k *fakeKernels) ReduceWorkspace(kernels.Reduce) int { return 4 }

func (k *fakeKernels) Reduce(s driver.Stream, a kernels.Reduce) error {
	return k.launch(s, func(l *fake.Launch) {
		x, y := floatsAt(l, a.X, a.Outer*a.N*a.Inner), floatsAt(l, a.Y, a.Outer*a.Inner)
		for o := range a.Outer {
			for i := range a.Inner {
				r := x[o*a.N*a.Inner+i]
				for j := 1; j < a.N; j++ {
					v := x[(o*a.N+j)*a.Inner+i]
					if a.Op == kernels.Max {
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

func (k *fakeKernels) Attention(s driver.Stream, a kernels.AttentionShape, y kernels.Rows, lse driver.Ptr, q, key, v kernels.Rows, _ driver.DType) error {
	return k.launch(s, func(l *fake.Launch) {
		rows := func(r kernels.Rows) []float32 { return fake.Slice[float32](l, r.Ptr, a.Batch*a.Seq*r.Stride) }
		cpu.Attention(rows(y), fake.Slice[float32](l, lse, a.Batch*a.Heads*a.Seq), rows(q), rows(key), rows(v), cpuShape(a))
	})
}

func (k *fakeKernels) AttentionBackward(s driver.Stream, a kernels.AttentionShape, dq, dk, dv kernels.Rows, stats driver.Ptr, g, q, key, v, y kernels.Rows,
	lse driver.Ptr, _ driver.DType) error {
	return k.launch(s, func(l *fake.Launch) {
		rows := func(r kernels.Rows) []float32 { return fake.Slice[float32](l, r.Ptr, a.Batch*a.Seq*r.Stride) }
		fake.Slice[byte](l, stats, kernels.AttentionStatsBytes(a))
		cpu.AttentionBackward(rows(dq), rows(dk), rows(dv), rows(g), rows(q), rows(key), rows(v), rows(y),
			fake.Slice[float32](l, lse, a.Batch*a.Heads*a.Seq), cpuShape(a))
	})
}

func cpuShape(a kernels.AttentionShape) cpu.AttentionShape {
	return cpu.AttentionShape{Batch: a.Batch, Seq: a.Seq, Heads: a.Heads, KVHeads: a.KVHeads, HeadDim: a.HeadDim, Causal: a.Causal, Scale: a.Scale}
}
