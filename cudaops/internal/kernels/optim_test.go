package kernels

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/internal/cpu"
)

// parameter is a tensor on the GPU and its reference.
type parameter struct {
	OptimTensor
	p, copy, grad, m, v, work *buffer
	rp, rg, rm, rv            []float64
	rows, cols                int
}

func (g *rig) parameter(rows, cols int, gradType, copyType driver.DType) *parameter {
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

func (g *rig) table(qs []*parameter) (*Table, driver.Ptr) {
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

func (g *rig) control(c Control) driver.Ptr {
	g.Helper()
	p := g.alloc(ControlBytes/4, f32, 0).Ptr
	g.must(g.ctx.CopyToDevice(p, c.Bytes(), g.stream))
	return p
}

func (g *rig) readControl(p driver.Ptr) Control {
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
				g.must(g.AdamW(g.stream, control, table, table.Chunks))
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
		g.must(g.AdamW(g.stream, control, table, table.Chunks))
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

// latePart is parameters whose update is made in parts.
type latePart struct {
	g        *rig
	qs       []*parameter
	table    *Table
	squares  driver.Ptr
	original [][]byte
}

// bits is all that an update writes, as it lies in memory.
func (l *latePart) bits() (all [][]byte) {
	l.g.Helper()
	for _, q := range l.qs {
		for _, b := range []*buffer{q.p, q.m, q.v, q.copy} {
			raw := make([]byte, b.bytes())
			l.g.must(l.g.ctx.CopyToHost(raw, b.Ptr, l.g.stream))
			all = append(all, raw)
		}
	}
	return all
}

// reset puts back what updates have written, the copies to NaN.
func (l *latePart) reset() {
	l.g.Helper()
	for i, q := range l.qs {
		for j, b := range []*buffer{q.p, q.m, q.v, q.copy} {
			l.g.must(l.g.ctx.CopyToDevice(b.Ptr, l.original[4*i+j], l.g.stream))
		}
	}
	l.table, l.squares = l.g.table(l.qs) // which counts from the first step again
}

// TestAdamWLate wants the update of chunks on a few multiprocessors to make the same bits as that of all chunks, and to leave what
// is outside of them alone.
func TestAdamWLate(t *testing.T) {
	g := newHopperRig(t)
	for _, gradType := range storageTypes {
		for _, copyType := range storageTypes {
			g.scope(fmt.Sprintf("%v/%v", gradType, copyType), func(g *rig) { testAdamWLate(g, gradType, copyType, true) })
		}
		g.scope(fmt.Sprintf("%v/none", gradType), func(g *rig) { testAdamWLate(g, gradType, bf16, false) })
	}
}

func testAdamWLate(g *rig, gradType, copyType driver.DType, copied bool) {
	g.Helper()
	l := &latePart{g: g}
	for _, n := range []int{9, 3, 8192, 8281, OptimChunk, 12*OptimChunk + 2049, 1, 5, OptimChunk + 3, 3*OptimChunk - 1, 2048} {
		q := g.parameter(n, 1, gradType, copyType)
		if !copied {
			q.Copy = 0
		}
		for _, moment := range []*buffer{q.m, q.v} {
			x := make([]float64, n)
			for i := range x {
				x[i] = 0.1 * g.rand.Float64()
			}
			g.must(g.ctx.CopyToDevice(moment.Ptr, encode(x, f32), g.stream))
		}
		l.qs = append(l.qs, q)
	}
	l.original = l.bits()
	l.reset()
	control := g.control(Control{LR: 0.01, Eps: 1e-8, GradScale: 0.5, MaxNorm: 3, SkipNonFinite: true})
	g.must(g.GradSquares(g.stream, l.squares, l.table))
	g.must(g.GradNorm(g.stream, control, l.squares, l.table.Chunks, 0))
	g.must(g.AdamW(g.stream, control, l.table, l.table.Chunks))
	want, all := l.bits(), l.table.Chunks
	for i, q := range l.qs {
		if bytes.Equal(want[4*i], l.original[4*i]) || q.Copy != 0 && bytes.Equal(want[4*i+3], l.original[4*i+3]) {
			g.Fatalf("AdamW has not changed tensor %d", i)
		}
	}
	for _, cuts := range [][]int{{0, all}, {0, 1, all}, {all - 1, all}, {5, 6, 7, all}, {all, all}, {all / 2, all}, {0, all / 3, all}} {
		l.reset()
		g.must(g.AdamW(g.stream, control, l.table, cuts[0]))
		for i := range cuts[1:] {
			g.must(g.AdamWLate(g.stream, control, l.table, cuts[i], cuts[i+1], 0))
		}
		for i, got := range l.bits() {
			if !bytes.Equal(got, want[i]) {
				g.Errorf("cut at %v, array %d of tensor %d is not what one kernel makes", cuts, i%4, i/4)
			}
		}
	}
	for range 4 {
		from := g.rand.IntN(all)
		to := from + g.rand.IntN(all-from) + 1
		l.reset()
		g.must(g.AdamW(g.stream, control, l.table, 0))
		g.must(g.AdamWLate(g.stream, control, l.table, from, to, 0))
		got := l.bits()
		for i, q := range l.qs {
			first, last := l.table.ChunksOf(i)
			a := min(q.Size, max(from-first, 0)*OptimChunk)
			b := max(a, min(q.Size, max(min(to, last)-first, 0)*OptimChunk))
			for j := range 4 {
				size := len(want[4*i+j]) / q.Size
				mixed := slices.Concat(l.original[4*i+j][:a*size], want[4*i+j][a*size:b*size], l.original[4*i+j][b*size:])
				if !bytes.Equal(got[4*i+j], mixed) {
					g.Errorf("chunks %d to %d: array %d of tensor %d is wrong", from, to, j, i)
				}
			}
		}
	}
	testAdamWSums(g, l, control, want)
	bad := g.control(Control{LR: 1, GradScale: 1, SkipNonFinite: true})
	nan := g.alloc(1, f32, 0)
	g.must(g.GradNorm(g.stream, bad, nan.Ptr, 1, 0))
	l.reset()
	g.must(g.AdamW(g.stream, bad, l.table, 0))
	g.must(g.AdamWLate(g.stream, bad, l.table, 0, all, 0))
	for i, got := range l.bits() {
		if !bytes.Equal(got, l.original[i]) {
			g.Errorf("a step that is skipped has changed array %d of tensor %d", i%4, i/4)
		}
	}
}

// testAdamWSums wants the same bits where squares are added up in passing, and their sums right to the rounding of float32.
func testAdamWSums(g *rig, l *latePart, control driver.Ptr, want [][]byte) {
	g.Helper()
	for _, tensor := range []int{0, 4, len(l.qs) - 1, len(l.qs)} { // from which on it is on a few multiprocessors
		cut := l.table.Chunks
		if tensor < len(l.qs) {
			cut, _ = l.table.ChunksOf(tensor)
		}
		l.reset()
		late, rounds := g.alloc(LateMultiprocessors*len(l.qs), f32, 0), g.alloc(max(1, RoundsOf(cut)), f32, 0)
		g.must(g.AdamW(g.stream, control, l.table, 0))
		g.must(g.AdamWSquares(g.stream, control, l.table, cut, rounds.Ptr))
		g.must(g.AdamWLate(g.stream, control, l.table, cut, l.table.Chunks, late.Ptr))
		for i, got := range l.bits() {
			if !bytes.Equal(got, want[i]) {
				g.Errorf("with sums from tensor %d on, array %d of tensor %d is not what one kernel makes", tensor, i%4, i/4)
			}
		}
		few, many := g.read(late), g.read(rounds)
		for i, q := range l.qs {
			right, got := 0.0, 0.0
			for _, v := range q.rg {
				right += v * v
			}
			parts := few[LateMultiprocessors*i:][:LateMultiprocessors]
			if i < tensor {
				first, last := l.table.ChunksOf(i)
				for _, v := range parts {
					if v == v {
						g.Errorf("tensor %d, of other kernels, has a sum of %v", i, v)
					}
				}
				parts = many[RoundsOf(first):RoundsOf(last)]
			}
			for _, v := range parts {
				got += v
			}
			if !(math.Abs(got-right) <= 1e-5*right) {
				g.Errorf("with sums from tensor %d on, the squares of tensor %d add up to %v, want %v", tensor, i, got, right)
			}
		}
	}
}

// TestAdamWLateLaunches wants a block of adamw_late to have a multiprocessor to itself, and ranges that a table does not have, and
// other GPUs, to be refused.
func TestAdamWLateLaunches(t *testing.T) {
	for _, capability := range []int{80, 89, 90, 100} {
		k, c, p := fakeAttention(t, capability, 227<<10)
		table, err := k.NewTable([]OptimTensor{{Size: 3 * OptimChunk}, {Size: 7}})
		if err != nil {
			t.Fatal(err)
		}
		c.ClearTrace()
		err = k.AdamWLate(0, p, table, 1, 4, 0)
		if capability != 90 {
			if want := fmt.Sprintf("kernels.AdamWLate: compute capability %.1f, want 9.0", float64(capability)/10); err == nil || err.Error() != want {
				t.Errorf("capability %d: %v", capability, err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if trace := c.Trace(); trace[len(trace)-1].Name != "adamw_late" {
			t.Errorf("launched %v", trace)
		} else if l := trace[len(trace)-1].Config; l.Grid.X != LateMultiprocessors || l.Cluster.X != gemmCluster || l.Block.X != 1024 {
			t.Errorf("launched with %v", l)
		}
		c.ClearTrace()
		for _, at := range []int{0, 2, 4} {
			if err := k.AdamWLate(0, p, table, at, at, 0); err != nil || len(c.Trace()) > 0 {
				t.Errorf("no chunks: error %v, launched %v", err, c.Trace())
			}
		}
		for want, err := range map[string]error{
			"kernels.AdamWLate: chunks -1 to 2 of a table of 4":  k.AdamWLate(0, p, table, -1, 2, 0),
			"kernels.AdamWLate: chunks 2 to 1 of a table of 4":   k.AdamWLate(0, p, table, 2, 1, 0),
			"kernels.AdamWLate: chunks 0 to 5 of a table of 4":   k.AdamWLate(0, p, table, 0, 5, 0),
			"kernels.AdamW: the first 5 chunks of a table of 4":  k.AdamW(0, p, table, 5),
			"kernels.AdamW: the first -1 chunks of a table of 4": k.AdamW(0, p, table, -1),

			"kernels.AdamWSquares: the first 5 chunks of a table of 4":  k.AdamWSquares(0, p, table, 5, p),
			"kernels.AdamWSquares: the first -1 chunks of a table of 4": k.AdamWSquares(0, p, table, -1, p),
		} {
			if err == nil || err.Error() != want {
				t.Errorf("error %v, want %s", err, want)
			}
		}
		if len(c.Trace()) > 0 {
			t.Errorf("what was refused launched %v", c.Trace())
		}
		if err := k.AdamW(0, p, table, 0); err != nil || len(c.Trace()) == 0 || c.Trace()[len(c.Trace())-1].Name != "adamw_begin" {
			t.Errorf("the first 0 chunks: error %v, launched %v", err, c.Trace())
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
		g.must(g.AdamW(g.stream, control, table, table.Chunks))
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

// TestTableChunks wants a table to tell whose part a chunk is, which chunks a tensor has, and what it takes on the device.
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
	for i, want := range [][2]int{{0, 1}, {1, 4}, {4, 5}, {5, 6}} {
		if from, to := table.ChunksOf(i); from != want[0] || to != want[1] {
			t.Errorf("tensor %d has the chunks %d to %d, want %v", i, from, to, want)
		}
	}
	if held := ctx.Stats().DeviceBytes; int64(table.Bytes) != held {
		t.Errorf("the table tells of %d bytes and holds %d", table.Bytes, held)
	}
	if err := errors.Join(table.Free(), ctx.Close()); err != nil {
		t.Error(err)
	}
}

// TestAdamWSpeed measures the update of a layer's parameters, by all multiprocessors, by a few, and by these beside products, which
// leave them free.
func TestAdamWSpeed(t *testing.T) {
	if !benchmark {
		t.Skip("set KASMINA_GPU_BENCH to run it")
	}
	g := newHopperRig(t)
	const n = 51380224
	grad, narrow, copied := g.large(n, f32), g.random(n), g.alloc(n, bf16, 0)
	p, m, v := g.large(n, f32), g.alloc(n, f32, 0), g.alloc(n, f32, 0)
	for _, b := range []*buffer{m, v} {
		g.must(g.ctx.Memset8(b.Ptr, 0, b.bytes(), g.stream))
	}
	few := fmt.Sprint(LateMultiprocessors, " multiprocessors")
	var show func(what string, took time.Duration)
	var late func(driver.Stream)
	for _, grads := range []OptimTensor{{Grad: narrow, GradType: bf16}, {Grad: grad.Ptr, GradType: f32}} { // the last stay
		table, squares := g.table([]*parameter{{OptimTensor: OptimTensor{Param: p.Ptr, Copy: copied.Ptr, Grad: grads.Grad, First: m.Ptr, Second: v.Ptr,
			Size: n, LRScale: 1, Beta1: 0.9, Beta2: 0.999, CopyType: bf16, GradType: grads.GradType}}})
		control := g.control(Control{LR: 1e-3, Eps: 1e-8, GradScale: 1})
		g.must(g.GradNorm(g.stream, control, squares, 0, 0))
		moved := float64(2*3*4 + 2 + grads.GradType.Size())
		show = func(what string, took time.Duration) {
			g.Logf("%-26s gradients of %v: %8.1f µs %6.0f GB/s", what, grads.GradType, took.Seconds()*1e6, moved*n/took.Seconds()/1e9)
		}
		late = func(s driver.Stream) { g.must(g.AdamWLate(s, control, table, 0, table.Chunks, 0)) }
		show("all multiprocessors", g.time([]func(){func() { g.must(g.AdamW(g.stream, control, table, table.Chunks)) }}))
		show(few, g.time([]func(){func() { late(g.stream) }}))
	}

	const rows, columns, d, products = 16384, 2048, 5632, 24
	a := Product{Y: g.random(rows * columns), X: g.random(rows * d), W: g.random(columns * d), Type: bf16,
		ProductShape: ProductShape{Rows: rows, Columns: columns, D: d, TransW: true}}
	ahead, err := g.ctx.NewStreamAhead()
	g.must(err)
	defer g.ctx.DestroyStream(ahead)
	var events [4]driver.Event
	for i := range events {
		events[i], err = g.ctx.NewEvent(true)
		g.must(err)
		defer g.ctx.DestroyEvent(events[i])
	}
	begun, updated, done, joined := events[0], events[1], events[2], events[3]
	multiply := func(update bool) (updating, product time.Duration) {
		var updates, multiplications []time.Duration
		for range 100 { // the card's clock has to settle
			g.must(g.ctx.Record(begun, g.stream))
			if update {
				g.must(g.ctx.Wait(ahead, begun))
				late(ahead)
			}
			g.must(g.ctx.Record(updated, ahead))
			for range products {
				g.must(g.Product(g.stream, a))
			}
			g.must(g.ctx.Record(done, g.stream))
			g.must(g.ctx.Wait(g.stream, updated))
			g.must(g.ctx.Record(joined, g.stream))
			g.must(g.ctx.SyncEvent(joined))
			took, err := g.ctx.Elapsed(begun, done)
			g.must(err)
			multiplications = append(multiplications, took/products)
			if update {
				took, err := g.ctx.Elapsed(begun, updated)
				g.must(err)
				updates = append(updates, took)
			}
		}
		if update {
			updating = median(updates[50:])
		}
		return updating, median(multiplications[50:])
	}
	_, alone := multiply(false)
	g.Leave(LateMultiprocessors)
	defer g.Leave(0)
	_, left := multiply(false)
	took, beside := multiply(true)
	show(few+" beside products", took)
	g.Logf("a product takes %.1f µs, with %d multiprocessors left %.1f, with the update on these %.1f", alone.Seconds()*1e6,
		LateMultiprocessors, left.Seconds()*1e6, beside.Seconds()*1e6)
}
