package cudabench

import (
	"fmt"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/seed"
	"github.com/kasmina-go/kasmina/state"

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
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/normalize"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/reduce"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/rope"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/silu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/softmax"
)

// The types of the operands. Muon's iteration is timed in float16 instead.
const bf16, f32 = gpu.BFloat16, gpu.Float32

// The size of matrices that do not come from a model.
const rows, columns, elements = 32768, 4096, rows * columns

// ceilings measures the card's limits: a copy and a matrix product.
func ceilings(b *timer) {
	const size = 2 << 30
	x, y := b.normal(size/2, bf16), b.bytes(size)
	b.time(Measurement{Name: "copy_2GiB", Bytes: 2 * size}, func() {
		do(b.Ctx.CopyOnDevice(y, x, size, b.stream))
	})
	b.free()

	const n = 8192
	p, c, d := b.normal(n*n, bf16), b.normal(n*n, bf16), b.room(n*n, bf16)
	product := b.plan(gpu.MatmulSpec{M: n, N: n, K: n, A: bf16, B: bf16, D: bf16})
	b.time(Measurement{Name: "gemm_8192_bf16", FLOPs: 2 * n * n * n}, func() {
		product(gpu.MatmulArgs{Alpha: 1, A: p, B: c, D: d})
	})
}

// norms times RMSNorm and LayerNorm, and RMSNorm with a residual.
func norms(b *timer) {
	for _, shape := range [][2]int{{rows, columns}, {rows, 768}, {16384, 1024}} {
		rows, d := shape[0], shape[1]
		n := rows * d
		name, size := fmt.Sprintf("_%dx%d", rows, d), float64(2*n)
		a := norm.RMSNorm{Y: b.room(n, bf16), Rstd: b.normal(rows, f32), X: b.normal(n, bf16),
			W: b.normal(d, f32), Rows: rows, D: d, Eps: 1e-5, Type: bf16}
		back := norm.RMSNormBackward{DX: b.room(n, bf16), DW: b.room(d, f32),
			G: b.normal(n, bf16), X: a.X, W: a.W, Rstd: a.Rstd, Rows: rows, D: d, Type: bf16}
		back.Workspace = b.bytes(back.WorkspaceBytes(b.Info))
		b.moves("rmsnorm_fwd"+name, 2*size, a)
		b.moves("rmsnorm_bwd"+name, 3*size, back)
		a.Sum, a.Residual = b.room(n, bf16), b.normal(n, bf16)
		back.Add = a.Residual
		b.moves("add_rmsnorm_fwd"+name, 4*size, a)
		b.moves("add_rmsnorm_bwd"+name, 4*size, back)

		layer := norm.LayerNorm{Y: a.Y, Stats: b.room(norm.LayerNormStats*rows, f32), X: a.X, W: a.W,
			B: a.W, Rows: rows, D: d, Eps: 1e-5, Type: bf16}
		layerBack := norm.LayerNormBackward{DX: back.DX, DW: back.DW, DB: b.room(d, f32), G: back.G,
			X: a.X, W: a.W, Stats: layer.Stats, Rows: rows, D: d, Type: bf16}
		layerBack.Workspace = b.bytes(layerBack.WorkspaceBytes(b.Info))
		b.moves("layernorm_fwd"+name, 2*size, layer)
		b.moves("layernorm_bwd"+name, 3*size, layerBack)
		b.free()
	}
}

func gates(b *timer) {
	const rows, f, size = 16384, 11008, 2 * 16384 * 11008
	a := silu.Mul{H: b.bytes(size), AB: b.normal(2*rows*f, bf16), Rows: rows, F: f, Type: bf16}
	back := silu.MulBackward{DAB: b.bytes(2 * size), DH: b.normal(rows*f, bf16), AB: a.AB,
		Rows: rows, F: f, Type: bf16}
	for _, name := range []string{"silu", "gelu"} {
		a.GELU, back.GELU = name == "gelu", name == "gelu"
		b.moves(name+"mul_fwd_16384x11008", 3*size, a)
		b.moves(name+"mul_bwd_16384x11008", 5*size, back)
	}
}

func rotations(b *timer) {
	const batch, seq, heads, dim = 32, 1024, 32, 128
	const n = batch * seq * heads * dim
	a := rope.Rotate{Y: b.room(n, bf16), X: b.normal(n, bf16), Cos: b.normal(seq*dim/2, f32),
		Sin: b.normal(seq*dim/2, f32), Rows: batch * seq, Seq: seq, Heads: heads, HeadDim: dim,
		Type: bf16}
	b.moves("rope_32x1024x32x128", 2*2*n, a)
	a.Inverse = true
	b.moves("rope_bwd_32x1024x32x128", 2*2*n, a)
}

func losses(b *timer) {
	const rows, v, size = 8192, 50304, 2 * 8192 * 50304
	a := crossentropy.Forward{Logits: b.normal(rows*v, bf16), Losses: b.room(rows, f32),
		Normalizers: b.room(2*rows, f32), Targets: b.ids(rows, v), Rows: rows, V: v, Type: bf16}
	scale := b.room(1, f32)
	b.moves("crossentropy_fwd_8192x50304", size,
		crossentropy.Scale{Scale: scale, Targets: a.Targets, Rows: rows}, a,
		crossentropy.Mean{Mean: b.room(1, f32), Losses: a.Losses, Scale: scale, Rows: rows})
	a.Scale = scale
	b.moves("crossentropy_bwd_8192x50304", 2*size,
		crossentropy.Backward{Out: b.bytes(size), Forward: a})
}

func embeddings(b *timer) {
	const rows, vocab, d = 32768, 50304, 768
	ids := b.ids(rows, vocab)
	b.moves("embedding_fwd_32768x50304x768", 2*2*rows*d, embedding.Forward{
		Y: b.room(rows*d, bf16), IDs: ids, Table: b.normal(vocab*d, bf16), Rows: rows,
		Vocab: vocab, D: d, Type: bf16, TableType: bf16})
	back := embedding.Backward{DT: b.room(vocab*d, f32), IDs: ids, G: b.normal(rows*d, bf16),
		Rows: rows, Vocab: vocab, D: d, Type: bf16}
	back.Workspace = b.bytes(back.WorkspaceBytes(b.Info))
	b.moves("embedding_bwd_32768x50304x768", 2*rows*d+4*vocab*d, back)
}

// attentions times attention. It counts only operations on scores that the causal mask and the window
// keep. A backward pass counts as two and a half forward passes.
func attentions(b *timer) {
	for _, s := range []struct{ batch, heads, seq, dim, window int }{{32, 12, 1024, 64, 0},
		{16, 16, 2048, 128, 0}, {4, 16, 8192, 128, 0}, {4, 16, 8192, 128, 1024}} {
		width := s.heads * s.dim
		n := s.batch * s.seq * width
		var in, out [4]kernel.Rows
		for i := range in {
			in[i] = kernel.Rows{Ptr: b.normal(n, bf16), Stride: width}
			out[i] = kernel.Rows{Ptr: b.room(n, bf16), Stride: width}
		}
		back := attention.Backward{Geometry: attention.Geometry{Batch: s.batch, Seq: s.seq,
			Heads: s.heads, KVHeads: s.heads, HeadDim: s.dim, Causal: true}, DQ: out[1],
			DK: out[2], DV: out[3], G: in[3], Q: in[0], K: in[1], V: in[2], Y: out[0],
			Normalizers: b.room(2*s.batch*s.heads*s.seq, f32), Type: bf16}
		back.Workspace = b.bytes(back.WorkspaceBytes(b.Info))
		flops := 2 * float64(n) * float64(s.seq)
		shape := fmt.Sprintf("_b%dh%ds%dd%d", s.batch, s.heads, s.seq, s.dim)
		if s.window > 0 {
			shape += fmt.Sprintf("w%d", s.window)
			share := float64(s.window) / float64(s.seq)
			flops *= share * (2 - share)
			back.Documents = b.bytes(attention.DocumentsBytes(s.batch, s.seq))
			b.launch(attention.Documents{Table: back.Documents, Batch: s.batch, Seq: s.seq,
				Window: s.window})
		}
		b.computes("attn_causal_fwd"+shape, flops, attention.Forward{Geometry: back.Geometry,
			Y: back.Y, Q: back.Q, K: back.K, V: back.V, Normalizers: back.Normalizers, Type: bf16})
		b.computes("attn_causal_bwd"+shape, 2.5*flops, back)
		b.free()
	}
}

// decoding times the kernels that generate one token with Llama 3.1 8B: matrix-vector products, and
// attention with 100 to 8000 previous tokens.
func decoding(b *timer) {
	const dim, ff, vocab, capacity = 4096, 14336, 128256, 8192
	for _, c := range []struct{ columns, d int }{{6144, dim}, {dim, dim}, {dim, ff}, {vocab, dim},
		{3072, 2048}, {2048, 2048}, {2048, 8192}} {
		n := c.columns * c.d
		b.moves(fmt.Sprintf("decode_product_%dx%d", c.columns, c.d), 2*float64(n),
			decode.Product{Y: b.room(c.columns, bf16), X: b.normal(c.d, bf16),
				W: b.normal(n, bf16), Columns: c.columns, D: c.d, Type: bf16})
		b.free()
	}

	b.moves(fmt.Sprintf("decode_gated_%dx%d", ff, dim), 4*ff*dim, decode.Gated{
		H: b.room(ff, bf16), X: b.normal(dim, bf16), W: b.normal(2*ff*dim, bf16), F: ff, D: dim,
		Type: bf16})
	b.free()
	g := decode.Geometry{Heads: 32, KVHeads: 8, HeadDim: 128, Capacity: capacity, Scale: 0.088}
	width := g.KVHeads * g.HeadDim
	angles := func() gpu.Ptr { return b.normal(capacity*g.HeadDim/2, f32) }
	a := decode.Attention{Geometry: g, Q: b.normal(dim, bf16), K: b.normal(width, bf16),
		V: b.normal(width, bf16), Y: b.room(dim, bf16), Keys: b.normal(capacity*width, bf16),
		Values: b.normal(capacity*width, bf16), Cos: angles(), Sin: angles(),
		Parts: b.bytes(g.PartsBytes(b.Info)), Arrived: b.zeros(g.Counters()), Type: bf16}
	for _, position := range []int64{100, 1000, 8000} {
		a.Position = b.upload(gpu.Bytes([]int64{position}))
		b.moves(fmt.Sprintf("decode_attention_%d", position), 4*float64(position)*float64(width), a)
	}
}

// newtonSchulz times five steps of Muon's iteration, in the variant expected to be fastest.
func newtonSchulz(b *timer) {
	const t = gpu.Float16
	for _, s := range [][2]int{{768, 3072}, {2048, 2048}, {2048, 8192}} {
		m, n := s[0], s[1] // m ≤ n
		it := gemm.NewtonSchulz{Rows: m, Columns: n, Batch: 1, Steps: 5, Type: t,
			X:        [2]gpu.Ptr{b.room(m*n, t), b.room(m*n, t)},
			Together: gemm.NewtonSchulzTogether(m, n)}
		for i := range it.Squares {
			it.Squares[i] = b.room(m*m, t)
		}
		begin := normalize.Forward{Y: it.X[0], X: b.normal(m*n, bf16), N: m * n, YType: t,
			Workspace: b.bytes(normalize.WorkspaceBytes), XType: bf16}
		gram := b.plan(gpu.MatmulSpec{M: m, N: m, K: n, TransB: true, A: t, B: t, D: t})
		square := b.plan(gpu.MatmulSpec{M: m, N: m, K: m, A: t, B: t, D: t})
		wide := b.plan(gpu.MatmulSpec{M: m, N: n, K: m, A: t, B: t, D: t})
		_, symmetric := it.Symmetric()
		b.time(Measurement{Name: fmt.Sprintf("newton_schulz5_%dx%d", m, n),
			FLOPs: 5 * 2 * float64(m) * float64(m) * float64(2*n+m)}, func() {
			b.launch(begin)
			if it.Together > 0 && len(symmetric.Variants(b.Set)) > 0 {
				it.Run(func(a gemm.Symmetric) { b.launch(a) },
					func(y, q, x gpu.Ptr) { wide(gpu.MatmulArgs{Alpha: 1, A: q, B: x, D: y}) })
				return
			}
			x, y, a, p := it.X[0], it.X[1], it.Squares[0], it.Squares[1]
			for range it.Steps {
				gram(gpu.MatmulArgs{Alpha: 1, A: x, B: x, D: a})
				square(gpu.MatmulArgs{Alpha: gemm.SchulzC, Beta: gemm.SchulzB, A: a, B: a, C: a,
					D: p})
				wide(gpu.MatmulArgs{Alpha: 1, Beta: gemm.SchulzA, A: p, B: x, C: x, D: y})
				x, y = y, x
			}
		})
		b.free()
	}
}

// layers times Kasmina layers with a separate slot for each seed and with seeds of all four kinds in
// rotation. Either all seeds are grafting or, with "stages", they are in all stages in rotation. Each
// layer runs without and with exact telemetry.
func layers(b *timer) {
	for _, s := range []struct{ rows, seeds int }{{rows, 1024}, {1024, 1000}, {64, 1000}} {
		for _, stages := range []string{"", "_stages"} {
			layer(b, s.rows, s.seeds, stages)
			b.free()
		}
	}
}

func layer(b *timer, rows, seeds int, stages string) {
	const chunk = 4
	slots, n := seeds+1, rows*seeds*chunk
	l := kasmina.Layer{X: b.normal(n, bf16), Weights: b.normal(slots*chunk, f32),
		Scales: b.normal(slots, f32), State: kasmina.State{Seeds: seeds, Slots: slots}, Rows: rows,
		Chunk: chunk, Eps: 1e-8, Stability: seed.Adaptive, Type: bf16}
	data := make([]byte, l.State.Bytes())
	do(l.State.Encode(data, func(i int) seed.Seed { return seedAt(b, i, stages != "") }))
	l.State.Ptr = b.upload(data)
	counts := b.zeros(3 * seeds)
	forward := kasmina.Forward{Layer: l, Y: b.room(n, bf16), Bad: counts,
		Figures:   b.room(kasmina.ForwardFigures*seeds, f32),
		Workspace: b.bytes(kasmina.Forward{Layer: l}.WorkspaceBytes(b.Info))}
	backward := kasmina.Backward{Layer: l, DX: b.room(n, bf16), DWeights: b.room(slots*chunk, f32),
		DScales: b.room(slots, f32), G: b.normal(n, bf16), Bad: counts.Offset(4 * seeds),
		Clipped: counts.Offset(8 * seeds), Figures: b.room(kasmina.BackwardFigures*seeds, f32),
		Workspace: b.bytes(kasmina.Backward{Layer: l}.WorkspaceBytes(b.Info))}
	name, size := fmt.Sprintf("%dx%d_s%d%s", rows, seeds*chunk, seeds, stages), 2*float64(n)
	for _, telemetry := range []string{"", "_telemetry"} {
		forward.Telemetry, backward.Telemetry = telemetry != "", telemetry != ""
		b.moves("kasmina_fwd_"+name+telemetry, 2*size, forward)
		b.moves("kasmina_bwd_"+name+telemetry, 3*size, backward)
	}
}

// seedAt returns seed number i of a layer.
func seedAt(b *timer, i int, stages bool) seed.Seed {
	const kinds = 4
	stage, kind := state.Grafting, i%kinds
	if stages {
		all := int(state.RolledBack) + 1
		stage, kind = state.Stage(i%all), i/all%kinds
	}

	s := seed.Seed{Kind: blueprints.Kind(kind), Slot: uint16(i + 1), Blend: stage.Blends(),
		Learn: stage.Learns(), Alpha: 1}
	if stage == state.Grafting || stage == state.Stabilization || stage == state.Evaluating {
		s.Alpha = b.random.Float32()
	}

	return s
}

// updates times the gradient norm and AdamW on all parameters of a model with 350 million.
func updates(b *timer) {
	const d, layers, ff, vocab = 1024, 24, 2816, 50304
	sizes := []int{vocab * d, d}
	for range layers {
		sizes = append(sizes, d, d*d, d*d, d*d, d*d, d, ff*d, ff*d, ff*d)
	}

	var tensors []optimizer.Tensor
	total := 0.0
	for _, n := range sizes {
		total += float64(n)
		tensors = append(tensors, optimizer.Tensor{Param: b.normal(n, f32),
			Grad: b.normal(n, f32), GradType: f32,
			Moments: [optimizer.MaxMoments]gpu.Ptr{b.zeros(n), b.zeros(n)},
			Copy:    b.room(n, bf16), CopyType: bf16, Size: n, LRScale: 1, Decay: 0.01, Beta1: 0.9,
			Beta2: 0.999})
	}

	table := must(optimizer.NewTable(b.Ctx, b.memory.For("a benchmark"), tensors))
	squares := b.room(table.Chunks, f32)
	control := b.upload(optimizer.Control{LR: 3e-4, Eps: 1e-8, GradScale: 1, MaxNorm: 1}.Bytes())
	b.moves("gradnorm_llama350M", 4*total, optimizer.GradSquares{Squares: squares, Table: table},
		optimizer.GradNorm{Control: control, Squares: squares, Count: table.Chunks})
	// The update reads and writes the parameter and two moments, reads the gradient, and writes a copy of
	// the parameter in bfloat16.
	b.moves("adamw_llama350M", (2*3*4+2+4)*total, optimizer.Elementwise{Kernel: "AdamW",
		Control: control, Table: table})
}

// stock times Gorgonia's own ops: sums, a function, a cast, softmax, a transposition, and reductions of a
// whole matrix, its rows and its columns.
func stock(b *timer) {
	const size = 2 * elements
	x, y, z := b.normal(elements, bf16), b.normal(elements, bf16), b.room(elements, bf16)
	add := elementwise.Binary{Op: elementwise.Add, Y: z, A: elementwise.Operand{Ptr: x},
		B: elementwise.Operand{Ptr: y}, N: elements, Type: bf16}
	b.moves("add_32768x4096", 3*size, add)
	add.B = elementwise.Operand{Ptr: b.normal(columns, bf16), Period: columns}
	b.moves("add_row_32768x4096", 2*size, add)
	b.moves("tanh_32768x4096", 2*size,
		elementwise.Unary{Op: elementwise.Tanh, Y: z, X: x, N: elements, Type: bf16})
	b.moves("cast_32768x4096", 3*size, elementwise.Cast{Y: z, YType: bf16,
		X: b.normal(elements, f32), XType: f32, N: elements})
	b.moves("softmax_fwd_32768x4096", 2*size,
		softmax.Forward{Y: z, X: x, Rows: rows, N: columns, Type: bf16})
	b.moves("softmax_bwd_32768x4096", 3*size,
		softmax.Backward{DX: y, G: x, Y: z, Rows: rows, N: columns, Type: bf16})
	sum := reduce.Reduce{Op: reduce.Sum, Y: b.room(rows, f32), X: x, YType: f32, XType: bf16}
	for _, s := range []struct {
		name         string
		outer, inner int
	}{{"sum", 1, 1}, {"sum_rows", rows, 1}, {"sum_columns", 1, columns}} {
		sum.Outer, sum.N, sum.Inner = s.outer, elements/s.outer/s.inner, s.inner
		sum.Workspace = b.bytes(sum.WorkspaceBytes(b.Info))
		b.moves(s.name+"_32768x4096", size, sum)
	}

	b.moves("transpose_32768x4096", 2*size, layout.Copy{Y: z, X: x, Dims: []int{columns, rows},
		YStrides: []int{rows, 1}, XStrides: []int{1, columns}, Size: 2})
}
