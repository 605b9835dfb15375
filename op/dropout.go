// The parts of Dropout:
//   - shapes and gradients: this file
//   - CPU: internal/cpu/layer/scale.go
//   - GPU: cudaops/internal/lower/adapter.go,
//     cudaops/internal/kernel/elementwise
//   - test cases and benchmark: internal/opcase/adapter.go

package op

import (
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/splitmix"
)

// DropoutOp is the op that [Dropout] applies, and its gradient.
type DropoutOp struct {
	opbase.Base
	P    float64
	Salt uint64
}

// Dropout sets each element to 0 with probability p and scales all other elements so that the mean is
// preserved:
//
//	y = x ⊙ mask/(1−p)
//
// x and y are float32 or float64 tensors of the same shape, and p is at least 0 and less than 1. key
// is [1] of type int. The mask is a function of the key, the salt, p and the element's index, so that
// resuming or recomputing a run draws the same masks. Use a different salt for each op in a graph,
// and a different key for each step. (Srivastava et al., "Dropout: A Simple Way to Prevent Neural
// Networks from Overfitting", 2014.)
func Dropout(x, key *gorgonia.Node, p float64, salt uint64) (*gorgonia.Node, error) {
	const name = "Dropout"
	ax, ak := arg{"x", x}, arg{"key", key}
	if err := checkGraph(name, ax, ak); err != nil {
		return nil, err
	}

	if err := checkFloats(name, ax); err != nil {
		return nil, err
	}

	if err := checkInts(name, ak, 1, "a single number"); err != nil {
		return nil, err
	}

	if !(p >= 0 && p < 1) {
		return nil, fmt.Errorf("op.Dropout: p is %v, want at least 0 and less than 1", p)
	}

	return applyDropout(name, x, key, p, salt, nil)
}

// applyDropout adds the op. If the op computes the gradient of another dropout, forward is that
// dropout. Otherwise, forward is nil.
func applyDropout(name string, x, key *gorgonia.Node, p float64, salt uint64,
	forward gorgonia.Op) (*gorgonia.Node, error) {
	o := &DropoutOp{P: p, Salt: salt}
	opbase.Init(&o.Base, o, name, fmt.Sprint("p=", p, " salt=", salt), gorgonia.Nodes{x, key}, x.Dtype(),
		x.Shape(), dropout[float32], dropout[float64])
	if forward != nil {
		o.Differentiates(forward)
	}
	return gorgonia.ApplyOp(o, x, key)
}

func dropout[T cpu.Float](o *DropoutOp, y []T, in opbase.Args) error {
	key := splitmix.Mix(uint64(opbase.Slice[int](in, 1)[0])) ^ splitmix.Mix(o.Salt)
	layer.Dropout(y, opbase.Slice[T](in, 0), o.P, func(i int) bool {
		return float64(splitmix.Mix(key+uint64(i))>>11) >= o.P*(1<<53)
	})
	return nil
}

// DiffWRT reports that the op is differentiable in x.
func (o *DropoutOp) DiffWRT(int) []bool { return []bool{true, false} }

// SymDiff returns the gradient of x, to which the same mask is applied.
func (o *DropoutOp) SymDiff(in gorgonia.Nodes, output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, in, output, grad); err != nil {
		return nil, err
	}
	dx, err := applyDropout("DropoutGrad", grad, in[1], o.P, o.Salt, o)
	return gorgonia.Nodes{dx, nil}, err
}
