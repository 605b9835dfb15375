package embedding

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times the rows that ids choose, and the gradient of the table.
func Bench(b *bench.B) {
	const rows, vocab, d, t = 32768, 50304, 768, gpu.BFloat16
	ids := b.IDs(rows, vocab)
	b.Moves("embedding_fwd_32768x50304x768", 2*2*rows*d, Forward{Y: b.Alloc(rows*d, t), IDs: ids,
		Table: b.Normal(vocab*d, t), Rows: rows, Vocab: vocab, D: d, Type: t, TableType: t})
	back := Backward{DT: b.Alloc(vocab*d, gpu.Float32), IDs: ids, G: b.Normal(rows*d, t),
		Rows: rows, Vocab: vocab, D: d, DTType: gpu.Float32, GType: t}
	back.Workspace = b.Alloc(back.WorkspaceBytes(b.Info)/4, gpu.Float32)
	b.Moves("embedding_bwd_32768x50304x768", 2*rows*d+4*vocab*d, back)
}
