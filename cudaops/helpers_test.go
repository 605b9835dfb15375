package cudaops

import (
	"math"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
)

// withKernels has a machine's kernels be what wrap makes of them.
func withKernels(wrap func(kernels.Launcher) kernels.Launcher) MachineOption {
	return func(c *machineConfig) error {
		inner := c.kernels
		c.kernels = func(ctx gpu.Context) (kernels.Launcher, error) {
			k, err := inner(ctx)
			if err != nil {
				return nil, err
			}
			return wrap(k), nil
		}
		return nil
	}
}

// fakeOf is the fake behind a machine's kernels.
func fakeOf(k kernels.Launcher) *fakeKernels { return k.(*moduleOf).fakeKernels }

// isOp reports whether a node's op is of a type.
func isOp[T any](n *gorgonia.Node) bool {
	_, ok := n.Op().(T)
	return ok
}

// apartBy is ‖x − y‖/‖y‖.
func apartBy(x, y []float32) float64 {
	var diff, norm float64
	for i := range x {
		d := float64(x[i]) - float64(y[i])
		diff += d * d
		norm += float64(y[i]) * float64(y[i])
	}
	if diff == 0 {
		return 0
	}
	return math.Sqrt(diff / norm)
}
