package llm_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math"
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

// A model learns that digits follow each other, is saved and loaded again, and continues counting.
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

// A blueprint of rank 2 moves from one seed to another. During a run, callbacks may do this directly,
// while other goroutines submit the command returned by ReadBlueprint.
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

// A plateau is a part that stops a run if the training loss has not improved for some steps. A resumed
// run keeps counting from where it was interrupted.
type plateau struct {
	trainer *llm.Trainer
	Best    float64
	Waited  int
}

func (*plateau) Name() string { return "plateau" }

func (p *plateau) Save(w *llm.CheckpointWriter) error {
	w.Value("state", p)
	return nil
}

func (p *plateau) Load(r *llm.CheckpointReader) (install func(), err error) {
	saved := plateau{trainer: p.trainer}
	return func() { *p = saved }, r.Value("state", &saved)
}

func (p *plateau) Receive(e llm.Event) error {
	if e.Kind != llm.StepEnd {
		return nil
	}
	if p.Waited++; e.Loss < p.Best {
		p.Best, p.Waited = e.Loss, 0
	}
	if p.Waited == 10 {
		return p.trainer.Stop("the loss has not improved for 10 steps")
	}
	return nil
}

// A part keeps its own state, which every checkpoint contains, and hooks into the run. This part
// receives events.
func ExamplePart() {
	dir := must(os.MkdirTemp("", "part"))
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "digits.txt")
	if err := os.WriteFile(path, []byte(strings.Repeat("0123456789", 100)), 0o666); err != nil {
		log.Fatal(err)
	}

	corpus := must(data.Open(path))
	tokens := must(data.Tokenize(context.Background(), corpus.Train, tokenizer.Bytes{}))
	config := llm.Config{Vocab: 256, Dim: 8, Layers: 1, Heads: 1, Seq: 8}.Default()
	model := must(llm.NewModel(config, tensor.Float32, 1))
	loader := must(data.NewLoader(tokens, data.LoaderConfig{Batch: 1, Seq: config.Seq}))

	// With a learning rate of 0, the loss soon stops improving.
	trainer := must(llm.NewTrainer(model, loader, must(optim.NewAdamW()), llm.TrainConfig{Steps: 1000,
		Batch: 1, Schedule: optim.Constant(0)}))
	defer trainer.Close()
	if err := trainer.Use(&plateau{trainer: trainer, Best: math.MaxFloat64}); err != nil {
		log.Fatal(err)
	}

	err := trainer.Run(context.Background())
	fmt.Println(errors.Is(err, llm.ErrStopped))
	fmt.Println(err)
	// Output:
	// true
	// llm: the run has been stopped: the loss has not improved for 10 steps
}
