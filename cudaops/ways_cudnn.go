package cudaops

import (
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
)

// forwardVariants are the ways to compute attention, with cuDNN's where there is a cuDNN that takes it. The rules of thumb
// never pick that, so that it is not even loaded unless something may be timed, or a rule wants it. It knows of no documents.
func (k tunedKernels) forwardVariants(a kernels.AttentionShape, t driver.DType, y, q, key, value kernels.Rows) []kernels.AttentionVariant {
	variants := slices.DeleteFunc(k.AttentionVariants(a, t, y, q, key, value), func(v kernels.AttentionVariant) bool {
		return v == kernels.AttentionHopperFused // whose forward pass is AttentionHopper's
	})
	wanted, forced := k.t.wants(attentionOp, kernels.AttentionCuDNN.String())
	if !wanted || !forced && k.t.crowded() || !slices.Contains(variants, kernels.AttentionMMA) || a.Seq < 2 || a.Documents != 0 || k.DnnVersion() == 0 {
		return variants
	}
	if forced {
		if err := k.PlanDnnAttention(a, t, y, q, key, value); err != nil {
			k.t.m.warn(fmt.Sprintf("%s is not computed by cuDNN: %v", attentionOp, err))
			return variants
		}
	}
	return slices.Insert(variants, slices.Index(variants, kernels.AttentionPlain), kernels.AttentionCuDNN)
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
