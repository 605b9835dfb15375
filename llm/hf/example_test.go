package hf_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/optim"
)

func must[T any](v T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return v
}

// Adapters learn to answer a prompt, are saved in PEFT's format, and are loaded again next to their model.
func ExampleSaveAdapter() {
	ctx := context.Background()
	f := must(hf.Open("testdata/tiny"))
	defer f.Close()
	tok := must(f.Tokenizer())
	encoder := &chatdata.Encoder{Tokenizer: tok, End: []int{tok.EndOfDocument()}}

	// chatdata.ReadFile reads examples from files.
	examples := strings.NewReader(`{"prompt": "Permission is ", "completion": "granted."}`)
	var sequences []chatdata.Sequence
	for example, err := range chatdata.Read(examples, "examples.jsonl") {
		if err != nil {
			log.Fatal(err)
		}
		sequences = append(sequences, must(encoder.Encode(example))...)
	}

	const steps, seq, rate = 60, 32, 0.01
	base := must(f.Load(ctx, hf.WithConfig(func(c *llm.Config) { c.Seq, c.Documents = seq, true })))
	targets := must(base.Config.MatchLayers(llm.AllLinear))
	model := must(llm.Adapt(base, llm.LoRA{Rank: 16, Alpha: 32, Targets: targets}, 1))
	loader := must(chatdata.NewLoader(sequences, data.LoaderConfig{Batch: 1, Seq: seq}))
	optimizer := must(optim.NewAdamW(optim.WithLR(rate), optim.WithWeightDecay(0)))
	trainer := must(llm.NewTrainer(model, loader, optimizer, llm.TrainConfig{Steps: steps, Batch: 1, Clip: 1,
		Schedule: func(step int) float64 { return rate * float64(steps-step) / steps }}))
	if err := trainer.Run(ctx); err != nil {
		log.Fatal(err)
	}
	if err := trainer.Close(); err != nil {
		log.Fatal(err)
	}

	dir := must(os.MkdirTemp("", "adapters"))
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "tuned")
	if err := hf.SaveAdapter(ctx, path, "testdata/tiny", model, hf.Like(f)); err != nil {
		log.Fatal(err)
	}

	generator := must(llm.NewGenerator(must(hf.LoadAdapter(ctx, path, base, f))))
	defer generator.Close()
	greedy := must(sampler.New(sampler.Config{}))
	var answer []int
	for id, err := range generator.Generate(ctx, tok.Encode([]byte("Permission is ")), 20, greedy) {
		if err != nil {
			log.Fatal(err)
		}
		if id == tok.EndOfDocument() {
			break
		}
		answer = append(answer, id)
	}
	fmt.Printf("%s\n", must(tok.Decode(answer)))
	// Output: granted.
}
