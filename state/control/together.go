package control

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// Together returns a controller that does what several do, each at its own sites. They may be a
// [Depth] for blocks and a [Heuristic] for the other seeds. They are asked in order, and see the
// same reports. Of two that decide on one seed the second one's commands are refused, as a rule.
// For Config.Frozen an [Adapters] decides by itself, which wants to hear of gradients.
func Together(all ...state.Controller) state.Controller {
	return together(slices.Clone(all))
}

type together []state.Controller

// Check is what a trainer's Grow asks before a run.
func (all together) Check() (err error) {
	if len(all) == 0 {
		return fmt.Errorf("control.Together: %w: it has no controllers, want some such as NewDepth "+
			"and NewHeuristic return", state.ErrArgument)
	}
	for i, c := range all {
		if c == nil {
			err = errors.Join(err, fmt.Errorf("control.Together: %w: controller %d is nil, want "+
				"one such as NewHeuristic returns", state.ErrArgument, i))
		} else if c, ok := c.(interface{ Check() error }); ok {
			err = errors.Join(err, c.Check())
		}
	}
	return err
}

// Costs hands on what controllers are told of the cost of steps.
func (all together) Costs(of func(kind blueprints.Kind, size int) float64) {
	for _, c := range all {
		if c, ok := c.(interface {
			Costs(func(blueprints.Kind, int) float64)
		}); ok {
			c.Costs(of)
		}
	}
}

// Parameters hands on what controllers are told of the size of blueprints.
func (all together) Parameters(of func(layer, seed int, kind blueprints.Kind, size int) int) {
	for _, c := range all {
		if c, ok := c.(interface {
			Parameters(func(layer, seed int, kind blueprints.Kind, size int) int)
		}); ok {
			c.Parameters(of)
		}
	}
}

// Affords returns the errors of controllers that could never plant.
func (all together) Affords(reports []state.Report) (err error) {
	for _, c := range all {
		if c, ok := c.(interface {
			Affords([]state.Report) error
		}); ok {
			err = errors.Join(err, c.Affords(reports))
		}
	}
	return err
}

// LeastEpochs is the largest of theirs: each knows that of its own sites.
func (all together) LeastEpochs(l *state.Lattice, every int) (most int, err error) {
	for _, c := range all {
		if c, ok := c.(interface {
			LeastEpochs(*state.Lattice, int) (int, error)
		}); ok {
			n, e := c.LeastEpochs(l, every)
			most, err = max(most, n), errors.Join(err, e)
		}
	}
	return most, err
}

// Decide returns the commands of all.
func (all together) Decide(reports []state.Report) (commands []state.Command) {
	for _, c := range all {
		if c != nil {
			commands = append(commands, c.Decide(reports)...)
		}
	}
	return commands
}
