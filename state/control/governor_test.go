package control_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// TestGovernor checks that a governor passes a controller's commands on while all is well, and
// rolls back a harmful trial regardless of the controller.
func TestGovernor(t *testing.T) {
	trial := control.Trial{Seeds: []state.Address{{Layer: 1, Seed: 2}, {Seed: 3}}, Harm: 0.04,
		Agree: 1, Norm: 5, Without: 1}
	onward := state.Command{Action: state.Move, Layer: 1, Seed: 2, To: state.Stabilization}
	plant := state.Command{Action: state.Germinate, Layer: 1, Seed: 3}
	g := control.NewGovernor()
	own := []state.Command{onward, plant}
	require.Equal(t, own, g.Govern(trial, own))
	for why, change := range map[string]func(*control.Trial){
		"the loss is 0.06 higher than without it, as 80% of the batches show": func(x *control.Trial) {
			x.Harm, x.Agree = 0.06, 0.8
		},
		"the model's loss is not finite on 1 batches of the text": func(x *control.Trial) {
			x.Errors = 1
		},
		"the gradients' norm is 10.5, and 1 without it": func(x *control.Trial) { x.Norm = 10.5 },
		"the gradients' norm is NaN, and 1 without it":  func(x *control.Trial) { x.Norm = math.NaN() },
	} {
		wrong := trial
		change(&wrong)
		back := func(layer, seed int) state.Command {
			return state.Command{Action: state.Move, Layer: layer, Seed: seed,
				To: state.RolledBack, Why: why}
		}
		require.Equal(t, []state.Command{back(1, 2), back(0, 3), plant}, g.Govern(wrong, own))
	}

	unsure := trial
	unsure.Harm, unsure.Agree = 0.5, 0.75
	require.Equal(t, own, g.Govern(unsure, own))
	require.NoError(t, g.Check())
	for _, bad := range []*control.Governor{{}, {Harm: 1, Sure: 2, Norm: 1},
		{Harm: math.Inf(1), Sure: 1, Norm: 1}} {
		require.ErrorIs(t, bad.Check(), state.ErrArgument)
	}
}
