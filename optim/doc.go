// Package optim holds optimizers and learning rate schedules for Gorgonia graphs.
//
// The optimizers are gorgonia.Solvers: run a tape machine made with gorgonia.BindDualValues for the
// parameters, then call Step with gorgonia.NodesToValueGrads of them. Step changes the parameters'
// values in place and leaves their gradients zero, ready for the next run. An optimizer keeps what
// it knows of a parameter under its node's name, so a rebuilt graph continues where the last one
// stopped. [Optimizer.State] and SetState carry it through a checkpoint bit for bit.
//
// A step is all or nothing: names, types, shapes and every gradient are checked before the first
// parameter changes. If an update nevertheless makes a parameter NaN or infinite, the error is
// [ErrOverflow]. Optimizers are not safe for use by several goroutines at once; one step runs on
// all cores.
//
// A [Rule] says how an optimizer updates a parameter, and its [Kernel] what it remembers of it. All
// else that depends on the optimizer, such as the update on a GPU, the division among ranks and the
// checkpoint, follows from these two. A new optimizer therefore needs a constructor, a kernel and a
// rule; see the file adamw.go.
package optim

import (
	"gorgonia.org/gorgonia"
)

// Optimizer is implemented by all optimizers of this package.
type Optimizer interface {
	gorgonia.Solver

	// Declare says which parameters Step will get, so that SetState can check a state against them.
	// Step declares what is not declared yet.
	Declare(model []gorgonia.ValueGrad) error

	// LR returns the learning rate of the next step, and SetLR sets it: finite and not negative.
	LR() float64
	SetLR(lr float64) error

	// State returns everything that Step remembers from one call to the next, in order of names.
	// The tensors are copies.
	State() []Tensor

	// SetState replaces what Step remembers by a copy of state. That must be complete for each
	// parameter in it and fit the parameters declared so far, if any. It must also be one that
	// steps can lead to. Moments are finite, means of squares not negative, counts of steps 1 to
	// 2⁵³. Means are no larger than those of squares allow or, of Muon's matrices, finite
	// gradients. On an error nothing changes.
	SetState(state []Tensor) error

	// Forget makes zero what Step remembers of a parameter's elements from ≤ i < to, in row-major
	// order, beside the count of its steps. So no momentum moves elements that are frozen or have
	// been replaced. Of a parameter without a step there is nothing to forget.
	Forget(name string, from, to int) error
}

// Tensor is a part of an optimiser's state. Its name is the parameter's, followed by what it is
// (".exp_avg", ".step"). Data are its elements in row-major order, a []float32, []float64,
// []uint8 or []int64.
type Tensor struct {
	Name  string
	Shape []int
	Data  any
}
