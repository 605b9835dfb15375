package main

import (
	"math"
	"math/rand/v2"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/optim"
)

// TestStockModel checks that the model of stock ops has the same losses as this module's model while both
// train.
func TestStockModel(t *testing.T) {
	seed := randtest.Seed(t)
	config := llm.Config{Vocab: 40, Dim: 24, Layers: 2, Heads: 2, FF: 36, Seq: 12}.Default()
	const batch = 3
	var losses [3][]float64
	for i := range losses {
		m, err := llm.NewModel(config, tensor.Float32, 5)
		if err != nil {
			t.Fatal(err)
		}
		o, err := optim.NewAdamW(optim.WithLR(1e-2))
		if err != nil {
			t.Fatal(err)
		}
		var vm gorgonia.VM
		var let func(data.Batch) error
		var loss *gorgonia.Node
		var grads []gorgonia.ValueGrad
		if i == 0 {
			g, err := m.Graph(llm.ForTraining, batch)
			if err != nil {
				t.Fatal(err)
			}
			vm = gorgonia.NewTapeMachine(g.G, gorgonia.BindDualValues(g.Params...))
			let, loss, grads = g.Let, g.Loss, gorgonia.NodesToValueGrads(g.Params)
		} else {
			s, err := newStockModel(m, batch)
			if err != nil {
				t.Fatal(err)
			}
			let, loss, grads = s.let, s.loss, gorgonia.NodesToValueGrads(s.params)
			if i == 1 {
				vm = gorgonia.NewTapeMachine(s.g, gorgonia.BindDualValues(s.params...))
			} else {
				ours, err := cpuops.NewMachine(s.g, cpuops.WithParams(s.params...),
					cpuops.WithOutputs(s.loss))
				if err != nil {
					t.Fatal(err)
				}
				vm, grads = ours, ours.ValueGrads()
			}
		}
		defer vm.Close()
		r := rand.New(rand.NewPCG(seed, 1))
		for range 5 {
			ids := make([]int, batch*config.Seq)
			for j := range ids {
				ids[j] = r.IntN(config.Vocab)
			}
			vm.Reset()
			if err := let(data.Batch{Inputs: ids, Targets: ids}); err != nil {
				t.Fatal(err)
			}
			if err := vm.RunAll(); err != nil {
				t.Fatal(err)
			}
			losses[i] = append(losses[i], float64(loss.Value().Data().(float32)))
			if err := o.Step(grads); err != nil {
				t.Fatal(err)
			}
		}
	}

	for i := range losses[0] {
		for _, other := range losses[1:] {
			if math.Abs(other[i]-losses[0][i]) > 1e-4*losses[0][i] {
				t.Errorf("seed %d: the losses of step %d differ: %v", seed, i,
					[3]float64{losses[0][i], losses[1][i], losses[2][i]})
			}
		}
	}
}
