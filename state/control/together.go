package control

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// Together returns a controller that combines several, each for its own sites, such as a [Depth] for
// blocks and a [Heuristic] for all other seeds. They receive the same reports and are consulted in order.
// If two controllers command the same seed, the commands of the later one are normally rejected.
//
// An [Adapters], which is meant for runs with TrainConfig.Frozen, must be used alone, because a combined
// controller does not pass the gradients on to it.
func Together(all ...state.Controller) state.Controller {
	return together(slices.Clone(all))
}

// together implements the optional methods of controllers by calling its elements' methods.
type together []state.Controller

// Check returns the errors of all controllers, or an error if there are none.
func (all together) Check() (err error) {
	if len(all) == 0 {
		return fmt.Errorf("control.Together: %w: there are no controllers, want some such as NewDepth "+
			"and NewHeuristic return", state.ErrArgument)
	}

	for i, c := range all {
		if c == nil {
			err = errors.Join(err, fmt.Errorf("control.Together: %w: controller %d is nil, want "+
				"one such as NewHeuristic returns", state.ErrArgument, i))
		} else if c, ok := c.(state.CheckingController); ok {
			err = errors.Join(err, c.Check())
		}
	}

	return err
}

// Costs passes the function to the controllers that need it.
func (all together) Costs(of func(kind blueprints.Kind, size int) float64) {
	for _, c := range all {
		if c, ok := c.(state.CostLearner); ok {
			c.Costs(of)
		}
	}
}

// Parameters passes the function to the controllers that need it.
func (all together) Parameters(of func(layer, seed int, kind blueprints.Kind, size int) int) {
	for _, c := range all {
		if c, ok := c.(state.SizeLearner); ok {
			c.Parameters(of)
		}
	}
}

// Plan passes the function to the controllers that need it.
func (all together) Plan(of func() state.RunPlan) {
	for _, c := range all {
		if c, ok := c.(state.PlanLearner); ok {
			c.Plan(of)
		}
	}
}

// Notes returns the notes of all controllers.
func (all together) Notes(reports []state.Report) (notes []string) {
	for _, c := range all {
		if c, ok := c.(state.Narrator); ok {
			notes = append(notes, c.Notes(reports)...)
		}
	}
	return notes
}

// Review returns the reviews of all controllers.
func (all together) Review(reports []state.Report) (notes []string) {
	for _, c := range all {
		if c, ok := c.(state.Reviewer); ok {
			notes = append(notes, c.Review(reports)...)
		}
	}
	return notes
}

// Affords returns the errors of controllers that could never plant.
func (all together) Affords(reports []state.Report) (err error) {
	for _, c := range all {
		if c, ok := c.(state.Affording); ok {
			err = errors.Join(err, c.Affords(reports))
		}
	}
	return err
}

// LeastEpochs returns the maximum over the controllers. Each controller knows its own sites.
func (all together) LeastEpochs(l *state.Lattice, every int) (most int, err error) {
	for _, c := range all {
		if c, ok := c.(state.Planner); ok {
			n, e := c.LeastEpochs(l, every)
			most, err = max(most, n), errors.Join(err, e)
		}
	}
	return most, err
}

// Heard passes the singular values of a frozen model's gradients on.
func (all together) Heard(of func(layer, seed int) []float64) {
	for _, c := range all {
		if c, ok := c.(state.GradientListener); ok {
			c.Heard(of)
		}
	}
}

// Decide returns the commands of all controllers.
func (all together) Decide(reports []state.Report) (commands []state.Command) {
	for _, c := range all {
		if c != nil {
			commands = append(commands, c.Decide(reports)...)
		}
	}
	return commands
}
