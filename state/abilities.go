package state

import "github.com/kasmina-go/kasmina/blueprints"

// The interfaces in this file are optional abilities of a [Controller]. A trainer that follows a
// controller calls every method of these interfaces that the controller implements. A controller that
// wraps another controller must pass the calls on.

// A CheckingController is a [Controller] that can validate its options. A trainer rejects a
// controller if Check returns an error.
type CheckingController interface {
	Controller
	Check() error
}

// A CostLearner is a [Controller] that needs the cost of growth in depth. The trainer calls Costs
// with a function that returns the time of a step after a growth, relative to a step of the current
// model.
type CostLearner interface {
	Controller
	Costs(of func(kind blueprints.Kind, size int) float64)
}

// A SizeLearner is a [Controller] that needs the sizes of blueprints. The trainer calls Parameters
// with a function that returns the number of parameters of a blueprint for a seed at a weight or in
// the residual stream, or 0 if the blueprint cannot grow there.
type SizeLearner interface {
	Controller
	Parameters(of func(layer, seed int, kind blueprints.Kind, size int) int)
}

// An Affording is a [Controller] that limits the cost of the blueprints it plants. Affords returns an
// error if no blueprint in these lattices fits the limit, and a trainer then rejects the controller.
type Affording interface {
	Controller
	Affords(reports []Report) error
}

// A Planner is a [Controller] that knows the minimum number of epochs from a blueprint's germination
// to its fossilization, given the number of epochs between comparisons of seeds. A trainer rejects
// the controller if the run has fewer epochs.
type Planner interface {
	Controller
	LeastEpochs(l *Lattice, every int) (int, error)
}

// A GradientListener is a [Controller] that chooses its first blueprints according to the gradients of a
// frozen model. Before the first planting, the trainer calls Heard with a function that returns the
// largest singular values of the gradient of a seed's weight.
type GradientListener interface {
	Controller
	Heard(of func(layer, seed int) []float64)
}

// A PlanLearner is a [Controller] that plans growth in depth for a whole run. The trainer calls Plan with
// a function that describes the run as it is now.
type PlanLearner interface {
	Controller
	Plan(of func() RunPlan)
}

// A RunPlan describes a run to a controller.
type RunPlan struct {
	Blocks      int     // number of blocks of the model
	Parameters  float64 // number of parameters of all blocks together
	EpochTokens float64 // tokens that the model sees in an epoch
	// PerToken reports whether the run is limited by its steps or tokens. Otherwise, it is limited by
	// time or FLOPs, of which a larger model needs more for each token.
	PerToken bool
	Growths  []RunGrowth // growths in depth that the model has not rolled back, oldest first
}

// A RunGrowth is a past growth of a model in depth.
type RunGrowth struct {
	Epoch  int // number of epochs that had ended when the model grew
	Blocks int // number of blocks before the growth
}

// A Narrator is a [Controller] that explains its plans. After Decide, the trainer passes the same reports
// to Notes. It adds the returned texts to the record and shows them.
type Narrator interface {
	Controller
	Notes([]Report) []string
}

// A Reviewer is a [Controller] that compares its predictions with the end of the run. After the last step,
// the trainer passes the final reports to Review. It adds the returned texts to the record and shows them.
type Reviewer interface {
	Controller
	Review([]Report) []string
}
