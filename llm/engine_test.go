package llm

import (
	"testing"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/optim"
)

// TestAllocations wants a steady training step on the CPU, gradients, clipping and update, not to allocate more for a larger
// model, with Kasmina layers in every block.
func TestAllocations(t *testing.T) {
	if testing.Short() {
		t.Skip("counting allocations needs a process without the race detector")
	}
	for name, fresh := range map[string]func() (optim.Optimizer, error){
		"AdamW": func() (optim.Optimizer, error) { return optim.NewAdamW() },
		"Muon":  func() (optim.Optimizer, error) { return optim.NewMuon() },
	} {
		for _, layers := range []int{2, 24} {
			c := Config{Vocab: 64, Dim: 32, Layers: layers, Heads: 2, Seq: 32, Kasmina: blocks(layers), Seeds: 4}.Default()
			m, err := NewModel(c, tensor.Float32, 1)
			if err != nil {
				t.Fatal(err)
			}
			o, err := fresh()
			if err != nil {
				t.Fatal(err)
			}
			e, err := newHost(m, o, TrainConfig{Batch: 2, Accumulate: 1})
			if err != nil {
				t.Fatal(err)
			}
			ids := make([]int, 2*c.Seq)
			step := func() {
				if _, err := e.Gradients(Batch{Inputs: ids, Targets: ids}); err != nil {
					t.Fatal(err)
				}
				if _, err := e.Update(); err != nil {
					t.Fatal(err)
				}
			}
			for range 20 { // until a layer's history holds as many reports as it keeps
				step()
			}
			n := testing.AllocsPerRun(10, step)
			t.Logf("%s, %d layers: %v allocations", name, layers, n)
			if n > 50 {
				t.Errorf("a step of a model of %d layers with %s makes %v allocations, want at most 50", layers, name, n)
			}
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// blocks returns 0 to n−1.
func blocks(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}
