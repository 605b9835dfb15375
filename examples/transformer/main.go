// Command transformer trains a small language model on the sources of Go, or on any other text, and
// lets it grow while it trains. It takes minutes on two cores.
//
//	go run ./examples/transformer
//	go run ./examples/transformer -data ~/notes -out runs/notes
//	go run ./examples/transformer -resume                       # continues after Ctrl-C
//
// The model starts with two blocks and doubles them once that is predicted to lower its final loss. Kasmina layers
// after the first two blocks observe the activations with dormant seeds. At the end, the program compares the model
// with gzip and byte trigrams, and generates a sample.
//
// The command "kasmina train" does the same for models of any size, on CPUs and GPUs, and writes them in the format
// of transformers.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/comm/launch"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/baseline"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/plot"
	"github.com/kasmina-go/kasmina/llm/runlog"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/optime"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// config describes the model at its start: two blocks, each followed by a Kasmina layer of 16 seeds.
// It may grow in depth once.
var config = llm.Config{Dim: 128, Layers: 2, Heads: 4, Seq: 256, Kasmina: []int{0, 1}, Seeds: 16,
	Depth: 1}

const (
	vocab         = 2048      // tokens
	tokenizerText = 8 << 20   // bytes to train the tokenizer on
	heldOutText   = 256 << 10 // bytes to evaluate on
	batch         = 4         // sequences per step
	rate          = 0.02      // learning rate after the warmup
	warmup        = 100       // steps until the learning rate reaches its peak
	growth        = 2         // number of blocks at the end, relative to the start
	observeEvery  = 16        // the seeds measure the activations of one step in this many
	timeEvery     = 7         // the ops of one step in this many are timed
	minSteps      = 80        // minimum number of steps for judging growth
)

func main() {
	path := flag.String("data", "", "text `file` or folder to learn from (default: the sources of Go)")
	out := flag.String("out", filepath.Join("runs", "transformer"), "`folder` for the model, log, curve and sample")
	steps := flag.Int("steps", 1500, fmt.Sprintf("optimizer steps, at least %d", minSteps))
	seed := flag.Uint64("seed", 1, "random seed of the weights, the data order and the sample")
	resume := flag.Bool("resume", false, "continue the run in -out")
	flag.Parse()

	ctx := launch.UntilInterrupt(os.Stderr)
	if err := run(ctx, *path, *out, *steps, *seed, *resume, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "transformer:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, path, out string, steps int, seed uint64, resume bool,
	stdout io.Writer) (err error) {
	if steps < minSteps {
		return fmt.Errorf("-steps is %d, want at least %d", steps, minSteps)
	}

	checkpoint, log := filepath.Join(out, "model.safetensors"), filepath.Join(out, "log.jsonl")
	if _, err := os.Stat(checkpoint); err == nil && !resume {
		return fmt.Errorf("%s holds a run: add -resume to continue it, or name another folder with -out", out)
	}

	// Data: text, a tokenizer, batches of tokens, and held-out text to evaluate on.
	corpus, err := openText(path)
	if err != nil {
		return err
	}

	tok, err := tokenizer.LoadOrTrainBPE(ctx, filepath.Join(out, "tokenizer.bpe"), corpus.Train, vocab,
		tokenizerText, nil)
	if err != nil {
		return err
	}

	tokens, err := data.Tokenize(ctx, corpus.Train, tok)
	if err != nil {
		return err
	}

	loader, err := data.NewLoader(tokens, data.LoaderConfig{Batch: batch, Seq: config.Seq, Seed: seed})
	if err != nil {
		return err
	}

	heldOut, err := corpus.HeldOut.Sample(heldOutText)
	if err != nil {
		return err
	}

	evaluation, err := data.NewEvaluation(heldOut, tok, batch, config.Seq)
	if err != nil {
		return err
	}

	// Model and optimizer. Matrix products are fastest if the vocabulary is a multiple of 64.
	config := config
	config.Vocab = (tok.VocabSize() + 63) / 64 * 64
	model, err := llm.NewModel(config.Default(), tensor.Float32, seed, state.WithoutGates(),
		state.WithTelemetry(state.Telemetry{Mode: state.Sampling, Every: observeEvery}))
	if err != nil {
		return err
	}

	optimizer, err := optim.NewMuon(optim.WithLR(rate), optim.WithAdamW(optim.WithLR(rate),
		optim.WithBetas(0.9, 0.95), optim.WithWeightDecay(0.1),
		optim.WithGroup(optim.NameContains("norm", "kasmina"), optim.Decay(0))))
	if err != nil {
		return err
	}

	schedule := func(step int) float64 {
		left := float64(steps-step) / float64(steps)
		return rate * min(1, float64(step+1)/warmup, 2*left+0.0001) // falls in the second half
	}

	// Trainer, and the controller that lets it grow once that is predicted to pay off.
	t, err := llm.NewTrainer(model, loader, optimizer, llm.TrainConfig{Steps: steps, Batch: batch,
		Schedule: schedule, Clip: 1, Epoch: max(1, min(10, steps/100)),
		Engine: llm.CPUEngine(cpuops.WithMonitor(timeEvery))})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close()) }()

	if err := t.Grow(llm.Growth{Controller: control.NewForecast(blueprints.Stack, growth)}); err != nil {
		return err
	}

	// Callbacks: what happens between steps.
	var ops []optime.OpTime
	t.On(runlog.Progress(os.Stderr), runlog.JSON(log),
		plot.LossCurve(filepath.Join(out, "loss.png"), log),
		llm.Evaluate(t, evaluation, 0),
		llm.Checkpoint(t, checkpoint, max(1, steps/5)),
		llm.Monitor(t, io.Discard, 0),
		func(e llm.Event) error {
			if e.Kind == llm.Profiled {
				ops = e.Ops
			}
			return nil
		},
		llm.SampleText(t, tok, "func ", 200, sampler.Config{Temperature: 0.7, TopP: 0.95, Seed: seed},
			filepath.Join(out, "sample.txt"), 0))

	if resume {
		if err := t.Resume(ctx, checkpoint); err != nil {
			return err
		}
		if t.Step() == steps {
			return fmt.Errorf("the run in %s has made all of its %d steps", out, steps)
		}
	}

	if err := t.Run(ctx); errors.Is(err, context.Canceled) {
		return fmt.Errorf("stopped after step %d: %w; add -resume to continue", t.Step(), err)
	} else if err != nil {
		return err
	}

	return report(ctx, t, ops, corpus.Train, heldOut, stdout)
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

// report compares the model with gzip and byte trigrams, and prints the measurements of the dormant seeds
// and their cost. Its last line is a JSON object.
func report(ctx context.Context, t *llm.Trainer, ops []optime.OpTime, train *data.Text, heldOut []byte,
	w io.Writer) error {
	trigrams, err := baseline.TrainOrder2(ctx, train.Reader(), nil)
	if err != nil {
		return err
	}

	order2, err := trigrams.BitsPerByte(ctx, heldOut)
	if err != nil {
		return err
	}

	gzip, err := baseline.GzipBitsPerByte(ctx, heldOut)
	if err != nil {
		return err
	}

	last := t.Last()
	fmt.Fprintf(w, "\nbits per byte of held-out text: this model %.3f, gzip -9 %.3f, byte trigrams %.3f\n",
		last.ValBPB, gzip, order2)
	for i, layer := range t.Model.Kasmina.Report()[:len(t.Model.Config.Kasmina)] {
		low, high := math.Inf(1), 0.0
		for _, s := range layer.Seeds {
			deviation := math.Sqrt(s.Health.Variance)
			low, high = min(low, deviation), max(high, deviation)
		}
		fmt.Fprintf(w, "Kasmina layer %d: features of its %d seeds deviate by %.2g to %.2g\n", i,
			len(layer.Seeds), low, high)
	}

	var kasmina, all float64
	for _, op := range ops {
		all += op.Time.Seconds()
		if strings.HasPrefix(op.Op, "Kasmina") {
			kasmina += op.Time.Seconds()
		}
	}

	share := kasmina / max(all, math.SmallestNonzeroFloat64)
	fmt.Fprintf(w, "the Kasmina layers took %.2f%% of the time of a step\n\n", 100*share)

	return json.NewEncoder(w).Encode(map[string]any{"steps": last.Step, "val_bpb": last.ValBPB,
		"gzip_bpb": gzip, "order2_bpb": order2, "params": last.Params, "seeds": last.Seeds,
		"kasmina_share": share, "seconds": last.Elapsed.Seconds()})
}
