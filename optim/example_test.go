package optim_test

import (
	"fmt"
	"log"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/optim"
)

// This example minimizes (w − 3)² with warm-up and decay.
func Example() {
	g := gorgonia.NewGraph()
	w := gorgonia.NewScalar(g, tensor.Float64, gorgonia.WithName("w"), gorgonia.WithValue(0.0))
	loss := gorgonia.Must(gorgonia.Square(gorgonia.Must(gorgonia.Sub(w,
		gorgonia.NewConstant(3.0)))))
	if _, err := gorgonia.Grad(loss, w); err != nil {
		log.Fatal(err)
	}

	vm := gorgonia.NewTapeMachine(g, gorgonia.BindDualValues(w))
	defer vm.Close()

	const steps = 300
	solver, err := optim.NewAdamW(optim.WithWeightDecay(0.1))
	if err != nil {
		log.Fatal(err)
	}

	rate, err := optim.WarmupCosine(0.2, 0.001, 5, steps)
	if err != nil {
		log.Fatal(err)
	}

	for step := range steps {
		vm.Reset()
		if err := vm.RunAll(); err != nil {
			log.Fatal(err)
		}
		if err := solver.SetLR(rate(step)); err != nil {
			log.Fatal(err)
		}
		if err := solver.Step(gorgonia.NodesToValueGrads(gorgonia.Nodes{w})); err != nil {
			log.Fatal(err)
		}
	}

	fmt.Printf("%.1f\n", w.Value().Data())
	// Output: 3.0
}

// This example uses Muon for the matrices of the blocks and AdamW for all other parameters, with a lower
// rate for embeddings.
func ExampleNewMuon() {
	_, err := optim.NewMuon(
		optim.WithLR(0.02),
		optim.WithWeightDecay(0.1),
		optim.WithAdamWFor(optim.NameContains("embed", "lm_head", "kasmina")),
		optim.WithAdamW(
			optim.WithLR(3e-3),
			optim.WithGroup(optim.NameContains("embed"), optim.LRScale(0.5)),
		),
	)

	fmt.Println(err)
	// Output: <nil>
}
