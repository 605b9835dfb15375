package embedding

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times the rows that ids choose, and the gradient of the table.
func Bench(b *bench.B) {
	const rows, vocab, d = 32768, 50304, 768
	table, g, ids := b.Normal(vocab*d, gpu.BFloat16), b.Normal(rows*d, gpu.BFloat16),
		b.IDs(rows, vocab)
	y, dt, workspace := b.Alloc(rows*d, gpu.BFloat16), b.Alloc(vocab*d, gpu.Float32),
		b.Alloc(Backward{Rows: rows, Vocab: vocab, D: d}.WorkspaceBytes(b.Info)/4, gpu.Float32)
	b.Time(bench.Measurement{Name: "embedding_fwd_32768x50304x768", Bytes: 2 * 2 * rows * d},
		func() error {
			return Forward{Y: y, IDs: ids, Table: table, Rows: rows, Vocab: vocab,
				D: d, Type: gpu.BFloat16,
				TableType: gpu.BFloat16}.Launch(b.Set, b.Stream)
		})
	b.Time(bench.Measurement{Name: "embedding_bwd_32768x50304x768", Bytes: 2*rows*d + 4*vocab*d},
		func() error {
			return Backward{DT: dt, IDs: ids, G: g, Rows: rows, Vocab: vocab, D: d,
				DTType: gpu.Float32, GType: gpu.BFloat16, Workspace: workspace}.Launch(b.Set,
				b.Stream)
		})
}
