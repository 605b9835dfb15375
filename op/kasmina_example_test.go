package op_test

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// A layer of two seeds over four features. Seed 1 is fine-tuning a Residual blueprint in slot 1, which adds 10 to its two
// features; seed 0 is dormant.
func ExampleKasmina() {
	lattice, err := state.NewLattice(2, 4, state.WithoutGates())
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := lattice.RequestGermination(1, state.GerminationRequest{Slot: 1, Kind: blueprints.Residual}); err != nil {
		fmt.Println(err)
		return
	}
	for _, stage := range []state.Stage{state.Training, state.Grafting, state.Stabilization, state.Evaluating, state.FineTuning} {
		if err := lattice.Transition(1, stage); err != nil {
			fmt.Println(err)
			return
		}
	}

	g := gorgonia.NewGraph()
	input := func(name string, data []float64, shape ...int) *gorgonia.Node {
		value := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
		return gorgonia.NewTensor(g, tensor.Float64, len(shape), gorgonia.WithName(name), gorgonia.WithShape(shape...), gorgonia.WithValue(value))
	}
	x := input("x", []float64{1, 2, 3, 4}, 1, 4)
	weights := input("weights", []float64{0, 0, 10, 10}, 2, 2) // row 0 is never used
	scales := input("scales", []float64{0, 1}, 2)
	y, err := op.Kasmina(x, weights, scales, lattice)
	if err != nil {
		fmt.Println(err)
		return
	}
	grads, err := gorgonia.Grad(gorgonia.Must(gorgonia.Sum(y)), x, weights, scales)
	if err != nil {
		fmt.Println(err)
		return
	}
	var out, dweights, dscales gorgonia.Value
	gorgonia.Read(y, &out)
	gorgonia.Read(grads[1], &dweights)
	gorgonia.Read(grads[2], &dscales)

	machine := gorgonia.NewTapeMachine(g)
	defer machine.Close()
	if err := machine.RunAll(); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("y", out.Data())
	fmt.Println("dweights", dweights.Data())
	fmt.Println("dscales", dscales.Data())
	fmt.Println("mean of seed 1's input", lattice.Report().Seeds[1].Health.Mean)
	// Output:
	// y [1 2 13 14]
	// dweights [0 0 1 1]
	// dscales [0 20]
	// mean of seed 1's input 3.5
}
