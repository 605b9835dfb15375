package optimizer

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/internal/cpu/array"
	cpuoptimizer "github.com/kasmina-go/kasmina/internal/cpu/optimizer"
)

// parameter is a tensor on the GPU, together with its reference values.
type parameter struct {
	Tensor
	p, copy, grad, m, v, work *kerneltest.Buffer
	rp, rg, rm, rv            []float64
	rows, cols                int
}

func newParameter(g *kerneltest.Rig, rows, cols int, gradType, copyType gpu.DType) *parameter {
	n := rows * cols
	q := &parameter{rows: rows, cols: cols, copy: g.Alloc(n, copyType, 0),
		work: g.Alloc(n, gradType, 0)}
	q.p, q.rp = g.Normal(n, kerneltest.F32, 0)
	q.grad, q.rg = g.Normal(n, gradType, 0)
	q.m, q.rm = g.Upload(make([]float64, n), kerneltest.F32, 0)
	q.v, q.rv = g.Upload(make([]float64, n), kerneltest.F32, 0)
	q.Tensor = Tensor{Param: q.p.Ptr, Copy: q.copy.Ptr, Grad: q.grad.Ptr,
		Moments:   [MaxMoments]gpu.Ptr{q.m.Ptr, q.v.Ptr},
		Direction: q.work.Ptr, Result: q.work.Ptr, Size: n, LRScale: 1, ShapeScale: 1, Decay: 0.1,
		Beta1: 0.9, Beta2: 0.999,
		CopyType: copyType, GradType: gradType, DirectionType: gradType}
	return q
}

// newGrad replaces the gradient.
func newGrad(g *kerneltest.Rig, q *parameter) {
	for i := range q.rg {
		q.rg[i] = g.Rand.NormFloat64()
	}
	raw := kerneltest.Encode(q.rg, q.GradType)
	copy(q.rg, kerneltest.Decode(raw, q.GradType))
	g.Must(g.Ctx.CopyToDevice(q.grad.Ptr, raw, g.Stream))
}

// allocOn returns an Alloc that uses a rig's memory. It waits for the rig's stream, which poisons
// the memory, so that other streams may write to it.
func allocOn(g *kerneltest.Rig) kernel.Alloc {
	return func(bytes int) (gpu.Ptr, error) {
		return g.Alloc(bytes/4, kerneltest.F32, 0).Ptr, g.Ctx.SyncStream(g.Stream)
	}
}

func newTable(g *kerneltest.Rig, qs []*parameter) (*Table, gpu.Ptr) {
	g.Helper()
	tensors := make([]Tensor, len(qs))
	for i, q := range qs {
		tensors[i] = q.Tensor
	}
	t, err := NewTable(g.Ctx, allocOn(g), tensors)
	g.Must(err)
	return t, g.Alloc(t.Chunks, kerneltest.F32, 0).Ptr
}

// stepsOf returns the number of updates of each tensor.
func stepsOf(g *kerneltest.Rig, t *Table) (steps []int64) {
	rows := make([]Tensor, len(t.Tensors))
	g.Must(g.Ctx.CopyToHost(gpu.Bytes(rows), t.tensors, g.Stream))
	for _, r := range rows {
		steps = append(steps, r.Step)
	}
	return steps
}

func newControl(g *kerneltest.Rig, c Control) gpu.Ptr {
	g.Helper()
	p := g.Alloc(ControlBytes/4, kerneltest.F32, 0).Ptr
	g.Must(g.Ctx.CopyToDevice(p, c.Bytes(), g.Stream))
	return p
}

func readControl(g *kerneltest.Rig, p gpu.Ptr) Control {
	g.Helper()
	raw := make([]byte, ControlBytes)
	g.Must(g.Ctx.CopyToHost(raw, p, g.Stream))
	return DecodeControl(raw)
}

// newParameters returns parameters of all types, with sizes around the size of a chunk.
func newParameters(g *kerneltest.Rig) []*parameter {
	sizes := [][2]int{{3, 3}, {7, 1}, {64, 128}, {91, 91}, {300, 257}, {1, 8195}}
	var qs []*parameter
	for i, s := range sizes {
		q := newParameter(g, s[0], s[1], kerneltest.StorageTypes[i%3],
			kerneltest.StorageTypes[(i+1)%3])
		q.LRScale, q.Decay = 1/float64(i+1), 0.1*float64(i%2)
		if i%3 == 2 {
			q.Copy = 0
		}
		qs = append(qs, q)
	}

	return qs
}

func nearCopy(g *kerneltest.Rig, q *parameter) {
	g.Helper()
	if q.Copy != 0 {
		p := g.Read(q.p)
		g.Near("copy", q.copy, kerneltest.Decode(kerneltest.Encode(p, q.CopyType), q.CopyType), 0)
	}
}

func TestAdamW(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, clip := range []float64{0, 3, 1e9} {
		g.Scope(fmt.Sprint("clip ", clip), func(g *kerneltest.Rig) {
			qs := newParameters(g)
			qs[1].Step = 7 // as if this tensor had joined earlier
			table, squares := newTable(g, qs)
			for step := range 4 {
				lr := 0.01 * float64(step+1)
				c := Control{LR: lr, Eps: 1e-8, MaxNorm: clip, GradScale: 0.5}
				var sum float64
				for _, q := range qs {
					newGrad(g, q)
					sum += array.SumSquares(q.rg)
				}
				control := newControl(g, c)
				g.Must(g.Launch(g.Stream, GradSquares{Squares: squares, Table: table}))
				g.Must(g.Launch(g.Stream, GradNorm{Control: control, Squares: squares,
					Count: table.Chunks, Scale: 0}))
				g.Must(g.Launch(g.Stream, Elementwise{Kernel: "AdamW", Control: control, Table: table}))
				norm := 0.5 * math.Sqrt(sum)
				if got := readControl(g, control); math.Abs(float64(got.Norm)-norm) > 1e-6*norm ||
					got.Skipped || got.LR != lr {
					g.Errorf("control block %+v, want norm %v", got, norm)
				}
				scale := 0.5
				if clip > 0 {
					scale *= min(1, clip/(norm+1e-6))
				}
				for i, q := range qs {
					array.ScaleBy(q.rg, scale)
					cpuoptimizer.AdamW(q.rp, q.rg, q.rm, q.rv,
						cpuoptimizer.AdamWStep{LR: lr * q.LRScale, Beta1: 0.9,
							Beta2: 0.999, Eps: 1e-8,
							Decay: q.Decay, Step: step + 1 + int(q.Step)})
					what := fmt.Sprintf("step %d, tensor %d: ", step, i)
					g.Near(what+"parameter", q.p, q.rp, 1e-6)
					g.Near(what+"first moment", q.m, q.rm, 1e-6)
					g.Near(what+"second moment", q.v, q.rv, 1e-6)
					nearCopy(g, q)
				}
			}
			steps := stepsOf(g, table)
			if steps[0] != 4 || steps[1] != 11 {
				g.Errorf("steps %v", steps)
			}
		})
	}
}

// floats32 converts numbers that float32 can represent.
func floats32(x []float64) []float32 {
	y := make([]float32, len(x))
	for i, v := range x {
		y[i] = float32(v)
	}
	return y
}

// TestLion compares three steps with the CPU's in float32. The bits must be the same, since both
// round each product. The second step has gradients beyond the limit.
func TestLion(t *testing.T) {
	g := kerneltest.NewRig(t)
	qs := newParameters(g)
	type reference struct{ p, m []float32 }
	want := make([]reference, len(qs))
	for i, q := range qs {
		want[i] = reference{floats32(q.rp), floats32(q.rm)}
	}

	table, squares := newTable(g, qs)

	for step := range 3 {
		for _, q := range qs {
			newGrad(g, q)
		}
		if step == 1 {
			putHuge(g, qs, 3e38, -3e38)
		}
		control := newControl(g, Control{LR: 0.01, GradScale: 0.5})
		g.Must(g.Launch(g.Stream, GradNorm{Control: control, Squares: squares, Count: 0}))
		g.Must(g.Launch(g.Stream, Elementwise{Kernel: "Lion", Control: control, Table: table}))

		for i, q := range qs {
			grad := floats32(q.rg)
			for j := range grad {
				grad[j] *= 0.5
			}
			w := want[i]
			cpuoptimizer.Lion(w.p, grad, w.m, cpuoptimizer.LionStep{LR: 0.01 * q.LRScale,
				Beta1: q.Beta1, Beta2: q.Beta2, Decay: q.Decay})

			what := fmt.Sprintf("step %d, tensor %d: ", step, i)
			g.Near(what+"parameter", q.p, widened(w.p), 0)
			g.Near(what+"moment", q.m, widened(w.m), 0)
			nearCopy(g, q)
		}
	}

	require.EqualValues(t, 3, stepsOf(g, table)[0])
}

// TestAdamW8bit compares three steps with the CPU's. Each starts from the GPU's state, so that a
// number close to the midpoint between two codes affects only one step. Apart from rounding, a few
// codes may differ by one.
func TestAdamW8bit(t *testing.T) {
	g := kerneltest.NewRig(t)
	type moments struct{ m, v, mScale, vScale *kerneltest.Buffer }
	qs := newParameters(g)
	eight := make([]moments, len(qs))
	for i, q := range qs {
		blocks := kernel.CeilDiv(q.Size, cpuoptimizer.Block8)
		words := kernel.CeilDiv(q.Size, 4)
		x := moments{m: g.Alloc(words, kerneltest.F32, 0), v: g.Alloc(words, kerneltest.F32, 0)}
		x.mScale, _ = g.Upload(make([]float64, blocks), kerneltest.F32, 0)
		x.vScale, _ = g.Upload(make([]float64, blocks), kerneltest.F32, 0)
		g.Must(g.Ctx.CopyToDevice(x.m.Ptr, make([]byte, q.Size), g.Stream))
		g.Must(g.Ctx.CopyToDevice(x.v.Ptr, make([]byte, q.Size), g.Stream))
		q.Moments = [MaxMoments]gpu.Ptr{x.m.Ptr, x.mScale.Ptr, x.v.Ptr, x.vScale.Ptr}
		eight[i] = x
	}

	table, squares := newTable(g, qs)

	codes := func(b *kerneltest.Buffer, n int) []uint8 {
		raw := make([]byte, n)
		g.Must(g.Ctx.CopyToHost(raw, b.Ptr, g.Stream))
		g.Must(g.Ctx.SyncStream(g.Stream))
		return raw
	}

	for step := range 3 {
		for _, q := range qs {
			newGrad(g, q)
		}
		if step == 1 {
			putHuge(g, qs, 1e21, -1e37)
		}

		// The CPU's results for the current state.
		type result struct {
			p, mScale, vScale []float32
			m, v              []uint8
		}
		want := make([]result, len(qs))
		for i, q := range qs {
			x := eight[i]
			w := result{floats32(g.Read(q.p)), floats32(g.Read(x.mScale)), floats32(g.Read(x.vScale)),
				codes(x.m, q.Size), codes(x.v, q.Size)}
			grad := floats32(q.rg)
			for j := range grad {
				grad[j] *= 0.5
			}
			cpuoptimizer.AdamW8bit(w.p, grad, w.m, w.v, w.mScale, w.vScale, cpuoptimizer.AdamWStep{
				LR: 0.01 * q.LRScale, Beta1: q.Beta1, Beta2: q.Beta2, Eps: 1e-8, Decay: q.Decay,
				Step: step + 1})
			want[i] = w
		}

		control := newControl(g, Control{LR: 0.01, Eps: 1e-8, GradScale: 0.5})
		g.Must(g.Launch(g.Stream, GradNorm{Control: control, Squares: squares, Count: 0}))
		g.Must(g.Launch(g.Stream, Elementwise{Kernel: "AdamW8bit", Control: control, Table: table}))
		for i, q := range qs {
			w, x := want[i], eight[i]
			what := fmt.Sprintf("step %d, tensor %d: ", step, i)
			g.Near(what+"parameter", q.p, widened(w.p), 1e-5)
			g.Near(what+"scales of m", x.mScale, widened(w.mScale), 1e-6)
			g.Near(what+"scales of v", x.vScale, widened(w.vScale), 1e-6)
			for _, c := range [][2][]uint8{{w.m, codes(x.m, q.Size)}, {w.v, codes(x.v, q.Size)}} {
				differ := 0
				for j, code := range c[0] {
					if d := int(code) - int(c[1][j]); d != 0 {
						differ++
						require.Equal(t, 1, d*d, "%scode %d", what, j)
					}
				}
				require.LessOrEqual(t, differ, 1+q.Size/1000, what)
			}
			nearCopy(g, q)
		}
	}

	require.EqualValues(t, 3, stepsOf(g, table)[0])
}

// widened returns numbers as float64.
func widened(x []float32) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}

// putHuge makes two elements of each gradient huge, if the gradient's type can represent such
// numbers.
func putHuge(g *kerneltest.Rig, qs []*parameter, a, b float64) {
	for _, q := range qs {
		if q.GradType == kerneltest.F16 {
			continue
		}
		q.rg[1], q.rg[len(q.rg)-1] = a, b
		raw := kerneltest.Encode(q.rg, q.GradType)
		copy(q.rg, kerneltest.Decode(raw, q.GradType))
		g.Must(g.Ctx.CopyToDevice(q.grad.Ptr, raw, g.Stream))
	}
}

// clamp limits the elements of a gradient.
func clamp(x []float64, limit float64) {
	for i, v := range x {
		x[i] = max(-limit, min(v, limit))
	}
}

// TestHugeGradients checks that gradients with squares beyond float32 have a finite norm and
// produce finite moments.
func TestHugeGradients(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, clip := range []float64{0, 1} {
		g.Scope(fmt.Sprint("clip ", clip), func(g *kerneltest.Rig) {
			qs := newParameters(g)
			table, squares := newTable(g, qs)
			for step := range 3 {
				var sum float64
				for _, q := range qs {
					newGrad(g, q)
				}
				if step == 1 {
					putHuge(g, qs, 1e20, -1e37)
				}
				for _, q := range qs {
					sum += array.SumSquares(q.rg)
				}
				control := newControl(g, Control{LR: 0.01, Eps: 1e-8, MaxNorm: clip, GradScale: 1})
				g.Must(g.Launch(g.Stream, GradSquares{Squares: squares, Table: table}))
				g.Must(g.Launch(g.Stream, GradNorm{Control: control, Squares: squares,
					Count: table.Chunks}))
				g.Must(g.Launch(g.Stream, Elementwise{Kernel: "AdamW", Control: control, Table: table}))
				norm, scale := math.Sqrt(sum), 1.0
				got := readControl(g, control)
				require.InDelta(g, 1, float64(got.Norm)/norm, 1e-5, "%+v", got)
				require.False(g, got.Skipped)
				if clip > 0 {
					scale = min(1, clip/(norm+1e-6))
				}
				for i, q := range qs {
					array.ScaleBy(q.rg, scale)
					clamp(q.rg, 0x1p63)
					cpuoptimizer.AdamW(q.rp, q.rg, q.rm, q.rv,
						cpuoptimizer.AdamWStep{LR: 0.01 * q.LRScale, Beta1: 0.9, Beta2: 0.999,
							Eps: 1e-8, Decay: q.Decay, Step: step + 1})
					what := fmt.Sprintf("step %d, tensor %d: ", step, i)
					g.Near(what+"parameter", q.p, q.rp, 1e-5)
					g.Near(what+"first moment", q.m, q.rm, 1e-5)
					g.Near(what+"second moment", q.v, q.rv, 1e-5)
				}
			}
		})
	}
}

// TestAdamWRounds checks that the relative error of every change is at most a few roundings of
// float32. The gradients range from those with squares that underflow to those close to overflow.
func TestAdamWRounds(t *testing.T) {
	g := kerneltest.NewRig(t)
	const n = 1 << 18
	for _, eps := range []float64{1e-8, 1e-3, 1e-20} {
		grads, firsts, seconds := make([]float64, n), make([]float64, n), make([]float64, n)
		for i := range grads {
			grads[i] = math.Pow(10, 42*g.Rand.Float64()-26)
			if eps < 1e-8 { // useless with squares that underflow
				grads[i] = math.Pow(10, 34*g.Rand.Float64()-16)
			}
			firsts[i], seconds[i] = grads[i]*2*g.Rand.Float64(),
				grads[i]*grads[i]*2*g.Rand.Float64()
		}
		grad, rg := g.Upload(grads, kerneltest.F32, 0)
		m, rm := g.Upload(firsts, kerneltest.F32, 0)
		v, rv := g.Upload(seconds, kerneltest.F32, 0)
		p, rp := g.Upload(make([]float64, n), kerneltest.F32, 0)
		table, squares := newTable(g,
			[]*parameter{{Tensor: Tensor{Param: p.Ptr, Grad: grad.Ptr,
				Moments: [MaxMoments]gpu.Ptr{m.Ptr, v.Ptr}, Size: n, LRScale: 1,
				Beta1: 0.9, Beta2: 0.999, Step: 4}}})
		control := newControl(g, Control{LR: 0.5, Eps: eps, GradScale: 1})
		g.Must(g.Launch(g.Stream, GradNorm{Control: control, Squares: squares, Count: 0, Scale: 0}))
		g.Must(g.Launch(g.Stream, Elementwise{Kernel: "AdamW", Control: control, Table: table}))
		cpuoptimizer.AdamW(rp, rg, rm, rv, cpuoptimizer.AdamWStep{LR: 0.5, Beta1: 0.9,
			Beta2: 0.999, Eps: eps, Step: 5})
		worst, at := 0.0, 0
		for i, got := range g.Read(p) {
			if e := math.Abs(got-rp[i]) / math.Abs(rp[i]); !(e <= worst) {
				worst, at = e, i
			}
		}
		t.Logf("with ε %v the largest relative error of a change is %.1f · 2⁻²⁴", eps, worst*0x1p24)
		if !(worst <= 0x1p-20) {
			t.Errorf("with ε %v and a gradient of %v the change has a relative error of %.3g, "+
				"want at most 2⁻²⁰", eps, rg[at], worst)
		}
	}
}

func TestStepWithNaNIsSkipped(t *testing.T) {
	g := kerneltest.NewRig(t)
	qs := newParameters(g)
	table, squares := newTable(g, qs)
	bad := qs[4].grad.Offset(int(1e4) * qs[4].GradType.Size())
	g.Must(g.Ctx.CopyToDevice(bad, kerneltest.Encode([]float64{math.Inf(1)}, qs[4].GradType),
		g.Stream))
	control := newControl(g, Control{LR: 1, GradScale: 1, MaxNorm: 1})
	g.Must(g.Launch(g.Stream, GradSquares{Squares: squares, Table: table}))
	g.Must(g.Launch(g.Stream, GradNorm{Control: control, Squares: squares, Count: table.Chunks}))
	g.Must(g.Launch(g.Stream, Elementwise{Kernel: "AdamW", Control: control, Table: table}))
	got := readControl(g, control)
	require.True(t, got.Skipped && math.IsInf(float64(got.Norm), 1), "%+v", got)
	steps := stepsOf(g, table)
	require.Zero(t, steps[0])
	for _, q := range qs {
		g.Near("parameter", q.p, q.rp, 0)
		g.Near("moment", q.m, q.rm, 0)
	}
}

func TestMuon(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i := range 4 {
		nesterov, huge := i%2 == 1, i >= 2
		g.Scope(fmt.Sprintf("nesterov %v, huge %v", nesterov, huge), func(g *kerneltest.Rig) {
			qs := newParameters(g)
			for _, q := range qs {
				q.Beta1, q.ShapeScale = 0.95, math.Sqrt(max(1, float64(q.rows)/float64(q.cols)))
			}
			table, squares := newTable(g, qs)
			for step := range 3 {
				for _, q := range qs {
					newGrad(g, q)
				}
				if huge && step == 1 {
					putHuge(g, qs, 1e21, -1e38)
				}
				control := newControl(g, Control{LR: 0.02, GradScale: 1})
				g.Must(g.Launch(g.Stream, GradNorm{Control: control, Squares: squares, Count: 0,
					Scale: 0}))
				g.Must(g.Launch(g.Stream, Direction{Kernel: "Muon", Control: control,
					Squares: squares, Table: table, Nesterov: nesterov}))
				g.Must(g.Launch(g.Stream, Apply{Kernel: "Muon", Control: control, Table: table}))
				for i, q := range qs {
					u := make([]float64, len(q.rg))
					clamp(q.rg, 0x1p126)
					for i, v := range q.rg {
						q.rm[i] += 0.05 * (v - q.rm[i])
						if u[i] = q.rm[i]; nesterov {
							u[i] = v + 0.95*(q.rm[i]-v)
						}
					}
					array.ScaleBy(u, 1/(math.Sqrt(array.SumSquares(u))+1e-7))
					for i := range u {
						q.rp[i] = (1-0.02*q.LRScale*q.Decay)*q.rp[i] -
							0.02*q.LRScale*q.ShapeScale*u[i]
					}
					what := fmt.Sprintf("step %d, tensor %d: ", step, i)
					g.Near(what+"momentum", q.m, q.rm, 1e-6)
					g.Near(what+"direction", q.work, u, kerneltest.Forward(q.DirectionType))
					g.Near(what+"parameter", q.p, q.rp,
						max(1e-6, kerneltest.Forward(q.DirectionType)/10))
					nearCopy(g, q)
				}
			}
		})
	}
}

// TestLossScaleUpdate checks that gradients are divided by the loss scale, that a skipped step
// halves the scale down to 1, and that the 2000th good step in a row doubles it.
func TestLossScaleUpdate(t *testing.T) {
	g := kerneltest.NewRig(t)
	q := newParameter(g, 7, 13, kerneltest.F32, kerneltest.F16)
	table, squares := newTable(g, []*parameter{q})
	norm := math.Sqrt(array.SumSquares(q.rg))
	scale := g.Alloc(LossScaleBytes/4, kerneltest.F32, 0).Ptr
	for _, c := range []struct {
		from, want LossScale
		skipped    bool
	}{
		{LossScale{1 << 16, 3, 4}, LossScale{1 << 16, 4, 4}, false},
		{LossScale{1 << 16, 1999, 4}, LossScale{1 << 17, 0, 4}, false},
		{LossScale{0x1p127, 1999, 0}, LossScale{0x1p127, 0, 0}, false},
		{LossScale{1 << 16, 1999, 4}, LossScale{1 << 15, 0, 5}, true},
		{LossScale{1, 7, 0}, LossScale{1, 0, 1}, true},
	} {
		at := q.grad.Ptr.Offset(5 * 4)
		bad := q.rg[5]
		if c.skipped {
			bad = math.NaN()
		}
		control := newControl(g, Control{LR: 0.1, Eps: 1e-8, GradScale: 1,
			MaxNorm: 1e-3 * norm})
		g.Must(g.Ctx.CopyToDevice(at, kerneltest.Encode([]float64{bad}, kerneltest.F32), g.Stream))
		g.Must(g.Ctx.CopyToDevice(scale, c.from.Bytes(), g.Stream))
		g.Must(g.Launch(g.Stream, GradSquares{Squares: squares, Table: table}))
		g.Must(g.Launch(g.Stream, GradNorm{Control: control, Squares: squares, Count: table.Chunks,
			Scale: scale}))
		got := readControl(g, control)
		left := make([]byte, LossScaleBytes)
		g.Must(g.Ctx.CopyToHost(left, scale, g.Stream))
		require.Equal(t, c.want, got.Next, c.from)
		require.Equal(t, c.want.Bytes(), left, c.from)
		require.Equal(t, c.skipped, got.Skipped, c.from)
		if want := norm / float64(c.from.Scale); !c.skipped &&
			math.Abs(float64(got.Norm)-want) > 1e-6*want {
			t.Errorf("the norm is %v, want %v", got.Norm, want)
		}
	}
}

// TestLayouts checks that the layout of structs matches optim.cuh.
func TestLayouts(t *testing.T) {
	require.EqualValues(t, 160, unsafe.Sizeof(Tensor{}))
	require.EqualValues(t, 136, unsafe.Offsetof(Tensor{}.CopyType))
	require.EqualValues(t, 156, unsafe.Offsetof(Tensor{}.Apart))
	require.EqualValues(t, ControlBytes, unsafe.Sizeof(Control{}))
	require.EqualValues(t, ControlSettings, unsafe.Offsetof(Control{}.Skipped))
	require.EqualValues(t, 44, unsafe.Offsetof(Control{}.Next))
	require.EqualValues(t, LossScaleBytes, unsafe.Sizeof(LossScale{}))
}

// TestTableChunks checks the first chunks of a table's tensors.
func TestTableChunks(t *testing.T) {
	ctx, err := fake.New(fake.Config{Images: kerneltest.Kernels}).Retain(0)
	require.NoError(t, err)
	var at gpu.Ptr
	alloc := func(bytes int) (_ gpu.Ptr, err error) {
		at, err = ctx.Alloc(bytes)
		return at, err
	}
	table, err := NewTable(ctx, alloc, []Tensor{{Size: 1}, {Size: 2*Chunk + 1},
		{Size: Chunk}, {Size: 3}})
	require.NoError(t, err)
	var first []int32
	for _, p := range table.Tensors {
		first = append(first, p.FirstChunk)
	}

	require.Equal(t, []int32{0, 1, 4, 5}, first)
	require.Equal(t, 6, table.Chunks)
	require.NoError(t, errors.Join(ctx.Free(at), ctx.Close()))
}

// TestNormSameBits checks that the norm of gradients is deterministic.
func TestNormSameBits(t *testing.T) {
	g := kerneltest.NewRig(t)
	table, squares := newTable(g,
		[]*parameter{newParameter(g, 3001, 768, kerneltest.Bf16, kerneltest.Bf16)})
	norms := map[float32]bool{}
	for range 6 {
		control := newControl(g, Control{GradScale: 1})
		g.Must(g.Launch(g.Stream, GradSquares{Squares: squares, Table: table}))
		g.Must(g.Launch(g.Stream, GradNorm{Control: control, Squares: squares, Count: table.Chunks,
			Scale: 0}))
		norms[float32(readControl(g, control).Norm)] = true
	}

	require.Len(t, norms, 1)
}

// TestScattered checks that chunks in a table with gaps have the same sums of squares as in a table
// without gaps, and that the sums in the gaps are 0.
func TestScattered(t *testing.T) {
	g := kerneltest.NewRig(t)
	qs := []*parameter{newParameter(g, 301, 101, kerneltest.F32, kerneltest.Bf16),
		newParameter(g, 3, 1, kerneltest.Bf16, kerneltest.Bf16)}
	table, squares := newTable(g, qs)
	const before, between, after = 3, 1, 2
	var tensors []Tensor
	for _, q := range qs {
		tensors = append(tensors, q.Tensor)
	}

	own := (301*101 + Chunk - 1) / Chunk
	chunks := before + own + between + 1 + after
	tensors[0].FirstChunk, tensors[1].FirstChunk = before, int32(before+own+between)
	scattered, err := NewScattered(g.Ctx, allocOn(g), tensors, chunks)
	g.Must(err)
	got := g.Alloc(chunks, kerneltest.F32, 0)
	g.Must(g.Launch(g.Stream, GradSquares{Squares: squares, Table: table}))
	g.Must(g.Launch(g.Stream, GradSquares{Squares: got.Ptr, Table: scattered}))
	one := make([]float32, own+1)
	g.Must(g.Ctx.CopyToHost(gpu.Bytes(one), squares, g.Stream))
	g.Must(g.Ctx.SyncStream(g.Stream))
	all := g.Read(got)
	for i := range all {
		want := 0.0
		switch {
		case i >= before && i < before+own:
			want = float64(one[i-before])
		case i == before+own+between:
			want = float64(one[own])
		}
		require.Equal(t, want, all[i])
	}
}
