package kernels

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// CrossEntropyScale sets the float32 at scale to 1/(number of the targets that are at least 0), which the other functions
// multiply by.
func (k *Kernels) CrossEntropyScale(s gpu.Stream, scale gpu.Ptr, targets Ints, rows int) error {
	if _, err := checkSizes("CrossEntropyScale", rows); err != nil {
		return err
	}
	l := args().Ptr(scale).Ptr(targets.Ptr).Int32(targets.size()).Int64(int64(rows))
	return k.launch(s, "crossentropy", "cross_entropy_scale", line(1, 512), l)
}

// CrossEntropy computes Losses[r] = lse[r] − Logits[r, Targets[r]] for rows of V logits, lse[r] = log Σ exp(Logits[r]); it
// is 0 for a row whose target is below 0. LSE [Rows] may be null. With Scale the logits are replaced by their gradient,
// Scale[0]·Grad[0]·(exp(Logits − lse) − onehot(target)), where a null Grad counts as 1. All but Logits are float32. The rows
// may be some of a batch's: Scale is for the batch.
type CrossEntropy struct {
	Logits, Losses, LSE gpu.Ptr
	Targets             Ints
	Scale, Grad         gpu.Ptr
	Rows, V             int
	Type                gpu.DType
}

// CrossEntropy launches one kernel.
func (k *Kernels) CrossEntropy(s gpu.Stream, a CrossEntropy) error {
	suf, err := suffix("CrossEntropy", a.Type)
	if err != nil {
		return err
	}
	if empty, err := checkInts("CrossEntropy", a.Rows, a.V); empty || err != nil {
		return err
	}
	l := args().Ptr(a.Logits).Ptr(a.Losses).Ptr(a.LSE).Ptr(a.Targets.Ptr).Int32(a.Targets.size())
	c := line(a.Rows, longRowThreads(a.V, a.Type))
	if a.Scale == 0 {
		return k.launch(s, "crossentropy", "cross_entropy_forward"+suf, c, l.Int32(a.V))
	}
	l.Ptr(a.Scale).Ptr(a.Grad).Int32(a.V)
	if row := a.V * a.Type.Size(); packed(a.Type, a.V, a.Logits) && row <= k.info.SharedPerBlock-1024 {
		c.Shared = row // beside what the kernel itself declares
		return k.launch(s, "crossentropy", "cross_entropy_shared"+suf, c, l)
	}
	return k.launch(s, "crossentropy", "cross_entropy"+suf, c, l)
}

// CrossEntropyMean sets the float32 at mean to scale[0]·Σ losses over all rows of the batch.
func (k *Kernels) CrossEntropyMean(s gpu.Stream, mean, losses, scale gpu.Ptr, rows int) error {
	if _, err := checkSizes("CrossEntropyMean", rows); err != nil {
		return err
	}
	l := args().Ptr(mean).Ptr(losses).Ptr(scale).Int64(int64(rows))
	return k.launch(s, "crossentropy", "cross_entropy_mean", line(1, 512), l)
}

// CrossEntropyBackward writes to out the gradient that [Kernels.CrossEntropy] leaves in a.Logits, from a.LSE; out may be
// a.Logits. a.Losses is not used.
func (k *Kernels) CrossEntropyBackward(s gpu.Stream, out gpu.Ptr, a CrossEntropy) error {
	suf, err := suffix("CrossEntropyBackward", a.Type)
	if err != nil {
		return err
	}
	if empty, err := checkInts("CrossEntropyBackward", a.Rows, a.V); empty || err != nil {
		return err
	}
	l := args().Ptr(out).Ptr(a.Logits).Ptr(a.LSE).Ptr(a.Targets.Ptr).Int32(a.Targets.size()).Ptr(a.Scale).Ptr(a.Grad).Int32(a.V)
	return k.launch(s, "crossentropy", "cross_entropy_backward"+suf, line(a.Rows, longRowThreads(a.V, a.Type)), l)
}

// CrossEntropyScale computes Scale = 1/(number of targets).
type CrossEntropyScale struct {
	Scale   gpu.Ptr
	Targets Ints
	Rows    int
}

// CrossEntropyMean computes Mean = Scale·Σ Losses.
type CrossEntropyMean struct {
	Mean, Losses, Scale gpu.Ptr
	Rows                int
}

// CrossEntropyBackward writes the gradient of the logits to Out.
type CrossEntropyBackward struct {
	CrossEntropy
	Out gpu.Ptr
}
