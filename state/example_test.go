package state_test

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// A seed is germinated, trained and grafted. The gates are left out here; a real run would have them, and the training loop
// would report Metrics.
func Example() {
	lattice, err := state.NewLattice(4, 64, state.WithoutGates()) // 4 seeds over 64 features
	if err != nil {
		fmt.Println(err)
		return
	}
	err = lattice.RequestGermination(2, state.GerminationRequest{
		Slot:     1,
		Kind:     blueprints.Residual,
		Strategy: state.FixedRamp{Ramp: state.Linear, Epochs: 4, Target: 1},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, stage := range []state.Stage{state.Training, state.Grafting} {
		if err := lattice.Transition(2, stage); err != nil {
			fmt.Println(err)
			return
		}
	}
	for range 5 {
		events, err := lattice.StepEpoch(state.Metrics{Loss: 2.5})
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Print(lattice.Report().Seeds[2].Alpha)
		for _, e := range events {
			fmt.Printf(" %v of seed %d", e.Kind, e.Seed)
		}
		fmt.Println()
	}
	err = lattice.Transition(2, state.Fossilized)
	fmt.Println(errors.Is(err, state.ErrTransition), err)
	// Output:
	// 0.25
	// 0.5
	// 0.75
	// 1 RampFinished of seed 2
	// 1
	// true state.Transition: transition not allowed: seed 2 cannot go from Grafting to Fossilized
}

// A lattice is saved and loaded as a whole; a damaged one is refused, and the error names the seed.
func ExampleLattice_UnmarshalBinary() {
	lattice, err := state.NewLattice(3, 12)
	if err != nil {
		fmt.Println(err)
		return
	}
	data, err := lattice.MarshalBinary()
	if err != nil {
		fmt.Println(err)
		return
	}
	var restored state.Lattice
	if err := restored.UnmarshalBinary(data); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(restored.Seeds(), "seeds")
	data[len(data)-1] ^= 1
	err = restored.UnmarshalBinary(data)
	fmt.Println(errors.Is(err, state.ErrCorrupt), err)
	// Output:
	// 3 seeds
	// true state.UnmarshalBinary: seed state is corrupt: seed 2 does not match its checksum: bit 24 of its checksum has flipped (1 of 3 seeds do not)
}
