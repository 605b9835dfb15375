package crossentropy

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times the loss and its gradient.
func Bench(b *bench.B) {
	const rows, v, t = 8192, 50304, gpu.BFloat16
	const size = 2 * rows * v
	scale, losses := b.Alloc(1, gpu.Float32), b.Alloc(rows, gpu.Float32)
	a := Forward{Logits: b.Normal(rows*v, t), Losses: losses, LSE: b.Alloc(rows, gpu.Float32),
		Targets: b.IDs(rows, v), Rows: rows, V: v, Type: t}
	b.Moves("crossentropy_fwd_8192x50304", size,
		Scale{Scale: scale, Targets: a.Targets, Rows: rows},
		a, Mean{Mean: b.Alloc(1, gpu.Float32), Losses: losses, Scale: scale, Rows: rows})
	a.Scale = scale
	b.Moves("crossentropy_bwd_8192x50304", 2*size, Backward{Out: b.Alloc(rows*v, t), Forward: a})
}
