package op_test

import (
	"fmt"
	"log"
	"math"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/graft"
)

// A small classifier of Gorgonia's own ops, with a Kasmina layer behind its hidden features, learns XOR, and seed 0 goes
// through a whole life meanwhile. The gates are left out here; in a real run they decide, by Metrics, when a seed may go on.
func ExampleKasmina_training() {
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	const hidden, seeds, slots, width = 8, 2, 3, 8 // width is enough for a rank of 1
	lattice, err := state.NewLattice(seeds, hidden, state.WithSlots(slots), state.WithWidth(width), state.WithoutGates())
	check(err)

	g := gorgonia.NewGraph()
	input := func(name string, data []float64, shape ...int) *gorgonia.Node {
		value := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
		return gorgonia.NewTensor(g, tensor.Float64, len(shape), gorgonia.WithName(name), gorgonia.WithShape(shape...), gorgonia.WithValue(value))
	}
	start := func(n int) []float64 { // the same in every run
		w := make([]float64, n)
		for i := range w {
			w[i] = math.Sin(float64(3*i + 1))
		}
		return w
	}
	x := input("x", []float64{0, 0, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1}, 4, 3) // two features and a constant
	target := input("target", []float64{0, 1, 1, 0}, 4, 1)
	in, out := input("in", start(3*hidden), 3, hidden), input("out", start(hidden), hidden, 1)
	weights := input("weights", make([]float64, slots*width), slots, width) // zeros: slots that a seed starts to use start as its identity
	scales := input("scales", make([]float64, slots), slots)
	params := gorgonia.Nodes{in, out, weights, scales}

	h := gorgonia.Must(gorgonia.Tanh(gorgonia.Must(gorgonia.Mul(x, in))))
	y, err := op.Kasmina(h, weights, scales, lattice)
	check(err)
	miss := gorgonia.Must(gorgonia.Sub(gorgonia.Must(gorgonia.Mul(y, out)), target))
	cost := gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(miss))))
	_, err = gorgonia.Grad(cost, params...)
	check(err)
	machine := gorgonia.NewTapeMachine(g, gorgonia.BindDualValues(params...))
	defer machine.Close()
	solver, err := optim.NewAdamW(optim.WithLR(0.02), optim.WithGroup(optim.NameContains("weights"), optim.Decay(0)))
	check(err)

	for epoch := range 20 {
		for range 20 {
			check(machine.RunAll())
			check(solver.Step(gorgonia.NodesToValueGrads(params)))
			machine.Reset()
		}
		_, err := lattice.StepEpoch(state.Metrics{Loss: cost.Value().Data().(float64)})
		check(err)
		switch seed := lattice.Report().Seeds[0]; {
		case seed.Stage == state.Dormant && epoch == 4: // it has watched for long enough
			check(lattice.RequestGermination(0, state.GerminationRequest{Slot: 1, Kind: blueprints.ChunkMLP,
				Strategy: graft.FixedRamp{Ramp: graft.Linear, Epochs: 4, Target: 1}}))
		case seed.Stage == state.Dormant || seed.Stage == state.Grafting && !seed.RampFinished || seed.Stage == state.Fossilized:
			continue
		default:
			check(lattice.Transition(0, seed.Stage.Next()))
		}
		if !lattice.LearningSlots()[1] { // no momentum shall move what is frozen
			check(solver.Forget("weights", 1*width, 2*width))
			check(solver.Forget("scales", 1, 2))
		}
		seed := lattice.Report().Seeds[0]
		fmt.Println("epoch", epoch, seed.Stage, seed.Alpha)
	}
	fmt.Println("learnt:", cost.Value().Data().(float64) < 0.01)
	watched := lattice.Report().Seeds[1]
	fmt.Println("seed 1:", watched.Stage, watched.Health.Variance > 0)
	// Output:
	// epoch 4 Germinated 0
	// epoch 5 Training 0
	// epoch 6 Grafting 0
	// epoch 10 Stabilization 1
	// epoch 11 Evaluating 1
	// epoch 12 FineTuning 1
	// epoch 13 Fossilized 1
	// learnt: true
	// seed 1: Dormant true
}
