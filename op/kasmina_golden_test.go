package op_test

import (
	"errors"
	"fmt"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// routes says how a dormant seed gets to a stage.
var routes = map[state.Stage][]state.Stage{
	state.Dormant:       {},
	state.Germinated:    {state.Germinated},
	state.Training:      {state.Germinated, state.Training},
	state.Grafting:      {state.Germinated, state.Training, state.Grafting},
	state.Stabilization: {state.Germinated, state.Training, state.Grafting, state.Stabilization},
	state.Evaluating:    {state.Germinated, state.Training, state.Grafting, state.Stabilization, state.Evaluating},
	state.FineTuning:    {state.Germinated, state.Training, state.Grafting, state.Stabilization, state.Evaluating, state.FineTuning},
	state.Fossilized:    {state.Germinated, state.Training, state.Grafting, state.Stabilization, state.Evaluating, state.FineTuning, state.Fossilized},
	state.Culled:        {state.Germinated, state.Training, state.Culled},
	state.Cancelled:     {state.Germinated, state.Cancelled},
	state.RolledBack:    {state.Germinated, state.Training, state.Grafting, state.RolledBack},
}

// seedSetting is what a test wants of one seed.
type seedSetting struct {
	Stage string
	Kind  string
	Slot  int
	Alpha float64
}

// newLattice returns a lattice whose seeds are as set.
func newLattice(t testing.TB, hidden int, seeds []seedSetting, opts ...state.Option) *state.Lattice {
	t.Helper()
	l, err := state.NewLattice(len(seeds), hidden, append([]state.Option{state.WithoutGates()}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range seeds {
		if err := place(l, i, s); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

func place(l *state.Lattice, seed int, s seedSetting) error {
	kind, ok := blueprints.ByName(s.Kind)
	if !ok {
		return fmt.Errorf("no kind %q", s.Kind)
	}
	for stage, route := range routes {
		if stage.String() != s.Stage {
			continue
		}
		var err error
		for _, to := range route {
			if to == state.Germinated {
				err = l.RequestGermination(seed, state.GerminationRequest{Slot: s.Slot, Kind: kind})
			} else {
				err = errors.Join(err, l.Transition(seed, to))
			}
		}
		return errors.Join(err, l.SetAlpha(seed, s.Alpha))
	}
	return fmt.Errorf("no stage %q", s.Stage)
}

// TestKasminaGolden compares the layer with PyTorch in float64: every stage and kind, mixed lattices, shared slots, odd
// sizes and activations that the adaptive mode scales.
func TestKasminaGolden(t *testing.T) {
	cases := loadGolden(t, "kasmina")
	if len(cases) < 50 {
		t.Errorf("%d golden cases, want every stage and kind and more", len(cases))
	}
	for _, c := range cases {
		seeds := settings[struct{ Seeds []seedSetting }](c).Seeds
		for _, e := range goldenErrors {
			for _, mode := range []op.Stability{op.Adaptive, op.Fast} {
				t.Run(fmt.Sprintf("%s/%v/%v", c.name, e.dtype, mode), func(t *testing.T) {
					c.check(t, e.dtype, e.forward, e.backward, func(_ *goldenCase, in gorgonia.Nodes) (*gorgonia.Node, error) {
						l := newLattice(t, in[0].Shape()[1], seeds)
						return op.Kasmina(in[0], in[1], in[2], l, op.WithStability(mode))
					})
				})
			}
		}
	}
}
