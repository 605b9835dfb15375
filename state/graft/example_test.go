package graft_test

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/graft"
)

// HalfWay is a user-defined strategy that takes α half of the remaining way in each epoch and stops
// near the end. Its parameters are exported fields, so they are saved with it.
type HalfWay struct{ Near float64 }

func (HalfWay) Name() string { return "HalfWay" }

func (s HalfWay) Check() error {
	if !(s.Near > 0 && s.Near < 1) {
		return fmt.Errorf("HalfWay: Near is %v, want a number between 0 and 1", s.Near)
	}
	return nil
}

func (s HalfWay) Advance(g graft.Progress) (alpha float64, memory [2]float32, done bool) {
	alpha = (1 + g.Alpha) / 2
	return alpha, memory, 1-alpha <= s.Near
}

// This example registers a user-defined strategy, so that lattices that use it can be loaded, and
// requests it like any other.
func ExampleRegister() {
	if err := graft.Register[HalfWay](); err != nil {
		fmt.Println(err)
		return
	}

	lattice, err := state.NewLattice(1, 8, state.WithoutGates())
	if err != nil {
		fmt.Println(err)
		return
	}

	err = errors.Join(
		lattice.RequestGermination(0, state.GerminationRequest{Slot: 1,
			Strategy: HalfWay{Near: 0.1}}),
		lattice.Transition(0, state.Training),
		lattice.Transition(0, state.Grafting),
	)

	if err != nil {
		fmt.Println(err)
		return
	}

	for range 5 {
		events, err := lattice.StepEpoch(state.Metrics{})
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(lattice.Report().Seeds[0].Alpha, events)
	}
	// Output:
	// 0.5 []
	// 0.75 []
	// 0.875 []
	// 0.9375 [epoch 4, layer 0, seed 0: the ramp finished at α = 0.938]
	// 0.9375 []
}
