package gpu_test

import (
	"context"
	"errors"
	"log"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
)

// Training on the GPU if there is one and on the CPU otherwise differs only in the engine.
func ExampleEngine() {
	folder, err := data.GoSource()
	if err != nil {
		log.Fatal(err)
	}

	corpus, err := data.Open(folder, data.WithExtensions(".go"))
	if err != nil {
		log.Fatal(err)
	}

	tokens, err := data.Tokenize(context.Background(), corpus.Train, tokenizer.Bytes{})
	if err != nil {
		log.Fatal(err)
	}

	config := llm.Config{Vocab: 256, Dim: 256, Layers: 4, Heads: 4, Seq: 256}.Default()
	model, err := llm.NewModel(config, tensor.Float32, 1)
	if err != nil {
		log.Fatal(err)
	}

	loader, err := data.NewLoader(tokens, data.LoaderConfig{Batch: 16, Seq: config.Seq})
	if err != nil {
		log.Fatal(err)
	}

	optimizer, err := optim.NewAdamW(optim.WithLR(1e-3))
	if err != nil {
		log.Fatal(err)
	}

	schedule, err := optim.WarmupCosine(1e-3, 1e-4, 100, 1000)
	if err != nil {
		log.Fatal(err)
	}

	plan := llm.TrainConfig{Steps: 1000, Batch: 16, Schedule: schedule, Clip: 1}
	switch device, err := cudaops.Open(); {
	case err == nil:
		defer device.Close()
		plan.Engine = gpu.Engine(device, cudaops.BFloat16)
	case !errors.Is(err, cudaops.ErrNoDevice):
		log.Fatal(err)
	}

	trainer, err := llm.NewTrainer(model, loader, optimizer, plan)
	if err != nil {
		log.Fatal(err)
	}
	defer trainer.Close() // before the device

	if err := trainer.Run(context.Background()); err != nil {
		log.Fatal(err)
	}
}
