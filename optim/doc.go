// Package optim holds optimizers and learning rate schedules for Gorgonia graphs.
//
// The optimizers are gorgonia.Solvers: run a tape machine made with gorgonia.BindDualValues for the
// parameters, then call Step with the result of gorgonia.NodesToValueGrads for the same parameters. Step
// changes the parameters' values in place and sets their gradients to zero, ready for the next run.
//
// An optimizer finds its state of a parameter by the name of the parameter's node, so a rebuilt graph
// continues where the last one stopped. [Optimizer.State] and SetState carry the state through a
// checkpoint bit for bit.
//
// A step is all or nothing: names, types, shapes and every gradient are checked before the first
// parameter changes. If an update nevertheless makes a parameter NaN or infinite, the error is
// [ErrOverflow]. A step uses all cores. Optimizers are not safe for concurrent use.
//
// A [Rule] describes the update of a parameter, and its [Kernel] the state that the update needs. The
// update on a GPU, the division among ranks, checkpoints and the memory plan follow from these two. A
// new optimizer therefore consists of a constructor, a rule and a kernel, as in the file lion.go, of
// the kernel's arithmetic on CPUs and GPUs, and of a line in the list of choices that programs offer.
// Kernels can be defined in this package only. Their moments must stay finite for any finite gradient.
package optim

import (
	"gorgonia.org/gorgonia"
)

// Optimizer is implemented by all optimizers of this package.
type Optimizer interface {
	gorgonia.Solver

	// Declare announces the parameters of later steps, so that SetState can check a state against
	// them. Step declares parameters that are new.
	Declare(model []gorgonia.ValueGrad) error

	// LR returns the learning rate of the next step, and SetLR sets it: finite and not negative.
	LR() float64
	SetLR(lr float64) error

	// State returns a copy of the optimizer's state, in order of names.
	State() []Tensor

	// SetState replaces the optimizer's state by a copy of state.
	//
	// The new state must be complete for each of its parameters, and fit the parameters declared so
	// far, if there are any. Steps must be able to lead to it: moments are finite, means of squares
	// are not negative, and step counts are 1 to 2⁵³. Muon's momentum is no larger than finite
	// gradients allow. On an error nothing changes.
	SetState(state []Tensor) error

	// Forget clears the moments of a parameter's elements from ≤ i < to, in row-major order. The
	// step count stays. No momentum then moves elements that have been frozen or replaced. If the
	// parameter has not had a step yet, Forget does nothing.
	Forget(name string, from, to int) error
}

// Tensor is a part of an optimizer's state. Its name is the parameter's name, a dot, and the name
// of a moment or "step". Data has the elements in row-major order, as a []float32, []float64,
// []uint8 or []int64.
type Tensor struct {
	Name  string
	Shape []int
	Data  any
}
