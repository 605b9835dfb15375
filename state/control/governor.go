package control

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/state"
)

// Governor supervises every controller. It compares the model with its twin, which lacks the
// blueprints on trial, and rolls the blueprints back at once if they do harm, no matter which
// controller planted them. The embargo then keeps their seeds empty for a while.
type Governor struct {
	// Harm is the largest tolerated increase in loss over the model without the blueprints, in nats
	// per token. Sure is the share of the text's batches that must show an increase for it to count.
	Harm, Sure float64
	// Norm is the largest tolerated ratio of the global gradient norms with and without the
	// blueprints.
	Norm float64
}

// NewGovernor returns a governor with Harm 0.05, Sure 0.8 and Norm 10.
func NewGovernor() *Governor { return &Governor{Harm: 0.05, Sure: 0.8, Norm: 10} }

// Check returns an error that names all invalid fields.
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

// Trial compares a model that has grafted but not fossilized blueprints with its twin, which has
// made the same steps without them.
type Trial struct {
	Seeds []state.Address
	// Harm is the increase of the loss with the blueprints, and Agree the share of the text's
	// batches that show an increase.
	Harm, Agree float64
	// Errors is the number of the text's batches on which the model's loss is not finite.
	Errors int
	// Norm and Without are the global gradient norms with and without the blueprints, as means over
	// the same steps, or 0 if unknown.
	Norm, Without float64
}

// wrong returns a description of the harm done in a trial, or "".
func (g *Governor) wrong(t Trial) string {
	switch {
	case t.Errors > 0:
		return fmt.Sprintf("the model's loss is not finite on %d batches of the text", t.Errors)
	case t.Harm > g.Harm && t.Agree >= g.Sure:
		return fmt.Sprintf("the loss is %.4g higher than without it, as %.0f%% of the batches "+
			"show", t.Harm, 100*t.Agree)
	case t.Without > 0 && !(t.Norm <= g.Norm*t.Without):
		return fmt.Sprintf("the gradients' norm is %.4g, and %.4g without it", t.Norm, t.Without)
	}
	return ""
}

// Govern returns the commands to execute in place of a controller's commands. If the trial does harm,
// the rollbacks of its blueprints come first, and the controller's commands for these seeds are
// dropped. Otherwise the commands are returned unchanged.
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
