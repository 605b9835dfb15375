package rope

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times the rotation and its inverse.
func Bench(b *bench.B) {
	const batch, seq, heads, dim = 32, 1024, 32, 128
	const n = batch * seq * heads * dim
	x, y := b.Normal(n, gpu.BFloat16), b.Alloc(n, gpu.BFloat16)
	cos, sin := b.Normal(seq*dim/2, gpu.Float32), b.Normal(seq*dim/2, gpu.Float32)
	for i, name := range []string{"rope_32x1024x32x128", "rope_bwd_32x1024x32x128"} {
		b.Time(bench.Measurement{Name: name, Bytes: 2 * 2 * n}, func() error {
			return Rotate{Y: y, X: x, Cos: cos, Sin: sin, Rows: batch * seq, Seq: seq, Heads: heads,
				HeadDim: dim, Inverse: i == 1, Type: gpu.BFloat16}.Launch(b.Set, b.Stream)
		})
	}
}
