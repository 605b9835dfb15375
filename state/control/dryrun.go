package control

import (
	"fmt"
	"io"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// DryRun returns a controller that writes what c would do to w, a line for each command, and does
// nothing. As nothing comes of what c decides, c decides the same for as long as it sees the same.
// Without a controller it writes nothing. w may be nil.
func DryRun(c state.Controller, w io.Writer) state.Controller {
	if w == nil {
		w = io.Discard
	}
	return dryRun{c, w}
}

type dryRun struct {
	state.Controller
	w io.Writer
}

// Check is what a trainer's Grow asks before a run: it is the controller's own.
func (d dryRun) Check() error {
	if d.Controller == nil {
		return fmt.Errorf("control.DryRun: %w: the controller is nil, want one such as "+
			"NewHeuristic returns", state.ErrArgument)
	}
	if c, ok := d.Controller.(interface{ Check() error }); ok {
		return c.Check()
	}
	return nil
}

// Costs hands on what the controller is told of the cost of steps.
func (d dryRun) Costs(of func(kind blueprints.Kind, size int) float64) {
	if c, ok := d.Controller.(interface {
		Costs(func(blueprints.Kind, int) float64)
	}); ok {
		c.Costs(of)
	}
}

func (d dryRun) Decide(reports []state.Report) []state.Command {
	if d.Controller == nil {
		return nil
	}
	for _, c := range d.Controller.Decide(reports) {
		fmt.Fprintf(d.w, "would do: %v\n", c)
	}
	return nil
}
