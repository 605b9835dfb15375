package kernels

import (
	"fmt"
	"math"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
)

// TestBandwidth logs what every memory-bound kernel makes of the memory's bandwidth, where KASMINA_GPU_BENCH is set. Bytes
// count each input read once and each output written once.
func TestBandwidth(t *testing.T) {
	if !benchmark {
		t.Skip("a measurement: set KASMINA_GPU_BENCH=1")
	}
	g := newRig(t)
	g.copyRate()
	for _, b := range []struct {
		name string
		run  func(*rig, driver.DType)
	}{{"elementwise", benchElementwise}, {"norm", benchNorm}, {"rope", benchRoPE}, {"silu", benchSiLU},
		{"cross-entropy", benchCrossEntropy}, {"embedding", benchEmbedding}, {"layout", benchLayout}, {"reduce", benchReduce},
		{"optim", benchOptim}} {
		for _, dt := range []driver.DType{bf16, f32} {
			g.scope(b.name+"/"+dt.String(), func(g *rig) { b.run(g, dt) })
		}
	}
}

// sets is enough sets of arrays of so many elements that a set is out of the cache when its turn comes again; noise fills them.
func (g *rig) sets(t driver.DType, sizes ...int) [][]driver.Ptr {
	total := 0
	for _, n := range sizes {
		total += n * t.Size()
	}
	pattern := g.noise(t)
	sets := make([][]driver.Ptr, max(2, min(8, (1<<30)/total)))
	for i := range sets {
		for _, n := range sizes {
			b := g.alloc(n, t, 0)
			for at := 0; at < b.bytes(); at += pattern.bytes() {
				g.must(g.ctx.CopyOnDevice(b.Offset(at), pattern.Ptr, min(pattern.bytes(), b.bytes()-at), g.stream))
			}
			sets[i] = append(sets[i], b.Ptr)
		}
	}
	return sets
}

func (g *rig) noise(t driver.DType) *buffer {
	b, _ := g.normal(1<<18, t, 0)
	return b
}

// over is a launch for each set.
func over(sets [][]driver.Ptr, f func(p []driver.Ptr)) []func() {
	runs := make([]func(), len(sets))
	for i, s := range sets {
		runs[i] = func() { f(s) }
	}
	return runs
}

func benchElementwise(g *rig, t driver.DType) {
	const n = 1 << 27
	size := n * t.Size()
	sets := g.sets(t, n, n, n)
	g.bench("add 2^27", 3*size, over(sets, func(p []driver.Ptr) {
		g.must(g.Binary(g.stream, Add, p[0], Operand{Ptr: p[1]}, Operand{Ptr: p[2]}, n, t))
	}))
	g.bench("add row 32768x4096", 2*size, over(sets, func(p []driver.Ptr) {
		g.must(g.Binary(g.stream, Add, p[0], Operand{Ptr: p[1]}, Operand{Ptr: p[2], Period: 4096}, n, t))
	}))
	g.bench("tanh 2^27", 2*size, over(sets, func(p []driver.Ptr) {
		g.must(g.Unary(g.stream, Tanh, p[0], p[1], 0, n, t))
	}))
	g.bench("scale 2^27", 2*size, over(sets, func(p []driver.Ptr) {
		g.must(g.Unary(g.stream, MulScalar, p[0], p[1], 0.5, n, t))
	}))
	g.bench("float32 += 2^26", n/2*(t.Size()+8), over(sets, func(p []driver.Ptr) { // p[0] and p[1] lie apart: float32 takes n/2
		g.must(g.Axpby(g.stream, p[0], f32, 1, p[2], t, 1, n/2))
	}))
	g.bench("cast from float32 2^26", n/2*(t.Size()+4), over(sets, func(p []driver.Ptr) {
		g.must(g.Cast(g.stream, p[1], t, p[0], f32, n/2))
	}))
}

func benchNorm(g *rig, t driver.DType) {
	for _, shape := range [][2]int{{32768, 4096}, {32768, 768}, {16384, 2048}} {
		rows, d := shape[0], shape[1]
		n := rows * d
		w, _ := g.normal(d, f32, 0)
		rstd, _ := g.normal(rows, f32, 0)
		dw, work := g.alloc(d, f32, 0), g.alloc(g.RMSNormWorkspace(d)/4, f32, 0)
		sets := g.sets(t, n, n, n, n)
		name := func(s string) string { return fmt.Sprintf("%s %dx%d", s, rows, d) }
		g.bench(name("RMSNorm"), 2*n*t.Size(), over(sets, func(p []driver.Ptr) {
			g.must(g.RMSNorm(g.stream, RMSNorm{Y: p[0], Rstd: rstd.Ptr, X: p[1], W: w.Ptr, Rows: rows, D: d, Eps: 1e-5, Type: t}))
		}))
		g.bench(name("add + RMSNorm"), 4*n*t.Size(), over(sets, func(p []driver.Ptr) {
			g.must(g.RMSNorm(g.stream, RMSNorm{Y: p[0], Rstd: rstd.Ptr, Sum: p[3], X: p[1], Residual: p[2], W: w.Ptr, Rows: rows,
				D: d, Eps: 1e-5, Type: t}))
		}))
		back := RMSNormBackward{DW: dw.Ptr, W: w.Ptr, Rstd: rstd.Ptr, Rows: rows, D: d, Type: t, Workspace: work.Ptr}
		g.bench(name("RMSNorm backward"), 3*n*t.Size(), over(sets, func(p []driver.Ptr) {
			a := back
			a.DX, a.G, a.X = p[0], p[1], p[2]
			g.must(g.RMSNormBackward(g.stream, a))
		}))
		g.bench(name("RMSNorm backward + add"), 4*n*t.Size(), over(sets, func(p []driver.Ptr) {
			a := back
			a.DX, a.G, a.X, a.Add = p[0], p[1], p[2], p[3]
			g.must(g.RMSNormBackward(g.stream, a))
		}))
		g.free(0)
	}
}

func benchRoPE(g *rig, t driver.DType) {
	for _, heads := range []int{32, 12} {
		const batch, seq = 32, 1024
		dim := map[int]int{32: 128, 12: 64}[heads]
		n := batch * seq * heads * dim
		cos, _ := g.normal(seq*dim/2, f32, 0)
		sin, _ := g.normal(seq*dim/2, f32, 0)
		g.bench(fmt.Sprintf("RoPE 32x1024x%dx%d", heads, dim), 2*n*t.Size(), over(g.sets(t, n, n), func(p []driver.Ptr) {
			g.must(g.RoPE(g.stream, RoPE{Y: p[0], X: p[1], Cos: cos.Ptr, Sin: sin.Ptr, Rows: batch * seq, Seq: seq, Heads: heads,
				HeadDim: dim, Type: t}))
		}))
		g.free(0)
	}
}

func benchSiLU(g *rig, t driver.DType) {
	for _, f := range []int{11008, 2048} {
		const rows = 16384
		n := rows * f
		sets := g.sets(t, n, 2*n, 2*n, n)
		for _, beside := range []bool{false, true} {
			name, stride, half := "", 0, n*t.Size()
			if beside {
				name, stride, half = " [a|b]", 2*f, f*t.Size()
			}
			g.bench(fmt.Sprintf("SiLU·mul%s %dx%d", name, rows, f), 3*n*t.Size(), over(sets, func(p []driver.Ptr) {
				g.must(g.SiLUMul(g.stream, SiLUMul{H: p[0], A: p[1], B: p[1].Offset(half), Rows: rows, F: f, Stride: stride, Type: t}))
			}))
			g.bench(fmt.Sprintf("SiLU·mul backward%s %dx%d", name, rows, f), 5*n*t.Size(), over(sets, func(p []driver.Ptr) {
				g.must(g.SiLUMulBackward(g.stream, SiLUMulBackward{DA: p[2], DB: p[2].Offset(half), DH: p[3], A: p[1],
					B: p[1].Offset(half), Rows: rows, F: f, Stride: stride, GradStride: stride, Type: t}))
			}))
		}
		g.free(0)
	}
}

func benchCrossEntropy(g *rig, t driver.DType) {
	const rows, v = 8192, 50304
	ids := make([]int, rows)
	for i := range ids {
		ids[i] = g.rand.IntN(v)
	}
	targets := Ints{Ptr: g.uploadInts(ids, 4)}
	losses, lse, scale := g.alloc(rows, f32, 0), g.alloc(rows, f32, 0), g.alloc(1, f32, 0)
	g.must(g.CrossEntropyScale(g.stream, scale.Ptr, targets, rows))
	a := CrossEntropy{Losses: losses.Ptr, LSE: lse.Ptr, Targets: targets, Rows: rows, V: v, Type: t}
	sets := g.sets(t, rows*v)
	g.bench("cross-entropy 8192x50304", rows*v*t.Size(), over(sets, func(p []driver.Ptr) {
		a := a
		a.Logits = p[0]
		g.must(g.CrossEntropy(g.stream, a))
	}))
	a.Scale = scale.Ptr
	g.bench("cross-entropy backward in place", 2*rows*v*t.Size(), over(sets, func(p []driver.Ptr) {
		a := a
		a.Logits = p[0]
		g.must(g.CrossEntropyBackward(g.stream, p[0], a))
	}))
	g.bench("cross-entropy with gradient in place", 2*rows*v*t.Size(), over(sets, func(p []driver.Ptr) {
		a := a
		a.Logits = p[0]
		g.must(g.CrossEntropy(g.stream, a))
	}))
	g.free(0)
}

func benchEmbedding(g *rig, t driver.DType) {
	const rows, vocab, d = 32768, 50304, 768
	ids := make([]int, rows)
	for i := range ids { // about Zipf's law
		ids[i] = int(math.Exp(g.rand.Float64()*math.Log(vocab))) - 1
	}
	dids := Ints{Ptr: g.uploadInts(ids, 4)}
	work := g.alloc(EmbeddingWorkspace(rows, vocab, d)/4, f32, 0)
	table := g.sets(f32, vocab*d)
	sets := g.sets(t, rows*d)
	g.bench("embedding 32768 of 50304x768", rows*d*(t.Size()+4), over(sets, func(p []driver.Ptr) {
		g.must(g.Embedding(g.stream, Embedding{Y: p[0], IDs: dids, Table: table[0][0], Rows: rows, Vocab: vocab, D: d, Type: t,
			TableType: f32}))
	}))
	for _, accumulate := range []bool{false, true} {
		bytes := rows*d*t.Size() + 4*vocab*d
		g.bench(fmt.Sprintf("embedding backward, added %v", accumulate), bytes, over(sets, func(p []driver.Ptr) {
			g.must(g.EmbeddingBackward(g.stream, EmbeddingBackward{DT: table[1][0], IDs: dids, G: p[0], Rows: rows, Vocab: vocab, D: d,
				GType: t, Workspace: work.Ptr, Accumulate: accumulate}))
		}))
	}
	g.free(0)
}

func benchLayout(g *rig, t driver.DType) {
	const rows, cols = 16384, 8192
	n := rows * cols
	sets := g.sets(t, n, n)
	run := func(name string, dims, ys, xs []int) {
		g.bench(name, 2*n*t.Size(), over(sets, func(p []driver.Ptr) {
			g.must(g.Copy(g.stream, Copy{Y: p[0], X: p[1], Dims: dims, YStrides: ys, XStrides: xs, Size: t.Size()}))
		}))
	}
	run("transpose 16384x8192", []int{cols, rows}, []int{rows, 1}, []int{1, cols})
	run("heads 16x1024x64x128 to 16x64x1024x128", []int{16, 64, 1024, 128}, contiguous([]int{16, 64, 1024, 128}),
		[]int{1024 * 8192, 128, 8192, 1})
	g.bench("slice of half the columns", n*t.Size(), over(sets, func(p []driver.Ptr) {
		g.must(g.Copy(g.stream, Copy{Y: p[0], X: p[1], Dims: []int{rows, cols / 2}, YStrides: []int{cols / 2, 1},
			XStrides: []int{cols, 1}, Size: t.Size()}))
	}))
	g.free(0)
}

func benchReduce(g *rig, t driver.DType) {
	const rows, cols = 32768, 4096
	sets := g.sets(t, rows*cols, rows*cols)
	y := g.alloc(rows, f32, 0)
	for name, c := range map[string][3]int{"sum of all": {1, rows * cols, 1}, "sum of rows": {rows, cols, 1}, "sum of columns": {1, rows, cols}} {
		a := Reduce{Op: Sum, Y: y.Ptr, Outer: c[0], N: c[1], Inner: c[2], XType: t}
		a.Workspace = g.alloc(g.ReduceWorkspace(a)/4+1, f32, 0).Ptr
		g.bench(name+" 32768x4096", rows*cols*t.Size(), over(sets, func(p []driver.Ptr) {
			a := a
			a.X = p[0]
			g.must(g.Reduce(g.stream, a))
		}))
	}
	first := g.alloc(2, f32, 0)
	g.bench("first NaN 32768x4096", rows*cols*t.Size(), over(sets, func(p []driver.Ptr) {
		g.must(g.FirstNonFinite(g.stream, first.Ptr, p[0], rows*cols, t))
	}))
	parts := g.alloc(NormalizeWorkspace/4, f32, 0)
	g.bench("normalize 32768x4096", 3*rows*cols*t.Size(), over(sets, func(p []driver.Ptr) {
		g.must(g.Normalize(g.stream, Normalize{Y: p[1], X: p[0], Workspace: parts.Ptr, N: rows * cols, YType: t, XType: t}))
	}))
	for _, n := range []int{1024, 4096} {
		g.bench(fmt.Sprintf("softmax of rows of %d", n), 2*rows*cols*t.Size(), over(sets, func(p []driver.Ptr) {
			g.must(g.Softmax(g.stream, p[1], p[0], rows*cols/n, n, t))
		}))
	}
	g.free(0)
}

// benchOptim updates a model of 124 million parameters in as many tensors as it has.
func benchOptim(g *rig, t driver.DType) {
	const d, layers, ff, vocab = 768, 12, 2048, 50304
	shapes := [][2]int{{vocab, d}}
	for range layers {
		shapes = append(shapes, [2]int{1, d}, [2]int{1, d}, [2]int{4 * d, d}, [2]int{2 * ff, d}, [2]int{d, ff})
	}
	var tensors []OptimTensor
	total := 0
	for _, s := range shapes {
		n := s[0] * s[1]
		total += n
		f := g.sets(f32, n, n, n)[0]
		h := g.sets(t, n, n)[0]
		tensors = append(tensors, OptimTensor{Param: f[0], First: f[1], Second: f[2], Grad: h[0], GradType: t, Copy: h[1], CopyType: t,
			Direction: h[1], Result: h[1], DirectionType: t, Size: n, LRScale: 1, ShapeScale: 1, Beta1: 0.9, Beta2: 0.95})
	}
	table, err := g.NewTable(tensors)
	g.must(err)
	defer table.Free()
	squares := g.alloc(table.Chunks, f32, 0).Ptr
	control := g.control(Control{LR: 1e-3, Eps: 1e-8, GradScale: 1, MaxNorm: 1})
	one := func(f func()) []func() { return []func(){f} }
	g.bench(fmt.Sprintf("gradient norm, %d tensors, %d M", len(tensors), total/1e6), total*t.Size(), one(func() {
		g.must(g.GradSquares(g.stream, squares, table))
		g.must(g.GradNorm(g.stream, control, squares, table.Chunks, 0))
	}))
	g.bench("AdamW", total*(24+2*t.Size()), one(func() { g.must(g.AdamW(g.stream, control, table)) }))
	g.bench("Muon, momentum and direction", total*(12+3*t.Size()), one(func() {
		g.must(g.MuonDirection(g.stream, control, squares, table, true))
	}))
	g.bench("Muon, update", total*(8+2*t.Size()), one(func() { g.must(g.MuonApply(g.stream, control, table)) }))
}
