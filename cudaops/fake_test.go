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
