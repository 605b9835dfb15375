package cudabench

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	attentionkernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/attention"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/crossentropy"
	embeddingkernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/embedding"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/normalize"
	optimizerkernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	ropekernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/rope"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/silu"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

const (
	f32  = gpu.Float32
	bf16 = gpu.BFloat16
	f16  = gpu.Float16
)

// ceilings measures what bounds the rest.
func ceilings(b *bench) {
	const size = 2 << 30
	x, y := b.normal(size/2, bf16), b.alloc(size/2, bf16)
	b.time(Measurement{Name: "copy_2GiB", Bytes: 2 * size}, func() error { return b.ctx.CopyOnDevice(y, x, size, b.stream) })
	b.free()

	const n = 8192
	p, c, d := b.normal(n*n, bf16), b.normal(n*n, bf16), b.alloc(n*n, bf16)
	product := b.plan(gpu.MatmulSpec{M: n, N: n, K: n, A: bf16, B: bf16, D: bf16})
	b.time(Measurement{Name: "gemm_8192_bf16", FLOPs: 2 * n * n * n}, func() error {
		return product(gpu.MatmulArgs{Alpha: 1, A: p, B: c, D: d})
	})
	b.free()
}

// plan returns what enqueues matrix products.
func (b *bench) plan(spec gpu.MatmulSpec) func(gpu.MatmulArgs) error {
	const size = 32 << 20
	if b.err != nil {
		return nil
	}
	workspace := b.alloc(size/4, f32)
	blas, err := b.ctx.Blas()
	if err != nil {
		b.do(err)
		return nil
	}
	plan, err := blas.Plan(spec, size, 1)
	if err != nil {
		b.do(err)
		return nil
	}
	b.plans = append(b.plans, plan)
	return func(a gpu.MatmulArgs) error {
		a.Workspace, a.WorkspaceSize = workspace, size
		return plan.Run(0, a, b.stream)
	}
}

// ops measures the kernels that memory bounds.
func ops(b *bench) {
	for _, measure := range []func(*bench){rmsNorm, siluMul, rope, crossEntropy, embedding} {
		measure(b)
		b.free()
	}
}

func rmsNorm(b *bench) {
	for _, shape := range [][2]int{{32768, 4096}, {32768, 768}, {16384, 1024}} {
		rmsNormOf(b, shape[0], shape[1])
		b.free()
	}
}

func rmsNormOf(b *bench, rows, d int) {
	shape, size := fmt.Sprintf("%dx%d", rows, d), float64(2*rows*d)
	x, g, w := b.normal(rows*d, bf16), b.normal(rows*d, bf16), b.normal(d, f32)
	y, rstd, dx, dw := b.alloc(rows*d, bf16), b.alloc(rows, f32), b.alloc(rows*d, bf16), b.alloc(d, f32)
	workspace := b.alloc(norm.RMSNormWorkspace(b.Set, d, bf16)/4, f32)
	b.time(Measurement{Name: "rmsnorm_fwd_" + shape, Bytes: 2 * size}, func() error {
		return norm.RMSNorm{Y: y, Rstd: rstd, X: x, W: w, Rows: rows, D: d, Eps: 1e-5, Type: bf16}.Launch(b.Set, b.stream)
	})
	backward := norm.RMSNormBackward{DX: dx, DW: dw, G: g, X: x, W: w, Rstd: rstd, Rows: rows, D: d, Type: bf16, DWType: f32,
		Workspace: workspace}
	b.time(Measurement{Name: "rmsnorm_bwd_" + shape, Bytes: 3 * size}, func() error {
		return backward.Launch(b.Set, b.stream)
	})
	sum, residual := b.alloc(rows*d, bf16), b.normal(rows*d, bf16)
	b.time(Measurement{Name: "add_rmsnorm_fwd_" + shape, Bytes: 4 * size}, func() error {
		return norm.RMSNorm{Y: y, Rstd: rstd, Sum: sum, X: x, Residual: residual, W: w, Rows: rows, D: d,
			Eps: 1e-5, Type: bf16}.Launch(b.Set, b.stream)
	})
	backward.Add = residual
	b.time(Measurement{Name: "add_rmsnorm_bwd_" + shape, Bytes: 4 * size}, func() error {
		return backward.Launch(b.Set, b.stream)
	})
}

// siluMul has its inputs side by side in rows of 2·F, as the model's product of gate and up projection leaves them.
func siluMul(b *bench) {
	const rows, f = 16384, 11008
	const size = 2 * rows * f
	ab, dh := b.normal(2*rows*f, bf16), b.normal(rows*f, bf16)
	h, dab := b.alloc(rows*f, bf16), b.alloc(2*rows*f, bf16)
	b.time(Measurement{Name: "silumul_fwd_16384x11008", Bytes: 3 * size}, func() error {
		return silu.Mul{H: h, A: ab, B: ab.Offset(2 * f), Rows: rows, F: f, Stride: 2 * f, Type: bf16}.Launch(b.Set, b.stream)
	})
	b.time(Measurement{Name: "silumul_bwd_16384x11008", Bytes: 5 * size}, func() error {
		return silu.MulBackward{DA: dab, DB: dab.Offset(2 * f), DH: dh, A: ab, B: ab.Offset(2 * f),
			Rows: rows, F: f, Stride: 2 * f, GradStride: 2 * f, Type: bf16}.Launch(b.Set, b.stream)
	})
}

func rope(b *bench) {
	const batch, seq, heads, dim = 32, 1024, 32, 128
	const n = batch * seq * heads * dim
	x, y := b.normal(n, bf16), b.alloc(n, bf16)
	cos, sin := b.normal(seq*dim/2, f32), b.normal(seq*dim/2, f32)
	for i, name := range []string{"rope_32x1024x32x128", "rope_bwd_32x1024x32x128"} {
		b.time(Measurement{Name: name, Bytes: 2 * 2 * n}, func() error {
			return ropekernel.Rotate{Y: y, X: x, Cos: cos, Sin: sin, Rows: batch * seq, Seq: seq, Heads: heads,
				HeadDim: dim, Inverse: i == 1, Type: bf16}.Launch(b.Set, b.stream)
		})
	}
}

func crossEntropy(b *bench) {
	const rows, v = 8192, 50304
	const size = 2 * rows * v
	logits, d := b.normal(rows*v, bf16), b.alloc(rows*v, bf16)
	losses, lse, scale, mean := b.alloc(rows, f32), b.alloc(rows, f32), b.alloc(1, f32), b.alloc(1, f32)
	a := crossentropy.Forward{Logits: logits, Losses: losses, LSE: lse, Targets: b.ids(rows, v), Rows: rows, V: v, Type: bf16}
	b.time(Measurement{Name: "crossentropy_fwd_8192x50304", Bytes: size}, func() error {
		return errors.Join(crossentropy.Scale{Scale: scale, Targets: a.Targets, Rows: rows}.Launch(b.Set, b.stream), a.Launch(b.Set, b.stream),
			crossentropy.Mean{Mean: mean, Losses: losses, Scale: scale, Rows: rows}.Launch(b.Set, b.stream))
	})
	one := b.floats([]float32{1})
	b.time(Measurement{Name: "crossentropy_bwd_8192x50304", Bytes: 2 * size}, func() error {
		a := a
		a.Scale, a.Grad = scale, one
		return crossentropy.Backward{Out: d, Forward: a}.Launch(b.Set, b.stream)
	})
}

func embedding(b *bench) {
	const rows, vocab, d = 32768, 50304, 768
	table, g, ids := b.normal(vocab*d, bf16), b.normal(rows*d, bf16), b.ids(rows, vocab)
	y, dt, workspace := b.alloc(rows*d, bf16), b.alloc(vocab*d, f32), b.alloc(embeddingkernel.Workspace(rows, vocab, d)/4, f32)
	b.time(Measurement{Name: "embedding_fwd_32768x50304x768", Bytes: 2 * 2 * rows * d}, func() error {
		return embeddingkernel.Forward{Y: y, IDs: ids, Table: table, Rows: rows, Vocab: vocab, D: d, Type: bf16,
			TableType: bf16}.Launch(b.Set, b.stream)
	})
	b.time(Measurement{Name: "embedding_bwd_32768x50304x768", Bytes: 2*rows*d + 4*vocab*d}, func() error {
		return embeddingkernel.Backward{DT: dt, IDs: ids, G: g, Rows: rows, Vocab: vocab, D: d,
			DTType: f32, GType: bf16, Workspace: workspace}.Launch(b.Set, b.stream)
	})
}

// attention counts the half of the scores that a causal mask leaves; a backward pass is two and a half forward ones.
func attention(b *bench) {
	for _, s := range []struct{ batch, heads, seq, dim int }{{32, 12, 1024, 64}, {16, 16, 2048, 128}, {4, 16, 8192, 128}} {
		width := s.heads * s.dim
		n := s.batch * s.seq * width
		shape := attentionkernel.Geometry{Batch: s.batch, Seq: s.seq, Heads: s.heads, KVHeads: s.heads, HeadDim: s.dim, Causal: true}
		rows := func(p gpu.Ptr) kernel.Rows { return kernel.Rows{Ptr: p, Stride: width} }
		var in, out [4]kernel.Rows
		for i := range in {
			in[i], out[i] = rows(b.normal(n, bf16)), rows(b.alloc(n, bf16))
		}
		q, k, v, g := in[0], in[1], in[2], in[3]
		y, dq, dk, dv := out[0], out[1], out[2], out[3]
		lse, stats := b.alloc(s.batch*s.heads*s.seq, f32), b.alloc(attentionkernel.StatsBytes(b.Set, shape, bf16)/4, f32)
		flops := 2 * float64(n) * float64(s.seq)
		name := func(pass string) string {
			return fmt.Sprintf("attn_causal_%s_b%dh%ds%dd%d", pass, s.batch, s.heads, s.seq, s.dim)
		}
		b.time(Measurement{Name: name("fwd"), FLOPs: flops}, func() error {
			return attentionkernel.Attend(b.Set, b.stream, shape, y, lse, q, k, v, bf16)
		})
		b.time(Measurement{Name: name("bwd"), FLOPs: 2.5 * flops}, func() error {
			return attentionkernel.AttendBackward(b.Set, b.stream, shape, dq, dk, dv, stats, g, q, k, v, y, lse, bf16)
		})
		b.free()
	}
}

// muon measures the Newton-Schulz iteration of matrices from their gradients in bf16 on: normalise, and products. Where they may be of
// half of what is symmetric, those ways are measured too; the name of the one that should be the fastest has nothing behind it.
func muon(b *bench) {
	for _, s := range [][2]int{{768, 3072}, {2048, 2048}, {2048, 8192}} {
		m, n := s[0], s[1] // m ≤ n
		it := gemm.NewtonSchulz{Rows: m, Columns: n, Batch: 1, Steps: 5, Type: f16, X: [2]gpu.Ptr{b.alloc(m*n, f16), b.alloc(m*n, f16)}}
		for i := range it.Squares {
			it.Squares[i] = b.alloc(m*m, f16)
		}
		g, workspace := b.normal(m*n, bf16), b.alloc(normalize.NormalizeWorkspace/4, f32)
		measure := func(suffix string, run func() error) {
			b.time(Measurement{Name: fmt.Sprintf("newton_schulz5_%dx%d%s", m, n, suffix),
				FLOPs: 5 * 2 * float64(m) * float64(m) * float64(2*n+m)}, func() error {
				return errors.Join(normalize.Forward{Y: it.X[0], X: g, Workspace: workspace, N: m * n, YType: f16,
					XType: bf16}.Launch(b.Set, b.stream), run())
			})
		}
		wide := b.plan(gpu.MatmulSpec{M: m, N: n, K: m, A: f16, B: f16, D: f16})
		suffix := func(int) string { return "" }
		if gemm.TakesSymmetric(b.Set, it.Shapes()[0], f16) {
			usual := gemm.NewtonSchulzTogether(m, n)
			suffix = func(together int) string {
				if together == usual {
					return ""
				}
				return map[int]string{0: "_by_products", 1: "_by_symmetry", 3: "_by_gram"}[together]
			}
			for _, it.Together = range []int{1, 3} {
				measure(suffix(it.Together), func() error {
					return it.Run(func(a gemm.Symmetric) error { return a.Launch(b.Set, b.stream) }, func(y, q, x gpu.Ptr) error {
						return wide(gpu.MatmulArgs{Alpha: 1, A: q, B: x, D: y})
					})
				})
			}
		}
		gram := b.plan(gpu.MatmulSpec{M: m, N: m, K: n, TransB: true, A: f16, B: f16, D: f16})
		square := b.plan(gpu.MatmulSpec{M: m, N: m, K: m, A: f16, B: f16, D: f16})
		measure(suffix(0), func() (err error) {
			x, y, a, p := it.X[0], it.X[1], it.Squares[0], it.Squares[1]
			for range it.Steps {
				err = errors.Join(err, gram(gpu.MatmulArgs{Alpha: 1, A: x, B: x, D: a}),
					square(gpu.MatmulArgs{Alpha: gemm.SchulzC, Beta: gemm.SchulzB, A: a, B: a, C: a, D: p}),
					wide(gpu.MatmulArgs{Alpha: 1, Beta: gemm.SchulzA, A: p, B: x, C: x, D: y}))
				x, y = y, x
			}
			return err
		})
		b.free()
	}
}

// optimizers measures the gradients' norm and AdamW over all parameters of a model of 350 million, with gradients of float32 and of bfloat16.
func optimizers(b *bench) {
	const d, layers, ff, vocab = 1024, 24, 2816, 50304
	sizes := []int{vocab * d, d}
	for range layers {
		sizes = append(sizes, d, d*d, d*d, d*d, d*d, d, ff*d, ff*d, ff*d)
	}
	var tensors []optimizerkernel.Tensor
	total := 0
	for _, n := range sizes {
		total += n
		t := optimizerkernel.Tensor{Param: b.normal(n, f32), Grad: b.normal(n, f32), GradType: f32, First: b.alloc(n, f32),
			Second: b.alloc(n, f32), Copy: b.alloc(n, bf16), CopyType: bf16, Size: n, LRScale: 1, Decay: 0.01, Beta1: 0.9, Beta2: 0.999}
		if b.err == nil {
			b.do(errors.Join(b.ctx.Memset8(t.First, 0, 4*n, b.stream), b.ctx.Memset8(t.Second, 0, 4*n, b.stream)))
		}
		tensors = append(tensors, t)
	}
	if b.err != nil {
		return
	}
	b.optimizer(tensors, total, f32, "")
	for i, n := range sizes {
		tensors[i].Grad, tensors[i].GradType = b.normal(n, bf16), bf16
	}
	b.optimizer(tensors, total, bf16, "_bf16_gradients")
}

// optimizer is optimizers with gradients of one type, of tensors with so many elements in all.
func (b *bench) optimizer(tensors []optimizerkernel.Tensor, total int, gradients gpu.DType, suffix string) {
	if b.err != nil {
		return
	}
	table, err := optimizerkernel.NewTable(b.Set, tensors)
	if err != nil {
		b.do(err)
		return
	}
	defer func() { b.do(errors.Join(b.ctx.SyncStream(b.stream), table.Free())) }()
	squares := b.alloc(table.Chunks, f32)
	control := b.upload(optimizerkernel.Control{LR: 3e-4, Eps: 1e-8, GradScale: 1, MaxNorm: 1, SkipNonFinite: true}.Bytes())
	b.time(Measurement{Name: "gradnorm_llama350M" + suffix, Bytes: float64(gradients.Size() * total)}, func() error {
		return errors.Join(optimizerkernel.GradSquares{Squares: squares, Table: table}.Launch(b.Set, b.stream), optimizerkernel.GradNorm{Control: control, Squares: squares, Count: table.Chunks, Scale: 0}.Launch(b.Set, b.stream))
	})
	// Parameter and moments are read and written, the gradient is read and the parameter in bfloat16 written.
	b.time(Measurement{Name: "adamw_llama350M" + suffix, Bytes: float64((2*3*4 + 2 + gradients.Size()) * total)}, func() error {
		return optimizerkernel.AdamW{Control: control, Table: table}.Launch(b.Set, b.stream)
	})
}
