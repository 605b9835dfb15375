package control

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/state"
)

// Governor stands above every controller. It sees what the blueprints on trial cause, and takes
// back at once what does harm, whoever has planted it. The seeds' embargo keeps their places empty
// for a while then.
type Governor struct {
	// Harm is by how much the loss may be higher than that of the model without the blueprints, in
	// nats a token. Sure is of which share of the text's batches that must be so.
	Harm, Sure float64
	// Norm is how many times as large as without them the gradients may be, by their global norm.
	Norm float64
}

// NewGovernor returns a governor with Harm 0.05, Sure 0.8 and Norm 10.
func NewGovernor() *Governor { return &Governor{Harm: 0.05, Sure: 0.8, Norm: 10} }

// Check returns an error that names a field which makes no sense.
func (g *Governor) Check() error {
	var errs []error
	for _, f := range []struct {
		name        string
		value, most float64
	}{{"Harm", g.Harm, math.MaxFloat64}, {"Sure", g.Sure, 1}, {"Norm", g.Norm, math.MaxFloat64}} {
		if !(f.value > 0 && f.value <= f.most) {
			errs = append(errs, fmt.Errorf("control.Governor: %w: %s is %v, want a finite number "+
				"above 0, and Sure at most 1", state.ErrArgument, f.name, f.value))
		}
	}
	return errors.Join(errs...)
}

// Trial is what blueprints cause that have been grafted and are not yet fossilized. It is the model
// beside one that has made the same steps without them.
type Trial struct {
	Seeds []state.Address
	// by how much the loss is higher with them, and of which share of the text's batches that is so
	Harm, Agree float64
	// batches of the text on which the model's loss is not finite
	Errors int
	// global norms of the gradients, with the blueprints and without, as means over the same steps;
	// 0 where they are not known
	Norm, Without float64
}

// wrong says what has gone wrong, or nothing.
func (g *Governor) wrong(t Trial) string {
	switch {
	case t.Errors > 0:
		return fmt.Sprintf("the model's loss is not finite on %d batches of the text", t.Errors)
	case t.Harm > g.Harm && t.Agree >= g.Sure:
		return fmt.Sprintf("the loss is %.4g higher than without it, which %.0f %% of the batches "+
			"show", t.Harm, 100*t.Agree)
	case t.Without > 0 && !(t.Norm <= g.Norm*t.Without):
		return fmt.Sprintf("the gradients' norm is %.4g, and %.4g without it", t.Norm, t.Without)
	}
	return ""
}

// Govern returns what shall be done in the place of a controller's commands. It is these, and if
// the trial has gone wrong first of all the rollback of its blueprints.
func (g *Governor) Govern(t Trial, commands []state.Command) []state.Command {
	why := g.wrong(t)
	if why == "" {
		return commands
	}
	var all []state.Command
	for _, s := range t.Seeds {
		all = append(all, state.Command{Action: state.Move, Layer: s.Layer, Seed: s.Seed,
			To: state.RolledBack, Why: why})
	}
	for _, c := range commands {
		if !slices.Contains(t.Seeds, state.Address{Layer: c.Layer, Seed: c.Seed}) {
			all = append(all, c)
		}
	}
	return all
}
