package crossentropy

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Launch sets the float32 at scale to 1/(number of the targets that are at least 0), which the
// other functions multiply by.
func (p Scale) Launch(k *kernel.Set, s gpu.Stream) error {
	if _, err := kernel.CheckSizes("CrossEntropyScale", p.Rows); err != nil {
		return err
	}
	l := kernel.Args().Ptr(p.Scale).Ptr(p.Targets.Ptr).Int32(p.Targets.Size()).Int64(int64(p.Rows))
	return k.Enqueue(s, "crossentropy", "cross_entropy_scale", kernel.Line(1, 512), l)
}

// Forward computes Losses[r] = lse[r] − Logits[r, Targets[r]] for rows of V logits, lse[r] = log Σ
// exp(Logits[r]). It is 0 for a row whose target is below 0. LSE [Rows] may be null. With Scale the
// logits are replaced by their gradient, Scale[0]·Grad[0]·(exp(Logits − lse) − onehot(target)),
// where a null Grad counts as 1. All but Logits are float32. The rows may be some of a batch's:
// Scale is for the batch.
type Forward struct {
	Logits, Losses, LSE gpu.Ptr
	Targets             kernel.Ints
	Scale, Grad         gpu.Ptr
	Rows, V             int
	Type                gpu.DType
}

// Launch launches one kernel.
func (a Forward) Launch(k *kernel.Set, s gpu.Stream) error {
	suf, err := kernel.Suffix("CrossEntropy", a.Type)
	if err != nil {
		return err
	}
	if empty, err := kernel.CheckInts("CrossEntropy", a.Rows, a.V); empty || err != nil {
		return err
	}
	l := kernel.Args().Ptr(a.Logits).Ptr(a.Losses).Ptr(a.LSE).Ptr(
		a.Targets.Ptr).Int32(a.Targets.Size())
	c := kernel.Line(a.Rows, kernel.LongRowThreads(a.V, a.Type))
	if a.Scale == 0 {
		return k.Enqueue(s, "crossentropy", "cross_entropy_forward"+suf, c, l.Int32(a.V))
	}
	l.Ptr(a.Scale).Ptr(a.Grad).Int32(a.V)
	if row := a.V * a.Type.Size(); kernel.Packed(a.Type, a.V, a.Logits) &&
		row <= k.Info.SharedPerBlock-1024 {
		c.Shared = row // beside what the kernel itself declares
		return k.Enqueue(s, "crossentropy", "cross_entropy_shared"+suf, c, l)
	}
	return k.Enqueue(s, "crossentropy", "cross_entropy"+suf, c, l)
}

// Launch sets the float32 at mean to scale[0]·Σ losses over all rows of the batch.
func (p Mean) Launch(k *kernel.Set, s gpu.Stream) error {
	if _, err := kernel.CheckSizes("CrossEntropyMean", p.Rows); err != nil {
		return err
	}
	l := kernel.Args().Ptr(p.Mean).Ptr(p.Losses).Ptr(p.Scale).Int64(int64(p.Rows))
	return k.Enqueue(s, "crossentropy", "cross_entropy_mean", kernel.Line(1, 512), l)
}

// Launch writes to out the gradient that [CrossEntropy] leaves in a.Logits, from a.LSE; out may be
// a.Logits. a.Losses is not used.
func (p Backward) Launch(k *kernel.Set, s gpu.Stream) error {
	suf, err := kernel.Suffix("CrossEntropyBackward", p.Forward.Type)
	if err != nil {
		return err
	}
	if empty, err := kernel.CheckInts("CrossEntropyBackward", p.Forward.Rows, p.Forward.V); empty ||
		err != nil {
		return err
	}
	l := kernel.Args().Ptr(p.Out).Ptr(p.Forward.Logits).Ptr(p.Forward.LSE).Ptr(
		p.Forward.Targets.Ptr).Int32(p.Forward.Targets.Size()).Ptr(p.Forward.Scale).Ptr(
		p.Forward.Grad).Int32(p.Forward.V)
	return k.Enqueue(s, "crossentropy", "cross_entropy_backward"+suf,
		kernel.Line(p.Forward.Rows, kernel.LongRowThreads(p.Forward.V, p.Forward.Type)), l)
}

// Scale computes Scale = 1/(number of targets).
type Scale struct {
	Scale   gpu.Ptr
	Targets kernel.Ints
	Rows    int
}

// Mean computes Mean = Scale·Σ Losses.
type Mean struct {
	Mean, Losses, Scale gpu.Ptr
	Rows                int
}

// Backward writes the gradient of the logits to Out.
type Backward struct {
	Forward
	Out gpu.Ptr
}
