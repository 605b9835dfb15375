package crossentropy

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Scale sets the float32 at Scale to 1/(number of the targets that are at least 0), which the
// others multiply by.
type Scale struct {
	Scale   gpu.Ptr
	Targets gpu.Ptr // of int64
	Rows    int
}

// Launch launches one kernel.
func (p Scale) Launch(q *kernel.Queue) {
	q.Run("crossentropy", "cross_entropy_scale", kernel.Line(1, 512), p.Scale, p.Targets,
		int64(p.Rows))
}

// Forward computes Losses[r] = m[r] + log l[r] − Logits[r, Targets[r]] for rows of V logits, with
// m[r] their maximum and l[r] = Σ exp(Logits[r] − m[r]). It is 0 for a row whose target is below 0.
//
// Normalizers [Rows, 2], m and l of every row, may be null. With Scale the logits are replaced by
// their gradient, Scale[0]·Grad[0]·(exp(Logits − m)/l − onehot(target)), where a null Grad counts as
// 1. All but Logits are float32. The rows may be some of a batch's: Scale is for the batch.
type Forward struct {
	Logits, Losses, Normalizers gpu.Ptr
	Targets                     gpu.Ptr // of int64
	Scale, Grad                 gpu.Ptr
	Rows, V                     int
	Type                        gpu.DType
}

// Launch launches one kernel.
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
		name, c.Shared = "cross_entropy_shared", row // beside what the kernel itself declares
	}

	q.Run("crossentropy", name+kernel.Suffix(a.Type), c, a.Logits, a.Losses, a.Normalizers, a.Targets,
		a.Scale, a.Grad, a.V)
}

// Mean sets the float32 at Mean to Scale[0]·Σ Losses over all rows of the batch.
type Mean struct {
	Mean, Losses, Scale gpu.Ptr
	Rows                int
}

// Launch launches one kernel.
func (p Mean) Launch(q *kernel.Queue) {
	q.Run("crossentropy", "cross_entropy_mean", kernel.Line(1, 512), p.Mean, p.Losses, p.Scale,
		int64(p.Rows))
}

// Backward writes to Out the gradient that [Forward] leaves in Logits, from Normalizers; Out may be
// Logits. Losses are not used.
type Backward struct {
	Forward
	Out gpu.Ptr
}

// Launch launches one kernel.
func (p Backward) Launch(q *kernel.Queue) {
	q.Run("crossentropy", "cross_entropy_backward"+kernel.Suffix(p.Type),
		kernel.Line(p.Rows, kernel.LongRowThreads(p.V, p.Type)), p.Out, p.Logits, p.Normalizers,
		p.Targets,
		p.Scale, p.Grad, p.V)
}
