package state_test

import (
	"errors"
	"fmt"
	"os"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
	"github.com/kasmina-go/kasmina/state/graft"
)

// This example germinates a seed, trains it and grafts it. It omits the gates; a real run would
// have them and report more Metrics.
func Example() {
	lattice, err := state.NewLattice(4, 64, state.WithoutGates()) // 4 seeds over 64 features
	if err != nil {
		fmt.Println(err)
		return
	}

	err = lattice.RequestGermination(2, state.GerminationRequest{
		Slot:     1,
		Kind:     blueprints.Residual,
		Strategy: graft.FixedRamp{Ramp: graft.Linear, Epochs: 4, Target: 1},
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
	// true state.Transition: transition not allowed: seed 2 cannot go from Grafting to Fossilized: want Stabilization or RolledBack
}

// This example prints the report of a lattice, which is a table.
func ExampleReport() {
	lattice, err := state.NewLattice(3, 96, state.WithoutGates())
	if err != nil {
		fmt.Println(err)
		return
	}

	err = lattice.RequestGermination(1, state.GerminationRequest{Slot: 2, Kind: blueprints.ConvFilter})
	if err != nil {
		fmt.Println(err)
		return
	}

	fmt.Print(lattice.Report())
	// Output:
	// 3 seeds at site chunk, epoch 0, 0 passes recorded, telemetry in mode Production
	// SEED  STAGE       EPOCHS  KIND        SLOT  α  VARIANCE  GRADIENT  PERFORMANCE  DELTA  STABILITY  NEXT
	// 0     Dormant     0       –           –     0  0         0         0            0      0          –
	// 1     Germinated  0       ConvFilter  2     0  0         0         0            0      0          Training
	// 2     Dormant     0       –           –     0  0         0         0            0      0          –
}

// This example saves and loads a lattice, and shows the error for a corrupted one.
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

// impatient is a user-defined controller that germinates every dormant seed and advances every seed
// as soon as it can.
type impatient struct{}

func (impatient) Decide(layers []state.Report) (commands []state.Command) {
	for layer, r := range layers {
		for _, s := range r.Seeds {
			c := state.Command{Action: state.Move, Layer: layer, Seed: s.Seed, To: s.Stage.Next()}
			if s.Stage == state.Dormant {
				c.Action, c.Request = state.Germinate, state.GerminationRequest{Slot: s.Seed + 1,
					Kind: blueprints.ConvFilter}
			}
			if s.CanAdvance || s.Stage == state.Dormant {
				commands = append(commands, c)
			}
		}
	}

	return commands
}

// This example creates a network of two layers and lets a controller decide on commands by its
// reports. A dry run prints the commands instead of carrying them out. s/    // between two steps
// of the model/      // Between two steps of the model:/
func ExampleNetwork() {
	var layers []state.Layer
	for _, name := range []string{"first", "second"} {
		lattice, err := state.NewLattice(2, 8)
		if err != nil {
			fmt.Println(err)
			return
		}
		layers = append(layers, state.Layer{Name: name, Lattice: lattice})
	}

	network, err := state.NewNetwork(nil, layers...)
	if err != nil {
		fmt.Println(err)
		return
	}

	if _, err := network.Listen(func(e state.Event) { fmt.Println(e) }); err != nil {
		fmt.Println(err)
		return
	}

	if err := network.Do(state.Command{Action: state.Germinate, Layer: 1, Seed: 0,
		Request: state.GerminationRequest{Slot: 1}}); err != nil {
		fmt.Println(err)
		return
	}

	control.DryRun(impatient{}, os.Stdout).Decide(network.Report())
	done := network.Submit(impatient{}.Decide(network.Report())[2:3]...) // from any goroutine

	// between two steps of the model
	network.Apply()
	fmt.Println(<-done)
	// Output:
	// epoch 0, layer 1, seed 0: Dormant → Germinated
	// would do: layer 0, seed 0: germinate ConvFilter in slot 1, to be grafted by FixedRamp
	// would do: layer 0, seed 1: germinate ConvFilter in slot 2, to be grafted by FixedRamp
	// would do: layer 1, seed 0: move to Training
	// would do: layer 1, seed 1: germinate ConvFilter in slot 2, to be grafted by FixedRamp
	// epoch 0, layer 1, seed 0: Germinated → Training
	// <nil>
}
