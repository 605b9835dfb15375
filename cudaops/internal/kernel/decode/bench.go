package decode

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times a token of Llama 3.1 8B, in bfloat16: products, and attention behind some others.
func Bench(b *bench.B) {
	const dim, ff, vocab, capacity, t = 4096, 14336, 128256, 8192, gpu.BFloat16
	for _, c := range []struct{ columns, d int }{{6144, dim}, {dim, dim}, {dim, ff}, {vocab, dim},
		{3072, 2048}, {2048, 2048}, {2048, 8192}} {
		n := c.columns * c.d
		b.Moves(fmt.Sprintf("decode_product_%dx%d", c.columns, c.d), 2*float64(n),
			Product{Y: b.Alloc(c.columns, t), X: b.Normal(c.d, t), W: b.Normal(n, t),
				Columns: c.columns, D: c.d, Type: t})
		b.Free()
	}
	b.Moves(fmt.Sprintf("decode_gated_%dx%d", ff, dim), 4*ff*dim, Gated{H: b.Alloc(ff, t),
		X: b.Normal(dim, t), W: b.Normal(2*ff*dim, t), F: ff, D: dim, Type: t})
	b.Free()
	g := Geometry{Heads: 32, KVHeads: 8, HeadDim: 128, Capacity: capacity, Scale: 0.088}
	width := g.KVHeads * g.HeadDim
	a := Attention{Geometry: g, Q: b.Normal(g.Heads*g.HeadDim, t), K: b.Normal(width, t),
		V: b.Normal(width, t), Y: b.Alloc(g.Heads*g.HeadDim, t), Keys: b.Normal(capacity*width, t),
		Values: b.Normal(capacity*width, t), Cos: b.Normal(capacity*g.HeadDim/2, gpu.Float32),
		Sin:     b.Normal(capacity*g.HeadDim/2, gpu.Float32),
		Parts:   b.Alloc(g.PartsBytes(b.Info), gpu.Float8E4M3),
		Arrived: b.Zeros(g.Counters(), gpu.Float32), Type: t}
	for _, position := range []int64{100, 1000, 8000} {
		a.Position = b.Upload(kernel.TableBytes([]int64{position}))
		b.Moves(fmt.Sprintf("decode_attention_%d", position), 4*float64(position)*float64(width), a)
	}
}
