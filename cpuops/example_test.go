package cpuops_test

import (
	"fmt"
	"log"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// This example trains a linear layer to compute y = 2a − b. The machine keeps the loss and the gradients
// after a run because the options name them; all other values share memory.
func Example() {
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithName("x"), gorgonia.WithShape(3, 2),
		gorgonia.WithValue(tensor.New(tensor.WithShape(3, 2),
			tensor.WithBacking([]float64{1, 0, 0, 1, 1, 1}))))
	want := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithName("want"),
		gorgonia.WithShape(3, 1),
		gorgonia.WithValue(tensor.New(tensor.WithShape(3, 1),
			tensor.WithBacking([]float64{2, -1, 1}))))
	w := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithName("w"), gorgonia.WithShape(1, 2),
		gorgonia.WithInit(gorgonia.Zeroes()))
	y, err := op.Linear(x, w)
	if err != nil {
		log.Fatal(err)
	}

	loss := gorgonia.Must(
		gorgonia.Mean(gorgonia.Must(gorgonia.Square(gorgonia.Must(gorgonia.Sub(y, want))))))
	if _, err := gorgonia.Grad(loss, w); err != nil {
		log.Fatal(err)
	}

	machine, err := cpuops.NewMachine(g, cpuops.WithParams(w), cpuops.WithOutputs(loss))
	if err != nil {
		log.Fatal(err)
	}
	defer machine.Close()

	solver, err := optim.NewAdamW(optim.WithLR(0.1), optim.WithWeightDecay(0))
	if err != nil {
		log.Fatal(err)
	}

	for range 300 {
		if err := machine.RunAll(); err != nil {
			log.Fatal(err)
		}
		if err := solver.Step(machine.ValueGrads()); err != nil {
			log.Fatal(err)
		}
	}

	value, err := machine.Value(loss)
	if err != nil {
		log.Fatal(err)
	}

	fmt.Printf("w %.2f, loss %.4f\n", w.Value().Data(), value.Data())
	// Output: w [2.00 -1.00], loss 0.0000
}
