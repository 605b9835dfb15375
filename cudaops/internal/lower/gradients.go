package lower

import (
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// Gradients that are kept in fewer digits than float32: WithGradientPrecision.

// updating returns the gradients of parameters that nobody asks for but an update of their last run's.
func (o Options) updating() map[*gorgonia.Node]bool {
	all := map[*gorgonia.Node]bool{}
	for _, p := range o.Params {
		if d := p.Deriv(); d != nil && !o.Accumulate && !slices.Contains(o.Outputs, d) {
			all[d] = true
		}
	}
	return all
}

// weightGradient is a new array for the gradient of weights, which one product forms: the values of the given nodes. It is of the type
// that the machine has for such gradients if only an update reads them, and float32 otherwise.
func (c *compiler) weightGradient(shape []int, parts ...*gorgonia.Node) *program.Array {
	e := c.o.Gradient
	for _, p := range parts {
		if !c.updating[p] || len(c.users[p]) > 0 {
			e = gpu.Float32
		}
	}
	return c.NewArray(e, shape...)
}
