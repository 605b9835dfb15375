package llm_test

import (
	"fmt"
	"os"
	"path/filepath"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// A blueprint of rank 2 moves from one seed to another. During a run, callbacks may do so, and other goroutines submit the
// command that ReadBlueprint returns.
func ExampleModel_LoadBlueprint() {
	dir, err := os.MkdirTemp("", "blueprint")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "blueprint.safetensors")

	config := llm.Config{Vocab: 256, Dim: 16, Layers: 1, Heads: 2, Seq: 8, Kasmina: []int{0}, Seeds: 4, SlotWidth: 16}.Default()
	m, err := llm.NewModel(config, tensor.Float32, 1)
	if err != nil {
		fmt.Println(err)
		return
	}
	for seed := range 2 {
		r := state.GerminationRequest{Slot: 1 + seed, Kind: blueprints.LowRank}
		if err := m.Germinate(0, seed, r); err != nil {
			fmt.Println(err)
			return
		}
	}
	if err := m.SaveBlueprint(path, 0, 0); err != nil {
		fmt.Println(err)
		return
	}
	if err := m.LoadBlueprint(path, 0, 1); err != nil {
		fmt.Println(err)
		return
	}
	w := m.Param("model.layers.0.kasmina.weights").Float32s()
	fmt.Println(w[1*16] == w[2*16], w[1*16+5] == w[2*16+5])
	fmt.Println(m.Germinate(0, 2, state.GerminationRequest{Slot: 3, Kind: blueprints.ConvFilter}))
	err = m.LoadBlueprint(path, 0, 2)
	fmt.Println(err != nil)
	// Output:
	// true true
	// <nil>
	// true
}
