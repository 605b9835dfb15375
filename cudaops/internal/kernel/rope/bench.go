package rope

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times the rotation and its inverse.
func Bench(b *bench.B) {
	const batch, seq, heads, dim, t = 32, 1024, 32, 128, gpu.BFloat16
	const n = batch * seq * heads * dim
	a := Rotate{Y: b.Alloc(n, t), X: b.Normal(n, t), Cos: b.Normal(seq*dim/2, gpu.Float32),
		Sin: b.Normal(seq*dim/2, gpu.Float32), Rows: batch * seq, Seq: seq, Heads: heads,
		HeadDim: dim, Type: t}
	b.Moves("rope_32x1024x32x128", 2*2*n, a)
	a.Inverse = true
	b.Moves("rope_bwd_32x1024x32x128", 2*2*n, a)
}
