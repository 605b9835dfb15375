package kernels

import (
	"os"
	"testing"
)

// TestCounters launches every kernel that memory should bound once, at the shapes that docs/lab speaks of, for a profiler to
// count what each does.
func TestCounters(t *testing.T) {
	if os.Getenv("KASMINA_GPU_COUNTERS") == "" {
		t.Skip("set KASMINA_GPU_COUNTERS to launch the kernels of docs/lab under a profiler")
	}
	g := newRig(t)
	g.scope("kasmina", (*rig).countKasmina)
	g.scope("norm", (*rig).countNorms)
	g.scope("loss", (*rig).countLoss)
	g.scope("embedding", (*rig).countEmbedding)
	g.scope("rows", (*rig).countRows)
	g.scope("silu", (*rig).countSiLU)
	g.scope("adamw", (*rig).countAdamW)
	g.must(g.ctx.SyncStream(g.stream))
}

func (g *rig) countKasmina() {
	for _, telemetry := range []bool{true, false} {
		r := g.largeKasmina(kasminaCase{rows: 32768, seeds: 1024, chunk: 4, slots: 1025, dtype: bf16, deviation: 1,
			stability: KasminaAdaptive, telemetry: telemetry})
		r.forwardOnly()
		r.launchBackward()
	}
}

func (g *rig) countNorms() {
	for _, shape := range [][2]int{{32768, 4096}, {32768, 768}} {
		rows, d := shape[0], shape[1]
		w, _ := g.normal(d, f32, 0)
		x, y, sum := g.large(rows*d, bf16), g.large(rows*d, bf16), g.large(rows*d, bf16)
		rstd, dw, work := g.alloc(rows, f32, 0), g.alloc(d, f32, 0), g.alloc(g.RMSNormWorkspace(d, bf16)/4, f32, 0)
		a := RMSNorm{Y: y.Ptr, Rstd: rstd.Ptr, X: x.Ptr, W: w.Ptr, Rows: rows, D: d, Eps: 1e-5, Type: bf16}
		g.must(g.RMSNorm(g.stream, a))
		a.Residual, a.Sum = sum.Ptr, sum.Ptr
		g.must(g.RMSNorm(g.stream, a))
		b := RMSNormBackward{DX: y.Ptr, DW: dw.Ptr, G: y.Ptr, X: x.Ptr, W: w.Ptr, Rstd: rstd.Ptr, Rows: rows, D: d, Type: bf16,
			DWType: f32, Workspace: work.Ptr}
		g.must(g.RMSNormBackward(g.stream, b))
		b.Add, b.DX = sum.Ptr, sum.Ptr
		g.must(g.RMSNormBackward(g.stream, b))
	}
}

func (g *rig) countLoss() {
	const rows, v = 8192, 50304
	logits, losses, lse := g.large(rows*v, bf16), g.alloc(rows, f32, 0), g.alloc(rows, f32, 0)
	a := CrossEntropy{Logits: logits.Ptr, Losses: losses.Ptr, LSE: lse.Ptr, Targets: g.someIDs(rows, v), Rows: rows, V: v, Type: bf16}
	g.must(g.CrossEntropy(g.stream, a))
	a.Scale = g.alloc(1, f32, 0).Ptr
	g.must(g.CrossEntropyScale(g.stream, a.Scale, a.Targets, rows))
	g.must(g.CrossEntropyBackward(g.stream, a.Logits, a))
	g.must(g.CrossEntropy(g.stream, a))
}

// someIDs are random numbers below n.
func (g *rig) someIDs(count, n int) Ints {
	ids := make([]int, count)
	for i := range ids {
		ids[i] = g.rand.IntN(n)
	}
	return Ints{Ptr: g.uploadInts(ids, 4)}
}

func (g *rig) countEmbedding() {
	const rows, vocab, d = 32768, 50304, 768
	table, y, ids := g.large(vocab*d, f32), g.large(rows*d, bf16), g.someIDs(rows, vocab)
	g.must(g.Embedding(g.stream, Embedding{Y: y.Ptr, IDs: ids, Table: table.Ptr, Rows: rows, Vocab: vocab, D: d, Type: bf16,
		TableType: f32}))
	g.must(g.EmbeddingBackward(g.stream, EmbeddingBackward{DT: table.Ptr, IDs: ids, G: y.Ptr, Rows: rows, Vocab: vocab, D: d,
		DTType: f32, GType: bf16, Workspace: g.alloc(EmbeddingWorkspace(rows, vocab, d)/4, f32, 0).Ptr}))
}

func (g *rig) countRows() {
	const rows, d = 32768, 4096
	x, y, sums := g.large(rows*d, bf16), g.large(rows*d, bf16), g.alloc(rows, f32, 0)
	g.must(g.Softmax(g.stream, y.Ptr, x.Ptr, rows, d, bf16))
	g.must(g.SoftmaxBackward(g.stream, x.Ptr, x.Ptr, y.Ptr, rows, d, bf16))
	for _, a := range []Reduce{{Outer: rows, N: d, Inner: 1}, {Outer: 1, N: rows, Inner: d}} {
		a.Op, a.X, a.Y, a.XType, a.YType = Sum, x.Ptr, sums.Ptr, bf16, f32
		a.Workspace = g.alloc(max(1, g.ReduceWorkspace(a)/4), f32, 0).Ptr
		g.must(g.Reduce(g.stream, a))
	}
	angles := g.large(1024*64, f32)
	g.must(g.RoPE(g.stream, RoPE{Y: y.Ptr, X: x.Ptr, Cos: angles.Ptr, Sin: angles.Ptr, Rows: rows, Seq: 1024, Heads: 32, HeadDim: 128,
		Type: bf16}))
}

func (g *rig) countSiLU() {
	const rows, f = 16384, 11008
	var a [4]*buffer
	for i := range a {
		a[i] = g.large(rows*f, bf16)
	}
	g.must(g.SiLUMul(g.stream, SiLUMul{H: a[2].Ptr, A: a[0].Ptr, B: a[1].Ptr, Rows: rows, F: f, Type: bf16}))
	g.must(g.SiLUMulBackward(g.stream, SiLUMulBackward{DA: a[0].Ptr, DB: a[1].Ptr, DH: a[3].Ptr, A: a[0].Ptr, B: a[1].Ptr,
		Rows: rows, F: f, Type: bf16}))
}

func (g *rig) countAdamW() {
	const n = 1 << 26
	p, c, grad, m, v := g.large(n, f32), g.large(n, bf16), g.large(n, f32), g.large(n, f32), g.alloc(n, f32, 0)
	g.must(g.ctx.Memset8(v.Ptr, 0, v.bytes(), g.stream))
	table, err := g.NewTable([]OptimTensor{{Param: p.Ptr, Copy: c.Ptr, Grad: grad.Ptr, First: m.Ptr, Second: v.Ptr, Size: n, LRScale: 1,
		Beta1: 0.9, Beta2: 0.999, CopyType: bf16, GradType: f32}})
	g.must(err)
	g.Cleanup(func() { g.must(table.Free()) })
	control, squares := g.control(Control{LR: 1e-3, Eps: 1e-8, GradScale: 1}), g.alloc(table.Chunks, f32, 0)
	g.must(g.GradSquares(g.stream, squares.Ptr, table))
	g.must(g.GradNorm(g.stream, control, squares.Ptr, table.Chunks, 0))
	g.must(g.AdamW(g.stream, control, table))
}
