package cudaops

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Gradients that are kept in fewer digits than float32: WithGradientPrecision.

// narrowGradients has gradients stored as the options ask for, whose order does not matter.
func (c *machineConfig) narrowGradients() error {
	if c.grads == Float32 {
		return nil
	}
	if c.act != bfloat16s {
		return fmt.Errorf("WithGradientPrecision(%v) goes with the precisions BFloat16 and Float8, and WithPrecision has %v: leave out one of them",
			c.grads, map[elem]Precision{float32s: Float32, float16s: Float16}[c.act])
	}
	c.narrow = bfloat16s
	return nil
}

// updating returns the gradients of parameters that nobody asks for but an update of their last run's.
func (m *Machine) updating() map[*gorgonia.Node]bool {
	all := map[*gorgonia.Node]bool{}
	for _, p := range m.config.params {
		if d := p.Deriv(); d != nil && !m.config.gather && !slices.Contains(m.config.outputs, d) {
			all[d] = true
		}
	}
	return all
}

// GradientPrecision returns BFloat16 if the machine keeps the gradient of any parameter like that (see [WithGradientPrecision]), else Float32.
func (m *Machine) GradientPrecision() Precision {
	for _, p := range m.config.params {
		if g := m.program.values[p.Deriv()]; g != nil && g.elem == bfloat16s {
			return BFloat16
		}
	}
	return Float32
}

// weightGradient is a new array for the gradient of weights, which one product forms: the values of the given nodes. It is of the type
// that the machine has for such gradients if only an update reads them, and float32 otherwise.
func (c *compiler) weightGradient(shape tensor.Shape, parts ...*gorgonia.Node) *array {
	e := c.m.config.narrow
	for _, p := range parts {
		if !c.updating[p] || len(c.users[p]) > 0 {
			e = float32s
		}
	}
	return c.newArray(e, shape...)
}
