package kernels

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/cpu"
)

// parameter is a tensor on the GPU and its reference.
type parameter struct {
	OptimTensor
	p, copy, grad, m, v, work *buffer
	rp, rg, rm, rv            []float64
	rows, cols                int
}

func (g *rig) parameter(rows, cols int, gradType, copyType gpu.DType) *parameter {
	n := rows * cols
	q := &parameter{rows: rows, cols: cols, copy: g.alloc(n, copyType, 0), work: g.alloc(n, gradType, 0)}
	q.p, q.rp = g.normal(n, f32, 0)
	q.grad, q.rg = g.normal(n, gradType, 0)
	q.m, q.rm = g.upload(make([]float64, n), f32, 0)
	q.v, q.rv = g.upload(make([]float64, n), f32, 0)
	q.OptimTensor = OptimTensor{Param: q.p.Ptr, Copy: q.copy.Ptr, Grad: q.grad.Ptr, First: q.m.Ptr, Second: q.v.Ptr,
		Direction: q.work.Ptr, Result: q.work.Ptr, Size: n, LRScale: 1, ShapeScale: 1, Decay: 0.1, Beta1: 0.9, Beta2: 0.999,
		CopyType: copyType, GradType: gradType, DirectionType: gradType}
	return q
}

// newGrad replaces the gradient.
func (g *rig) newGrad(q *parameter) {
	for i := range q.rg {
		q.rg[i] = g.rand.NormFloat64()
	}
	raw := encode(q.rg, q.GradType)
	copy(q.rg, decode(raw, q.GradType))
	g.must(g.ctx.CopyToDevice(q.grad.Ptr, raw, g.stream))
}

func (g *rig) table(qs []*parameter) (*Table, gpu.Ptr) {
	g.Helper()
	tensors := make([]OptimTensor, len(qs))
	for i, q := range qs {
		tensors[i] = q.OptimTensor
	}
	t, err := g.NewTable(tensors)
	g.must(err)
	g.Cleanup(func() { g.must(t.Free()) })
	return t, g.alloc(t.Chunks, f32, 0).Ptr
}

func (g *rig) control(c Control) gpu.Ptr {
	g.Helper()
	p := g.alloc(ControlBytes/4, f32, 0).Ptr
	g.must(g.ctx.CopyToDevice(p, c.Bytes(), g.stream))
	return p
}

func (g *rig) readControl(p gpu.Ptr) Control {
	g.Helper()
	raw := make([]byte, ControlBytes)
	g.must(g.ctx.CopyToHost(raw, p, g.stream))
	return DecodeControl(raw)
}

// parameters are of all types and sizes around a chunk's.
func (g *rig) parameters() []*parameter {
	sizes := [][2]int{{3, 3}, {7, 1}, {64, 128}, {91, 91}, {300, 257}, {1, 8195}}
	var qs []*parameter
	for i, s := range sizes {
		q := g.parameter(s[0], s[1], storageTypes[i%3], storageTypes[(i+1)%3])
		q.LRScale, q.Decay = 1/float64(i+1), 0.1*float64(i%2)
		if i%3 == 2 {
			q.Copy = 0
		}
		qs = append(qs, q)
	}
	return qs
}

func (g *rig) nearCopy(q *parameter) {
	g.Helper()
	if q.Copy != 0 {
		p := g.read(q.p)
		g.near("copy", q.copy, decode(encode(p, q.CopyType), q.CopyType), 0)
	}
}

func TestAdamW(t *testing.T) {
	g := newRig(t)
	for _, clip := range []float64{0, 3, 1e9} {
		g.scope(fmt.Sprint("clip ", clip), func(g *rig) {
			qs := g.parameters()
			qs[1].Step = 7 // one that joined earlier
			table, squares := g.table(qs)
			for step := range 4 {
				lr := 0.01 * float64(step+1)
				c := Control{LR: lr, Eps: 1e-8, MaxNorm: clip, GradScale: 0.5, SkipNonFinite: true}
				var sum float64
				for _, q := range qs {
					g.newGrad(q)
					sum += cpu.SumSquares(q.rg)
				}
				control := g.control(c)
				g.must(g.GradSquares(g.stream, squares, table))
				g.must(g.GradNorm(g.stream, control, squares, table.Chunks, 0))
				g.must(g.AdamW(g.stream, control, table))
				norm := 0.5 * math.Sqrt(sum)
				if got := g.readControl(control); math.Abs(float64(got.Norm)-norm) > 1e-6*norm || got.Skipped || got.LR != lr {
					g.Errorf("control block %+v, want norm %v", got, norm)
				}
				scale := 0.5
				if clip > 0 {
					scale *= min(1, clip/(norm+1e-6))
				}
				for i, q := range qs {
					cpu.ScaleBy(q.rg, scale)
					cpu.AdamW(q.rp, q.rg, q.rm, q.rv, cpu.AdamWStep{LR: lr * q.LRScale, Beta1: 0.9, Beta2: 0.999, Eps: 1e-8,
						Decay: q.Decay, Step: step + 1 + int(q.Step)})
					what := fmt.Sprintf("step %d, tensor %d: ", step, i)
					g.near(what+"parameter", q.p, q.rp, 1e-6)
					g.near(what+"first moment", q.m, q.rm, 1e-6)
					g.near(what+"second moment", q.v, q.rv, 1e-6)
					g.nearCopy(q)
				}
			}
			steps, err := table.Steps(g.stream)
			g.must(err)
			if steps[0] != 4 || steps[1] != 11 {
				g.Errorf("steps %v", steps)
			}
		})
	}
}

// TestAdamWRounds wants every single change to be right to a few roundings of float32, from gradients whose squares are lost
// to such as are near overflow.
func TestAdamWRounds(t *testing.T) {
	g := newRig(t)
	const n = 1 << 18
	for _, eps := range []float64{1e-8, 1e-3, 1e-20} {
		grads, firsts, seconds := make([]float64, n), make([]float64, n), make([]float64, n)
		for i := range grads {
			grads[i] = math.Pow(10, 42*g.rand.Float64()-26)
			if eps < 1e-8 { // of no use beside squares that are lost
				grads[i] = math.Pow(10, 34*g.rand.Float64()-16)
			}
			firsts[i], seconds[i] = grads[i]*2*g.rand.Float64(), grads[i]*grads[i]*2*g.rand.Float64()
		}
		grad, rg := g.upload(grads, f32, 0)
		m, rm := g.upload(firsts, f32, 0)
		v, rv := g.upload(seconds, f32, 0)
		p, rp := g.upload(make([]float64, n), f32, 0)
		table, squares := g.table([]*parameter{{OptimTensor: OptimTensor{Param: p.Ptr, Grad: grad.Ptr, First: m.Ptr, Second: v.Ptr, Size: n, LRScale: 1,
			Beta1: 0.9, Beta2: 0.999, Step: 4}}})
		control := g.control(Control{LR: 0.5, Eps: eps, GradScale: 1})
		g.must(g.GradNorm(g.stream, control, squares, 0, 0))
		g.must(g.AdamW(g.stream, control, table))
		cpu.AdamW(rp, rg, rm, rv, cpu.AdamWStep{LR: 0.5, Beta1: 0.9, Beta2: 0.999, Eps: eps, Step: 5})
		worst, at := 0.0, 0
		for i, got := range g.read(p) {
			if e := math.Abs(got-rp[i]) / math.Abs(rp[i]); !(e <= worst) {
				worst, at = e, i
			}
		}
		t.Logf("with ε %v the largest relative error of a change is %.1f · 2⁻²⁴", eps, worst*0x1p24)
		if !(worst <= 0x1p-20) {
			t.Errorf("with ε %v and a gradient of %v the change has a relative error of %.3g, want at most 2⁻²⁰", eps, rg[at], worst)
		}
	}
}

func TestStepWithNaNIsSkipped(t *testing.T) {
	g := newRig(t)
	qs := g.parameters()
	table, squares := g.table(qs)
	bad := qs[4].grad.Offset(int(1e4) * qs[4].GradType.Size())
	g.must(g.ctx.CopyToDevice(bad, encode([]float64{math.Inf(1)}, qs[4].GradType), g.stream))
	for _, skip := range []bool{true, false} {
		control := g.control(Control{LR: 1, GradScale: 1, MaxNorm: 1, SkipNonFinite: skip})
		g.must(g.GradSquares(g.stream, squares, table))
		g.must(g.GradNorm(g.stream, control, squares, table.Chunks, 0))
		g.must(g.AdamW(g.stream, control, table))
		if got := g.readControl(control); got.Skipped != skip || !math.IsInf(float64(got.Norm), 1) {
			t.Errorf("control block %+v", got)
		}
		steps, err := table.Steps(g.stream)
		g.must(err)
		if (steps[0] == 0) != skip {
			t.Errorf("steps %v", steps)
		}
		if skip {
			for _, q := range qs {
				g.near("parameter", q.p, q.rp, 0)
				g.near("moment", q.m, q.rm, 0)
			}
		}
	}
}

func TestMuon(t *testing.T) {
	g := newRig(t)
	for _, nesterov := range []bool{false, true} {
		g.scope(fmt.Sprint("nesterov ", nesterov), func(g *rig) {
			qs := g.parameters()
			for _, q := range qs {
				q.Beta1, q.ShapeScale = 0.95, math.Sqrt(max(1, float64(q.rows)/float64(q.cols)))
			}
			table, squares := g.table(qs)
			for step := range 3 {
				for _, q := range qs {
					g.newGrad(q)
				}
				control := g.control(Control{LR: 0.02, GradScale: 1})
				g.must(g.GradNorm(g.stream, control, squares, 0, 0))
				g.must(g.MuonDirection(g.stream, control, squares, table, nesterov))
				g.must(g.MuonApply(g.stream, control, table))
				for i, q := range qs {
					u := make([]float64, len(q.rg))
					for i, v := range q.rg {
						q.rm[i] += 0.05 * (v - q.rm[i])
						if u[i] = q.rm[i]; nesterov {
							u[i] = v + 0.95*(q.rm[i]-v)
						}
					}
					cpu.ScaleBy(u, 1/(math.Sqrt(cpu.SumSquares(u))+1e-7))
					for i := range u {
						q.rp[i] = (1-0.02*q.LRScale*q.Decay)*q.rp[i] - 0.02*q.LRScale*q.ShapeScale*u[i]
					}
					what := fmt.Sprintf("step %d, tensor %d: ", step, i)
					g.near(what+"momentum", q.m, q.rm, 1e-6)
					g.near(what+"direction", q.work, u, forward(q.DirectionType))
					g.near(what+"parameter", q.p, q.rp, max(1e-6, forward(q.DirectionType)/10))
					g.nearCopy(q)
				}
			}
		})
	}
}

// TestLossScaleMoves wants gradients to be divided by the loss scale, and the scale to be halved by a step that is skipped,
// but not below 1, and doubled by the 2000th good one in a row.
func TestLossScaleMoves(t *testing.T) {
	g := newRig(t)
	q := g.parameter(7, 13, f32, f16)
	table, squares := g.table([]*parameter{q})
	norm := math.Sqrt(cpu.SumSquares(q.rg))
	scale := g.alloc(LossScaleBytes/4, f32, 0).Ptr
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
		control := g.control(Control{LR: 0.1, Eps: 1e-8, GradScale: 1, MaxNorm: 1e-3 * norm, SkipNonFinite: true})
		g.must(g.ctx.CopyToDevice(at, encode([]float64{bad}, f32), g.stream))
		g.must(g.ctx.CopyToDevice(scale, c.from.Bytes(), g.stream))
		g.must(g.GradSquares(g.stream, squares, table))
		g.must(g.GradNorm(g.stream, control, squares, table.Chunks, scale))
		got := g.readControl(control)
		left := make([]byte, LossScaleBytes)
		g.must(g.ctx.CopyToHost(left, scale, g.stream))
		if got.Next != c.want || !bytes.Equal(left, c.want.Bytes()) || got.Skipped != c.skipped {
			t.Errorf("after %+v the block is %+v and the scale % x, want %+v", c.from, got, left, c.want)
		}
		if want := norm / float64(c.from.Scale); !c.skipped && math.Abs(float64(got.Norm)-want) > 1e-6*want {
			t.Errorf("the norm is %v, want %v", got.Norm, want)
		}
	}
}

// TestTableChunks wants a table to tell whose part a chunk is and what it takes on the device.
func TestTableChunks(t *testing.T) {
	ctx, err := fake.New(fake.Config{AnyKernel: true}).Retain(0)
	if err != nil {
		t.Fatal(err)
	}
	table, err := New(ctx).NewTable([]OptimTensor{{Size: 1}, {Size: 2*OptimChunk + 1}, {Size: OptimChunk}, {Size: 3}})
	if err != nil {
		t.Fatal(err)
	}
	var of []int
	for chunk := range table.Chunks {
		of = append(of, table.TensorOf(chunk))
	}
	if want := []int{0, 1, 1, 1, 2, 3}; !slices.Equal(of, want) {
		t.Errorf("the chunks are of the tensors %v, want %v", of, want)
	}
	if held := ctx.Stats().DeviceBytes; int64(table.Bytes) != held {
		t.Errorf("the table tells of %d bytes and holds %d", table.Bytes, held)
	}
	if err := errors.Join(table.Free(), ctx.Close()); err != nil {
		t.Error(err)
	}
}

// TestNormSameBits wants the norm of gradients to be the same in every bit, run after run.
func TestNormSameBits(t *testing.T) {
	g := newRig(t)
	table, squares := g.table([]*parameter{g.parameter(3001, 768, bf16, bf16)})
	norms := map[float32]bool{}
	for range 6 {
		control := g.control(Control{GradScale: 1})
		g.must(g.GradSquares(g.stream, squares, table))
		g.must(g.GradNorm(g.stream, control, squares, table.Chunks, 0))
		norms[float32(g.readControl(control).Norm)] = true
	}
	if len(norms) != 1 {
		t.Errorf("norms %v", norms)
	}
}
