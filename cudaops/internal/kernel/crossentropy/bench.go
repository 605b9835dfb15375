package crossentropy

import (
	"errors"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times the loss and its gradient.
func Bench(b *bench.B) {
	const rows, v = 8192, 50304
	const size = 2 * rows * v
	logits, d := b.Normal(rows*v, gpu.BFloat16), b.Alloc(rows*v, gpu.BFloat16)
	losses, lse, scale, mean := b.Alloc(rows, gpu.Float32), b.Alloc(rows, gpu.Float32),
		b.Alloc(1, gpu.Float32), b.Alloc(1, gpu.Float32)
	a := Forward{Logits: logits, Losses: losses, LSE: lse, Targets: b.IDs(rows, v), Rows: rows,
		V: v, Type: gpu.BFloat16}
	b.Time(bench.Measurement{Name: "crossentropy_fwd_8192x50304", Bytes: size}, func() error {
		return errors.Join(Scale{Scale: scale, Targets: a.Targets, Rows: rows}.Launch(b.Set,
			b.Stream), a.Launch(b.Set, b.Stream),
			Mean{Mean: mean, Losses: losses, Scale: scale, Rows: rows}.Launch(b.Set, b.Stream))
	})
	one := b.Floats([]float32{1})
	b.Time(bench.Measurement{Name: "crossentropy_bwd_8192x50304", Bytes: 2 * size}, func() error {
		a := a
		a.Scale, a.Grad = scale, one
		return Backward{Out: d, Forward: a}.Launch(b.Set, b.Stream)
	})
}
