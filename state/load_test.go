package state_test

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// Parameters are loaded into the slot of a living seed, with the command that germinates it or later, and nothing but them
// changes. What does not fit is refused, and of the commands beside it nothing takes effect.
func TestLoadIntoSlots(t *testing.T) {
	n, m := network(t, state.WithSlots(5), state.WithWidth(2))
	load := func(seed int, kind blueprints.Kind, scale float64, w ...float64) state.Command {
		return state.Command{Action: state.Load, Layer: 1, Seed: seed, Kind: kind, Params: state.SlotParams{Weights: w, Scale: scale}}
	}
	const conv = blueprints.ConvFilter
	do(t, n, germinate(1, 3, 1), load(3, conv, 2, 4, -4))
	if !m.is(1, 1, 4) {
		t.Fatalf("the slot holds %v", m.slots)
	}
	do(t, n, append(move(1, 3, state.Training, state.Grafting), load(3, conv, 3, 6, -6))...)
	if stage, _ := n.Lattice(1).Stage(3); stage != state.Grafting || !m.is(1, 1, 6) {
		t.Fatalf("the seed is %v and the slot holds %v", stage, m.slots)
	}
	do(t, n, germinate(1, 0, 2), germinate(1, 1, 1))
	do(t, n, move(1, 0, state.Training, state.Grafting, state.Stabilization, state.Evaluating, state.FineTuning, state.Fossilized)...)
	other := germinate(1, 2, 3)
	other.Request.Kind = blueprints.Residual
	do(t, n, other)
	share := germinate(1, 4, 3)
	do(t, n, share)
	for text, c := range map[string]state.Command{
		"seed 5: it is Dormant":                   load(5, conv, 1, 1, 2),
		"seed 0, whose slot it is, is frozen":     load(0, conv, 1, 1, 2),
		"seed 2, whose slot it is, has a Residua": load(4, conv, 1, 1, 2),
		"has a ConvFilter, not a Residual":        load(3, blueprints.Residual, 1, 1, 2),
		"LowRank needs 4 weights":                 load(3, blueprints.LowRank, 1, 1, 2, 3, 4),
		"3 weights, want 2":                       load(3, conv, 1, 1, 2, 3),
		"parameter 1 is NaN":                      load(3, conv, 1, 1, math.NaN()),
		"parameter 2 is +Inf":                     load(3, conv, math.Inf(1), 1, 2),
		"seed is 6":                               load(6, conv, 1, 1, 2),
	} {
		lattice, slots := fmt.Sprint(n.Arrays()), fmt.Sprint(m.slots)
		alpha := state.Command{Action: state.SetAlpha, Layer: 1, Seed: 3, Alpha: 0.75}
		if err := n.Do(alpha, load(3, conv, 9, 9, 9), c); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("got %v, want %q", err, text)
		}
		if fmt.Sprint(n.Arrays()) != lattice || fmt.Sprint(m.slots) != slots {
			t.Errorf("%s: something has changed", text)
		}
	}
	m.fail = errors.New("no room")
	if err := n.Do(load(3, conv, 1, 1, 2)); !errors.Is(err, m.fail) {
		t.Errorf("got %v, want %v", err, m.fail)
	}
	bare, err := state.NewNetwork(nil, state.Layer{Name: "a", Lattice: lattice(t, 2, 4, state.WithoutGates())})
	if err != nil {
		t.Fatal(err)
	}
	do(t, bare, germinate(0, 0, 1))
	if err := bare.Do(state.Command{Action: state.Load, Kind: conv, Params: state.SlotParams{Weights: []float64{1, 2}}}); !errors.Is(err, state.ErrArgument) {
		t.Errorf("a network without slots: %v", err)
	}
}
