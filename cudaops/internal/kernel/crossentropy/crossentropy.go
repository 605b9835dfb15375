// Package crossentropy has the kernels of the cross-entropy loss. A [Forward] computes the losses
// of rows of logits, and optionally replaces the logits by their gradient; [Scale] and [Mean]
// average over a batch.
package crossentropy

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Scale sets the float32 at Scale to the inverse of the number of targets that are not negative.
// The other launches multiply by it.
type Scale struct {
	Scale   gpu.Ptr
	Targets gpu.Ptr // int64
	Rows    int
}

// Launch enqueues one kernel.
func (p Scale) Launch(q *kernel.Queue) {
	q.Run("crossentropy", "cross_entropy_scale", kernel.Line(1, 512), p.Scale, p.Targets,
		int64(p.Rows))
}

// Forward computes Losses[r] = m[r] + log l[r] − Logits[r, Targets[r]] for rows of V logits, where
// m[r] is the maximum of the row and l[r] = Σ exp(Logits[r] − m[r]). The loss is 0 if the target is
// negative.
//
// Normalizers [Rows, 2], m and l of every row, may be null. If Scale is not null, the logits are
// replaced by their gradient, Scale[0]·Grad[0]·(exp(Logits − m)/l − onehot(target)), where a null
// Grad counts as 1. All arrays but Logits and Targets are float32. The rows may be part of a batch;
// Scale applies to the whole batch.
type Forward struct {
	Logits, Losses, Normalizers gpu.Ptr
	Targets                     gpu.Ptr // int64
	Scale, Grad                 gpu.Ptr
	Rows, V                     int
	Type                        gpu.DType
}

// Launch enqueues one kernel.
func (a Forward) Launch(q *kernel.Queue) {
	c := kernel.Line(a.Rows, kernel.LongRowThreads(a.V, a.Type))
	if a.Scale == 0 {
		q.Run("crossentropy", "cross_entropy_forward"+kernel.Suffix(a.Type), c, a.Logits, a.Losses,
			a.Normalizers, a.Targets, a.V)
		return
	}

	name := "cross_entropy"
	if row := a.V * a.Type.Size(); kernel.Packed(a.Type, a.V, a.Logits) &&
		row <= q.Info.SharedPerBlock-1024 {
		name, c.Shared = "cross_entropy_shared", row // some is left for the kernel's static shared memory
	}

	q.Run("crossentropy", name+kernel.Suffix(a.Type), c, a.Logits, a.Losses, a.Normalizers, a.Targets,
		a.Scale, a.Grad, a.V)
}

// Mean sets the float32 at Mean to Scale[0]·Σ Losses over all rows of the batch.
type Mean struct {
	Mean, Losses, Scale gpu.Ptr
	Rows                int
}

// Launch enqueues one kernel.
func (p Mean) Launch(q *kernel.Queue) {
	q.Run("crossentropy", "cross_entropy_mean", kernel.Line(1, 512), p.Mean, p.Losses, p.Scale,
		int64(p.Rows))
}

// Backward writes to Out the gradient that [Forward] would store in Logits, computed from
// Normalizers. Out may be Logits. Losses is not used.
type Backward struct {
	Forward
	Out gpu.Ptr
}

// Launch enqueues one kernel.
func (p Backward) Launch(q *kernel.Queue) {
	q.Run("crossentropy", "cross_entropy_backward"+kernel.Suffix(p.Type),
		kernel.Line(p.Rows, kernel.LongRowThreads(p.V, p.Type)), p.Out, p.Logits, p.Normalizers,
		p.Targets,
		p.Scale, p.Grad, p.V)
}
