package decode

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times a token of Llama 3.1 8B, in bfloat16: products, and attention behind some others.
func Bench(b *bench.B) {
	const dim, ff, vocab, t = 4096, 14336, 128256, gpu.BFloat16
	for _, c := range []struct{ columns, d int }{{6144, dim}, {dim, dim}, {dim, ff}, {vocab, dim},
		{3072, 2048}, {2048, 2048}, {2048, 8192}} {
		x, w, y := b.Normal(c.d, t), b.Normal(c.columns*c.d, t), b.Alloc(c.columns, t)
		b.Time(bench.Measurement{Name: fmt.Sprintf("decode_product_%dx%d", c.columns, c.d),
			Bytes: 2 * float64(c.columns) * float64(c.d)}, func() error {
			return Product{Y: y, X: x, W: w, Columns: c.columns, D: c.d, Type: t}.Launch(b.Set,
				b.Stream)
		})
		b.Free()
	}
	x, w, h := b.Normal(dim, t), b.Normal(2*ff*dim, t), b.Alloc(ff, t)
	b.Time(bench.Measurement{Name: fmt.Sprintf("decode_gated_%dx%d", ff, dim),
		Bytes: 4 * ff * dim}, func() error {
		return Gated{H: h, X: x, W: w, F: ff, D: dim, Type: t}.Launch(b.Set, b.Stream)
	})
	b.Free()
	for _, position := range []int{100, 1000, 8000} {
		attend(b, position)
	}
}

// attend times attention of a token.
func attend(b *bench.B, position int) {
	const capacity, t = 8192, gpu.BFloat16
	g := Geometry{Heads: 32, KVHeads: 8, HeadDim: 128, Capacity: capacity, Scale: 0.088}
	width := g.KVHeads * g.HeadDim
	a := Attention{Geometry: g, Q: b.Normal(g.Heads*g.HeadDim, t), K: b.Normal(width, t),
		V: b.Normal(width, t), Y: b.Alloc(g.Heads*g.HeadDim, t), Keys: b.Normal(capacity*width, t),
		Values: b.Normal(capacity*width, t), Cos: b.Normal(capacity*g.HeadDim/2, gpu.Float32),
		Sin:      b.Normal(capacity*g.HeadDim/2, gpu.Float32),
		Position: b.Upload(kernel.TableBytes([]int64{int64(position)})),
		Parts:    b.Alloc(g.PartsBytes(b.Info), gpu.Float8E4M3),
		Arrived:  b.Floats(make([]float32, g.Counters())), Type: t}
	b.Time(bench.Measurement{Name: fmt.Sprintf("decode_attention_%d", position),
		Bytes: 4 * float64(position) * float64(width)}, func() error {
		return a.Launch(b.Set, b.Stream)
	})
	b.Free()
}
