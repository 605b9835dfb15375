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
		{16, 16, 2048, 128, 0},
		{4, 16, 8192, 128, 0}, {4, 16, 8192, 128, 1024}} {
		width := s.heads * s.dim
		n := s.batch * s.seq * width
		shape := Geometry{Batch: s.batch, Seq: s.seq, Heads: s.heads, KVHeads: s.heads,
			HeadDim: s.dim, Causal: true}
		rows := func(p gpu.Ptr) kernel.Rows { return kernel.Rows{Ptr: p, Stride: width} }
		var in, out [4]kernel.Rows
		for i := range in {
			in[i], out[i] = rows(b.Normal(n, gpu.BFloat16)), rows(b.Alloc(n, gpu.BFloat16))
		}
		q, k, v, g := in[0], in[1], in[2], in[3]
		y, dq, dk, dv := out[0], out[1], out[2], out[3]
		lse, stats := b.Alloc(s.batch*s.heads*s.seq, gpu.Float32),
			b.Alloc(StatsBytes(b.Set, shape, gpu.BFloat16)/4, gpu.Float32)
		flops := 2 * float64(n) * float64(s.seq)
		name := func(pass string) string {
			name := fmt.Sprintf("attn_causal_%s_b%dh%ds%dd%d", pass, s.batch, s.heads, s.seq, s.dim)
			if s.window > 0 {
				name += fmt.Sprintf("w%d", s.window)
			}
			return name
		}
		if s.window > 0 {
			share := float64(s.window) / float64(s.seq)
			flops *= share * (2 - share)
			shape.Documents = b.Alloc(DocumentsBytes(s.batch, s.seq)/4, gpu.Float32)
			if b.Err == nil {
				b.Do(Documents{Table: shape.Documents, Batch: s.batch, Seq: s.seq,
					Window: s.window}.Launch(b.Set, b.Stream))
			}
		}
		b.Time(bench.Measurement{Name: name("fwd"), FLOPs: flops}, func() error {
			return Attend(b.Set, b.Stream, shape, y, lse, q, k, v, gpu.BFloat16)
		})
		b.Time(bench.Measurement{Name: name("bwd"), FLOPs: 2.5 * flops}, func() error {
			return AttendBackward(b.Set, b.Stream, shape, dq, dk, dv, stats, g, q, k,
				v, y, lse, gpu.BFloat16)
		})
		b.Free()
	}
}
