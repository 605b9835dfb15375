package llm_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

func must[T any](v T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return v
}

// A model learns that digits follow each other, is saved, loaded again, and counts on.
func ExampleTrainer() {
	dir := must(os.MkdirTemp("", "digits"))
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "digits.txt")
	if err := os.WriteFile(path, []byte(strings.Repeat("0123456789", 100)), 0o666); err != nil {
		log.Fatal(err)
	}
	var bytes tokenizer.Bytes
	corpus := must(data.Open(path))
	tokens := must(data.Tokenize(context.Background(), corpus.Train, bytes))
	config := llm.Config{Vocab: 256, Dim: 32, Layers: 1, Heads: 2, Seq: 16,
		Kasmina: []int{0}, Seeds: 4}.Default()

	model := must(llm.NewModel(config, tensor.Float32, 1))
	loader := must(data.NewLoader(tokens, data.LoaderConfig{Batch: 4, Seq: config.Seq}))
	optimizer := must(optim.NewAdamW())
	trainer := must(llm.NewTrainer(model, loader, optimizer, llm.TrainConfig{
		Steps: 60, Batch: 4, Clip: 1, Schedule: must(optim.WarmupCosine(0.01, 0.001, 10, 60)),
	}))
	defer trainer.Close()

	checkpoint := filepath.Join(dir, "model.safetensors")
	trainer.On(llm.Checkpoint(trainer, checkpoint, 0), func(e llm.Event) error {
		if e.Kind == llm.Saved {
			fmt.Println("saved at step", e.Step)
		}
		return nil
	})
	if err := trainer.Run(context.Background()); err != nil {
		log.Fatal(err)
	}

	generator := must(llm.NewGenerator(must(llm.LoadModel(context.Background(), checkpoint))))
	defer generator.Close()
	greedy := must(sampler.New(sampler.Config{}))
	prompt := bytes.Encode([]byte(strings.Repeat("0123456789", 2)))
	for token, err := range generator.Generate(context.Background(), prompt, 10, greedy) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s", must(bytes.Decode([]int{token})))
	}
	// Output:
	// saved at step 60
	// 0123456789
}

// A blueprint of rank 2 moves from one seed to another. During a run, callbacks may do so, and
// other goroutines submit the command that ReadBlueprint returns.
func ExampleModel_LoadBlueprint() {
	dir, err := os.MkdirTemp("", "blueprint")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "blueprint.safetensors")

	config := llm.Config{Vocab: 256, Dim: 16, Layers: 1, Heads: 2, Seq: 8, Kasmina: []int{0},
		Seeds: 4, SlotWidth: 16}.Default()
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
