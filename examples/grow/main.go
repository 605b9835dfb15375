// Command grow compares two models that it trains for the same time, or with the same number of FLOPs, on the
// same text and with the same random seed. The first has four blocks from the start. The second starts with
// two blocks, so that its steps are faster, and receives two more while it trains if that is expected to lower
// its final loss. At the end, the program prints how far the prediction was from the final loss, or why the
// model kept its blocks.
//
//	go run ./examples/grow                                      # a minute on two cores
//	go run ./examples/grow -data ~/notes -time 5m
//	go run ./examples/grow -flops 1.5e12                        # does not depend on the machine's speed
//	go run ./examples/grow -replay runs/grow/record.jsonl
//
// The program writes the decisions of the growing run to a record. With -replay, the run follows a
// record instead of the clock and the controller, and is bit-identical on any machine.
//
// "go run ./tools/bench growth" measures growth at all places of a model, on GPUs too.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/comm/launch"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/runlog"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// config describes the full model.
var config = llm.Config{Vocab: 256, Dim: 192, Layers: 4, Heads: 4, Seq: 256}

const (
	growth = 2    // number of blocks at the end, relative to the start
	batch  = 8    // sequences per step
	rate   = 0.02 // peak learning rate
)

func main() {
	path := flag.String("data", "", "text `file` or folder to learn from (default: the sources of Go)")
	out := flag.String("out", filepath.Join("runs", "grow"), "`folder` for the record")
	var limit llm.Budget
	flag.DurationVar(&limit.Time, "time", 30*time.Second, "time to train each model")
	flag.Float64Var(&limit.FLOPs, "flops", 0, "floating-point operations to train each model, instead of -time")
	seed := flag.Uint64("seed", 1, "random seed of the weights and of the data order")
	replay := flag.String("replay", "", "train only the growing model, and let it follow this `record`")
	flag.Parse()
	if limit.FLOPs != 0 {
		limit.Time = 0
	}

	err := run(launch.UntilInterrupt(os.Stderr), *path, *out, *replay, limit, *seed, os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "grow:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, path, out, replay string, limit llm.Budget, seed uint64,
	stdout io.Writer) error {
	corpus, err := openText(path)
	if err != nil {
		return err
	}

	if replay != "" {
		file, err := os.Open(replay)
		if err != nil {
			return err
		}
		defer file.Close()
		record, err := llm.ReadRecord(file)
		if err != nil {
			return fmt.Errorf("%s: %w", replay, err)
		}
		return train(ctx, "replayed", corpus, seed, limit, &llm.Growth{Replay: record}, stdout)
	}

	if err := train(ctx, "from the start", corpus, seed, limit, nil, stdout); err != nil {
		return err
	}

	if err := os.MkdirAll(out, 0o777); err != nil {
		return err
	}

	record, err := os.Create(filepath.Join(out, "record.jsonl"))
	if err != nil {
		return err
	}

	grown := &llm.Growth{Controller: control.NewForecast(blueprints.Stack, growth), Record: record}
	err = train(ctx, "grown", corpus, seed, limit, grown, stdout)
	if err == nil {
		fmt.Fprintf(stdout, "the decisions of the growing run are in %s\n", record.Name())
	}

	return errors.Join(err, record.Close())
}

// train trains a model until the limit is reached, and prints its loss on held-out text. If growing is nil,
// the model has all blocks from the start.
func train(ctx context.Context, name string, corpus *data.Corpus, seed uint64, limit llm.Budget,
	growing *llm.Growth, stdout io.Writer) (err error) {
	tokens, err := data.Tokenize(ctx, corpus.Train, tokenizer.Bytes{})
	if err != nil {
		return err
	}

	loader, err := data.NewLoader(tokens, data.LoaderConfig{Batch: batch, Seq: config.Seq, Seed: seed})
	if err != nil {
		return err
	}

	heldOut, err := corpus.HeldOut.Sample(64 << 10)
	if err != nil {
		return err
	}

	evaluation, err := data.NewEvaluation(heldOut, tokenizer.Bytes{}, batch, config.Seq)
	if err != nil {
		return err
	}

	c := config
	if growing != nil {
		c.Layers, c.Depth = c.Layers/growth, 1
	}

	model, err := llm.NewModel(c.Default(), tensor.Float32, seed, state.WithoutGates())
	if err != nil {
		return err
	}

	optimizer, err := optim.NewMuon(optim.WithLR(rate), optim.WithAdamW(optim.WithLR(0.15*rate)))
	if err != nil {
		return err
	}

	schedule, err := optim.Warmup(rate, 20)
	if err != nil {
		return err
	}

	annealing, err := optim.CosineAnnealing(0.05) // over the budget spent
	if err != nil {
		return err
	}

	t, err := llm.NewTrainer(model, loader, optimizer, llm.TrainConfig{Batch: batch, Schedule: schedule,
		Annealing: annealing, Budget: limit, Clip: 1, Epoch: 1})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close()) }()

	if growing != nil {
		if err := t.Grow(*growing); err != nil {
			return err
		}
	}

	t.On(runlog.Progress(os.Stderr))
	if err := t.Run(ctx); err != nil {
		return err
	}

	_, bitsPerByte, err := t.Evaluate(evaluation)
	if err != nil {
		return err
	}

	_, err = fmt.Fprintf(stdout, "%-14s  %d blocks, %d steps: %.4f bits per byte of held-out text\n", name,
		t.Model.Config.Layers, t.Step(), bitsPerByte)
	return err
}

// openText opens the text at path, by default the sources of Go.
func openText(path string) (*data.Corpus, error) {
	if path != "" {
		return data.Open(path)
	}
	path, err := data.GoSource()
	if err != nil {
		return nil, err
	}
	return data.Open(path, data.WithExtensions(".go"))
}
