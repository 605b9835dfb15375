package attention

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times both passes. It counts the half of the scores that a causal mask leaves, and what a
// window leaves of these. A backward pass is two and a half forward ones.
func Bench(b *bench.B) {
	for _, s := range []struct{ batch, heads, seq, dim, window int }{{32, 12, 1024, 64, 0},
		{16, 16, 2048, 128, 0}, {4, 16, 8192, 128, 0}, {4, 16, 8192, 128, 1024}} {
		width := s.heads * s.dim
		n := s.batch * s.seq * width
		var in, out [4]kernel.Rows
		for i := range in {
			in[i] = kernel.Rows{Ptr: b.Normal(n, gpu.BFloat16), Stride: width}
			out[i] = kernel.Rows{Ptr: b.Alloc(n, gpu.BFloat16), Stride: width}
		}
		back := Backward{Geometry: Geometry{Batch: s.batch, Seq: s.seq, Heads: s.heads,
			KVHeads: s.heads, HeadDim: s.dim, Causal: true}, DQ: out[1], DK: out[2], DV: out[3],
			G: in[3], Q: in[0], K: in[1], V: in[2], Y: out[0],
			LSE: b.Alloc(s.batch*s.heads*s.seq, gpu.Float32), Type: gpu.BFloat16}
		back.Stats = b.Alloc(back.WorkspaceBytes(b.Info)/4, gpu.Float32)
		flops := 2 * float64(n) * float64(s.seq)
		shape := fmt.Sprintf("_b%dh%ds%dd%d", s.batch, s.heads, s.seq, s.dim)
		if s.window > 0 {
			shape += fmt.Sprintf("w%d", s.window)
			share := float64(s.window) / float64(s.seq)
			flops *= share * (2 - share)
			back.Documents = b.Alloc(DocumentsBytes(s.batch, s.seq)/4, gpu.Float32)
			b.Launch(Documents{Table: back.Documents, Batch: s.batch, Seq: s.seq, Window: s.window})
		}
		b.Computes("attn_causal_fwd"+shape, flops, Forward{Geometry: back.Geometry, Y: back.Y,
			Q: back.Q, K: back.K, V: back.V, LSE: back.LSE, Type: back.Type})
		b.Computes("attn_causal_bwd"+shape, 2.5*flops, back)
		b.Free()
	}
}
