// Command transformer trains a small Llama-style language model with Kasmina layers on text, on the CPU.
//
//	go run ./examples/transformer                     # about four minutes, on the Go source tree
//	go run ./examples/transformer -data ~/notes -out runs/notes
//	go run ./examples/transformer -resume             # goes on from the checkpoint in -out
//
// It leaves in -out a checkpoint (model.safetensors), the loss curve (loss.png), a log with a JSON object a line
// (log.jsonl) and a text drawn from the model (sample.txt), and compares the model's bits per byte with those of an order-2
// byte model and of gzip -9 on the same held-out text. The last line that it prints is a JSON object with the results.
// An interrupt (Ctrl-C) saves a checkpoint before it ends the run.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

type options struct {
	data, out, optimizer, prompt string
	resume                       resumeFlag
	kasmina                      bool
	model                        llm.Config
	train                        llm.TrainConfig
	lr                           float64
	seed                         uint64
	maxBytes, heldOut            int64
	evalEvery, saveEvery         int
	sample                       int
	sampler                      llm.SamplerConfig
}

// resumeFlag is -resume, which goes on from the checkpoint in -out, or -resume=FILE.
type resumeFlag struct {
	set  bool
	path string
}

func (r *resumeFlag) String() string   { return r.path }
func (r *resumeFlag) IsBoolFlag() bool { return true }

func (r *resumeFlag) Set(s string) error {
	if on, err := strconv.ParseBool(s); err == nil {
		*r = resumeFlag{set: on}
	} else {
		*r = resumeFlag{true, s}
	}
	return nil
}

func parse(args []string) (options, error) {
	var o options
	f := flag.NewFlagSet("transformer", flag.ExitOnError)
	f.StringVar(&o.data, "data", "", "file or folder to learn from (default: the Go source tree)")
	f.StringVar(&o.out, "out", filepath.Join("runs", "transformer"), "folder for checkpoint, loss curve, log and sample")
	f.Var(&o.resume, "resume", "go on from the checkpoint in -out, or from `FILE` with -resume=FILE")
	f.IntVar(&o.train.Steps, "steps", 1000, "optimiser steps in all")
	f.BoolVar(&o.kasmina, "kasmina", true, "put a Kasmina layer after every block and grow its seeds during the run")
	f.IntVar(&o.model.Seeds, "seeds", 16, "seeds of each Kasmina layer")
	f.IntVar(&o.model.Layers, "layers", 4, "blocks")
	f.IntVar(&o.model.Dim, "dim", 192, "features of the residual stream")
	f.IntVar(&o.model.Heads, "heads", 4, "query heads")
	f.IntVar(&o.model.KVHeads, "kvheads", 0, "key-value heads (default: as many as query heads)")
	f.IntVar(&o.model.FF, "ff", 0, "hidden features of the perceptron (default: 8/3 of -dim)")
	f.IntVar(&o.model.Seq, "seq", 256, "bytes in a sequence")
	f.BoolVar(&o.model.Untied, "untied", false, "give the output layer its own weight")
	f.IntVar(&o.train.Batch, "batch", 8, "sequences in a batch")
	f.IntVar(&o.train.Accumulate, "accumulate", 1, "batches in a step")
	f.BoolVar(&o.train.Recompute, "recompute", false, "compute blocks again in the backward pass: less memory, more work")
	f.StringVar(&o.optimizer, "optimizer", "muon", "adamw or muon")
	f.Float64Var(&o.lr, "lr", 0, "peak learning rate (default: 0.003 for adamw, 0.02 for muon)")
	f.Float64Var(&o.train.Clip, "clip", 1, "limit of the global gradient norm, 0 for none")
	f.Uint64Var(&o.seed, "seed", 1, "random seed of parameters, data order and sample")
	f.Int64Var(&o.maxBytes, "max-bytes", 0, "use no more than about this much of the data (default: all)")
	f.Int64Var(&o.heldOut, "heldout", 256<<10, "bytes of held-out text to score")
	f.IntVar(&o.evalEvery, "eval-every", 200, "steps between evaluations, 0 for the last step alone")
	f.IntVar(&o.saveEvery, "save-every", 200, "steps between checkpoints, 0 for the last step alone")
	f.IntVar(&o.sample, "sample", 400, "bytes of text to draw at the end")
	f.StringVar(&o.prompt, "prompt", "func ", "start of the drawn text")
	f.Float64Var(&o.sampler.Temperature, "temperature", 0.7, "of the drawn text; 0 always takes the likeliest byte")
	f.IntVar(&o.sampler.TopK, "top-k", 0, "draw from the k likeliest bytes, 0 for all")
	f.Float64Var(&o.sampler.TopP, "top-p", 0.95, "draw from the likeliest bytes that together reach this probability")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if rest := f.Args(); len(rest) == 1 && o.resume.set && o.resume.path == "" {
		o.resume.path = rest[0]
	} else if len(rest) > 0 {
		return o, fmt.Errorf("unexpected arguments %q: every option begins with a dash; -help lists them", rest)
	}
	if o.resume.set && o.resume.path == "" {
		o.resume.path = filepath.Join(o.out, "model.safetensors")
	}
	o.model.Vocab = llm.ByteTokenizer{}.VocabSize()
	if o.kasmina {
		for i := range o.model.Layers {
			o.model.Kasmina = append(o.model.Kasmina, i)
		}
	} else {
		o.model.Seeds = 0
	}
	o.model = o.model.Default()
	o.sampler.Seed = o.seed
	return o, o.model.Check()
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	o, err := parse(os.Args[1:])
	if err == nil {
		err = run(ctx, o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "transformer:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	if err := os.MkdirAll(o.out, 0o777); err != nil {
		return err
	}
	train, heldOut, err := openData(o)
	if err != nil {
		return err
	}
	baselines, err := score(train, heldOut)
	if err != nil {
		return err
	}
	t, err := newTrainer(o, train)
	if err != nil {
		return err
	}
	defer t.Close()
	if o.resume.set {
		if err := t.Resume(o.resume.path); err != nil {
			return err
		}
	}
	evaluation, err := llm.NewEvaluation(heldOut, llm.ByteTokenizer{}, o.train.Batch, o.model.Seq)
	if err != nil {
		return err
	}
	in := func(name string) string { return filepath.Join(o.out, name) }
	var sample string
	if o.kasmina {
		t.On(grow(t.Model, t.Config.Epoch))
	}
	t.On(
		llm.Progress(os.Stderr),
		llm.JSONLog(in("log.jsonl")),
		llm.LossCurve(in("loss.png"), in("log.jsonl")),
		llm.Evaluate(t, evaluation, o.evalEvery),
		llm.Checkpoint(t, in("model.safetensors"), o.saveEvery),
		llm.SampleText(t, llm.ByteTokenizer{}, o.prompt, o.sample, o.sampler, in("sample.txt"), 0),
		func(e llm.Event) error {
			if e.Kind == llm.Sampled {
				sample = e.Text
			}
			return nil
		},
	)
	if err := t.Run(ctx); err != nil {
		return err
	}
	return report(o, t.Last(), baselines, sample)
}

// openData returns the text to train on and the held-out text to score.
func openData(o options) (*llm.Text, []byte, error) {
	path := o.data
	opts := []llm.CorpusOption{}
	if path == "" {
		var err error
		if path, err = llm.GoSource(); err != nil {
			return nil, nil, err
		}
		opts = append(opts, llm.WithExtensions(".go"))
	}
	if o.maxBytes > 0 {
		opts = append(opts, llm.WithMaxBytes(o.maxBytes))
	}
	corpus, err := llm.OpenCorpus(path, opts...)
	if err != nil {
		return nil, nil, err
	}
	heldOut, err := corpus.HeldOut.Sample(int(o.heldOut))
	if err != nil {
		return nil, nil, err
	}
	fmt.Fprintf(os.Stderr, "data      %s: %.1f MB in %d files to train on, %.0f kB held out\n",
		path, float64(corpus.Train.Size())/1e6, corpus.Train.Documents(), float64(len(heldOut))/1e3)
	return corpus.Train, heldOut, nil
}

type baselines struct{ order2, gzip float64 }

// score measures what simpler models make of the held-out text, in bits per byte.
func score(train *llm.Text, heldOut []byte) (b baselines, err error) {
	m, err := llm.TrainOrder2(train.Reader(), nil)
	if err != nil {
		return b, err
	}
	if b.order2, err = m.BitsPerByte(heldOut); err != nil {
		return b, err
	}
	if b.gzip, err = llm.GzipBitsPerByte(heldOut); err != nil {
		return b, err
	}
	fmt.Fprintf(os.Stderr, "to beat   order-2 model %.3f bits per byte, gzip -9 %.3f\n", b.order2, b.gzip)
	return b, nil
}

func newTrainer(o options, train *llm.Text) (*llm.Trainer, error) {
	m, err := llm.NewModel(o.model, tensor.Float32, o.seed, state.WithoutGates())
	if err != nil {
		return nil, err
	}
	tokens, err := llm.Tokenize(train, llm.ByteTokenizer{})
	if err != nil {
		return nil, err
	}
	loader, err := llm.NewLoader(tokens, llm.LoaderConfig{Batch: o.train.Batch, Seq: o.model.Seq, Seed: o.seed})
	if err != nil {
		return nil, err
	}
	opt, peak, err := newOptimizer(o)
	if err != nil {
		return nil, err
	}
	if o.train.Schedule, err = optim.WarmupCosine(peak, peak/20, min(100, o.train.Steps/10), o.train.Steps); err != nil {
		return nil, err
	}
	return llm.NewTrainer(m, loader, opt, o.train)
}

// newOptimizer returns the optimiser of -optimizer and its peak learning rate. Neither decays norms or Kasmina's slots.
func newOptimizer(o options) (optim.Optimizer, float64, error) {
	rate := func(usual float64) float64 {
		if o.lr != 0 {
			return o.lr
		}
		return usual
	}
	adamw := []optim.AdamWOption{optim.WithBetas(0.9, 0.95), optim.WithWeightDecay(0.1), optim.WithGroup(optim.NameContains("norm", "kasmina"), optim.Decay(0))}
	switch o.optimizer {
	case "adamw":
		lr := rate(3e-3)
		a, err := optim.NewAdamW(append(adamw, optim.WithLR(lr))...)
		return a, lr, err
	case "muon":
		lr := rate(0.02)
		m, err := optim.NewMuon(optim.WithLR(lr), optim.WithAdamW(append(adamw, optim.WithLR(lr*0.15))...))
		return m, lr, err
	}
	return nil, 0, fmt.Errorf("-optimizer is %q, want adamw or muon", o.optimizer)
}

// report prints the sample, the comparison and, on the last line, the results as JSON.
func report(o options, e llm.Event, b baselines, sample string) error {
	fmt.Printf("\n%s\n\n", sample)
	fmt.Printf("%-28s %s\n", "on the same held-out text", "bits per byte")
	fmt.Printf("%-28s %.3f\n%-28s %.3f\n%-28s %.3f\n\n", "this model", e.ValBPB, "order-2 byte model", b.order2, "gzip -9", b.gzip)
	tokensPerS := 0.0
	if e.RunTokens > 0 {
		tokensPerS = math.Round(float64(e.RunTokens) / e.Elapsed.Seconds())
	}
	line, err := json.Marshal(map[string]any{
		"steps": e.Step, "tokens_per_s": tokensPerS, "train_loss": e.Loss, "val_bpb": e.ValBPB, "order2_bpb": b.order2,
		"gzip_bpb": b.gzip, "params": e.Params, "seeds": e.Seeds, "seconds": e.Elapsed.Round(time.Millisecond).Seconds(), "out": o.out,
	})
	if err != nil {
		return err
	}
	_, err = fmt.Println(string(line))
	return err
}
