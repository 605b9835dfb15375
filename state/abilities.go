package state

import "github.com/kasmina-go/kasmina/blueprints"

// The interfaces in this file are optional abilities of a [Controller]. A trainer asks a controller for
// each of them when it is told to follow the controller, and uses those that the controller has. A
// controller that wraps others hands them on.

// A CheckingController is a [Controller] that can tell whether its options make sense. A trainer
// refuses a controller whose Check returns an error.
type CheckingController interface {
	Controller
	Check() error
}

// A CostLearner is a [Controller] that wants to know what growth in depth costs. The trainer calls
// Costs with a function that returns the time of a step after a growth, in steps of the model as it
// is.
type CostLearner interface {
	Controller
	Costs(of func(kind blueprints.Kind, size int) float64)
}

// A SizeLearner is a [Controller] that wants to know how many parameters blueprints have. The trainer
// calls Parameters with a function that returns the number for a seed at a weight or in the residual
// stream, and 0 where the blueprint is not possible.
type SizeLearner interface {
	Controller
	Parameters(of func(layer, seed int, kind blueprints.Kind, size int) int)
}

// An Affording is a [Controller] with a limit on what it plants. A trainer refuses it if Affords
// returns an error, which says that no blueprint in these lattices fits the limit.
type Affording interface {
	Controller
	Affords(reports []Report) error
}

// A Planner is a [Controller] that knows how many epochs a blueprint in a lattice needs at least until
// it can be fossilized, if seeds are compared once in so many epochs. A trainer refuses it when the
// run has fewer.
type Planner interface {
	Controller
	LeastEpochs(l *Lattice, every int) (int, error)
}

// A GradientListener is a [Controller] that wants to know what the gradients of a frozen model ask for
// before it plants for the first time. The trainer calls Heard with a function that returns the
// largest singular values of the gradient of the weight on which a seed sits.
type GradientListener interface {
	Controller
	Heard(of func(layer, seed int) []float64)
}
