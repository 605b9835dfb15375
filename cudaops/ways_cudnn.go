package cudaops

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
)

// dnnShare is the part of the GPU's memory that the workspace of cuDNN's backward pass may take: it grows with the square
// of the length, where the other ways' grow with the length.
const dnnShare = 64

// attentionVariants are the ways to compute a pass of attention, with cuDNN's where there is a cuDNN that takes it, and, for
// a backward pass, the workspace has room. The rules of thumb never pick it, so that it is not even loaded unless something
// may be timed, or a rule wants it. It knows of no documents.
func (k tunedKernels) attentionVariants(op string, a kernels.AttentionShape, t driver.DType, rows ...kernels.Rows) []kernels.AttentionVariant {
	variants := k.AttentionVariants(a, t, rows...)
	wanted, forced := k.t.wants(op, kernels.AttentionCuDNN.String())
	if !wanted || !slices.Contains(variants, kernels.AttentionMMA) || a.Seq < 2 || a.Documents != 0 || k.DnnVersion() == 0 {
		return variants
	}
	if op == attentionBackwardOp && (a.StatsBytes == 0 || a.StatsBytes < k.dnnStatsBytes(a, t)) {
		return variants
	}
	if forced {
		if err := k.PlanDnnAttention(a, t, rows...); err != nil {
			k.t.m.warn(fmt.Sprintf("%s is not computed by cuDNN: %v", op, err))
			return variants
		}
	}
	return slices.Insert(variants, slices.Index(variants, kernels.AttentionPlain), kernels.AttentionCuDNN)
}

// dnnStatsBytes is the workspace of cuDNN's backward pass.
func (k tunedKernels) dnnStatsBytes(a kernels.AttentionShape, t driver.DType) int {
	a.Variant = kernels.AttentionCuDNN
	return k.AttentionStatsBytes(a, t)
}

// attentionStatsBytes is the workspace of a backward pass. That of cuDNN is large, so it is planned for only if cuDNN is to
// compute the pass, which is found out here. The arrays are in the order of kernelSet's AttentionBackward.
func (m *Machine) attentionStatsBytes(a kernels.AttentionShape, turned bool, t driver.DType, arrays ...*array) (int, error) {
	k, own := m.k.(tunedKernels), m.k.AttentionStatsBytes(a, t)
	rows := make([]kernels.Rows, len(arrays)) // which have no addresses yet, but will be aligned
	for i, x := range arrays {
		rows[i].Stride = cmp.Or(x.stride, x.shape[1])
	}
	if a.Batch*a.Seq == 0 {
		return own, nil
	}
	if a.StatsBytes = k.dnnStatsBytes(a, t); uint64(a.StatsBytes) > m.device.info.Memory/dnnShare {
		return own, nil
	}
	variants := k.attentionVariants(attentionBackwardOp, a, t, rows...)
	if !slices.Contains(variants, kernels.AttentionCuDNN) {
		return own, nil
	}
	way, err := k.t.choose(k.attentionBackwardJob(m.stream, a, turned, variants, t, rows))
	if err != nil || variants[way] != kernels.AttentionCuDNN {
		return own, err
	}
	return max(own, a.StatsBytes), nil
}

// wants reports whether the tuner may choose a way to compute op that no rule of thumb takes, and whether a rule forces it.
func (t *tuner) wants(op, way string) (wanted, forced bool) {
	wanted = t.on()
	for _, r := range t.rules {
		if !matches(r.op, op) || r.way == hostWay {
			continue
		}
		hit := matches(r.way, way)
		switch {
		case !r.forbid:
			wanted, forced = hit, hit
		case hit:
			wanted, forced = false, false
		}
	}
	return wanted, forced
}
