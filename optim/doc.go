// Package optim provides optimizers and learning rate schedules for Gorgonia graphs.
//
// The optimizers are gorgonia.Solvers. Run a tape machine created with gorgonia.BindDualValues for
// the parameters, then call Step with the result of gorgonia.NodesToValueGrads for the same
// parameters. Step updates the parameters in place and resets their gradients to zero, ready for the
// next run.
//
// An optimizer looks up its state for a parameter by the name of the parameter's node, so a rebuilt
// graph continues where the last one stopped. [Optimizer.State] and SetState save and restore the
// state bit for bit.
//
// A step is all or nothing, because names, types, shapes and every gradient are checked before the
// first parameter changes. If an update nevertheless makes a parameter NaN or infinite, the error is
// [ErrOverflow]. A step uses all cores, but optimizers are not safe for concurrent use.
//
// A [Rule] describes the update of a parameter, and its [Kernel] the state that the update needs. The
// update on a GPU, the division among ranks, checkpoints and the memory plan follow from these two. A
// new optimizer therefore consists of a constructor, a rule and a kernel, as in the file lion.go,
// together with the kernel's arithmetic on CPUs and GPUs and an entry in the list of choices that
// programs offer. Kernels can only be defined in this package, and their moments must stay finite for
// any finite gradient.
package optim

import (
	"gorgonia.org/gorgonia"
)

// Optimizer is implemented by all optimizers of this package.
type Optimizer interface {
	gorgonia.Solver

	// Declare announces the parameters of later steps, so that SetState can check a state against
	// them. Step declares new parameters by itself.
	Declare(model []gorgonia.ValueGrad) error

	// LR returns the learning rate of the next step, and SetLR sets it to a finite, non-negative
	// value.
	LR() float64
	SetLR(lr float64) error

	// State returns a copy of the optimizer's state, sorted by name.
	State() []Tensor

	// SetState replaces the optimizer's state with a copy of state.
	//
	// The new state must be complete for each of its parameters, and fit the parameters declared so
	// far, if there are any. It must also be reachable by steps, so moments must be finite, means of
	// squares non-negative, step counts between 1 and 2⁵³, and Muon's momentum no larger than finite
	// gradients allow. After an error, nothing has changed.
	SetState(state []Tensor) error

	// Forget clears the moments of a parameter's elements from ≤ i < to, in row-major order. The step
	// count is unaffected. Momentum then no longer changes elements that were frozen or replaced. If
	// the parameter has not been updated yet, Forget does nothing.
	Forget(name string, from, to int) error
}

// Tensor is a part of an optimizer's state. Its name consists of the parameter's name, a dot, and the
// name of a moment or "step". Data holds the elements in row-major order, as a []float32, []float64,
// []uint8 or []int64.
type Tensor struct {
	Name  string
	Shape []int
	Data  any
}
