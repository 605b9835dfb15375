// Command transformer trains a small Llama-style language model with Kasmina layers on text, on an NVIDIA GPU if there is one, and
// else on the CPU.
//
//	go run ./examples/transformer                     # about three minutes on two cores, on the Go source tree
//	go run ./examples/transformer -data ~/notes -out runs/notes
//	go run ./examples/transformer -resume             # goes on from the checkpoint in -out
//
// It leaves in -out a checkpoint (model.safetensors), the loss curve (loss.png), a log with a JSON object a line
// (log.jsonl) and a text drawn from the model (sample.txt), and compares the model's bits per byte with those of an order-2
// byte model and of gzip -9 on the same held-out text. The last line that it prints is a JSON object with the results.
//
// An interrupt (Ctrl-C) saves a checkpoint before it ends the run; a second one ends it at once. With -resume, options that
// are not given are those of the checkpoint, and the run continues as if it had never stopped, bit for bit. Options that are
// given may differ, which the program then says: a run planned for 20 steps goes on with -resume -steps 40, but with
// the learning rates and the growth of the longer plan, so that it does not end where 40 steps at a stretch do.
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
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

const (
	checkpointName = "model.safetensors"
	quickBytes     = 64 << 10 // of held-out text, for evaluations before the last step
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the next signal does what it does to other programs
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "transformer:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	train, heldOut, err := openData(o, stderr)
	if err != nil {
		return err
	}
	device, err := openDevice(o, stderr)
	if err != nil {
		return err
	}
	if device != nil {
		defer device.Close()
		o.train.Engine = gpu.Engine(device, precisions[o.precision])
	}
	t, err := newTrainer(o, train)
	if err != nil {
		return err
	}
	defer t.Close()
	if o.resume.set {
		var settings []string
		if err := t.Resume(o.resume.path, llm.WithNewSettings(func(d []string) { settings = d })); err != nil {
			return err
		}
		fmt.Fprintf(stderr, "resuming  %s at step %d\n%s", o.resume.path, t.Step(), o.explain(settings))
	}
	baselines, err := score(ctx, train, heldOut, stderr)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(o.out, 0o777); err != nil {
		return err
	}
	if err := addCallbacks(t, o, heldOut, stderr); err != nil {
		return err
	}
	if err := t.Run(ctx); errors.Is(err, context.Canceled) {
		return fmt.Errorf("%w at step %d; -resume goes on from there", err, t.Step())
	} else if err != nil {
		return err
	}
	return report(o, t.Last(), baselines, stdout)
}

func addCallbacks(t *llm.Trainer, o options, heldOut []byte, stderr io.Writer) error {
	var texts [2]*llm.Evaluation
	for i, text := range [][]byte{heldOut, thin(heldOut)} {
		var err error
		if texts[i], err = llm.NewEvaluation(text, llm.ByteTokenizer{}, o.train.Batch, o.model.Seq); err != nil {
			return err
		}
	}
	if o.kasmina {
		t.On(grow(t.Model, t.Config.Epoch))
	}
	in := func(name string) string { return filepath.Join(o.out, name) }
	t.On(
		llm.Progress(stderr),
		llm.JSONLog(in("log.jsonl")),
		llm.LossCurve(in("loss.png"), in("log.jsonl")),
		llm.Evaluate(t, texts[0], o.evalEvery, llm.WithQuick(texts[1])),
		llm.Checkpoint(t, in(checkpointName), o.saveEvery),
		llm.SampleText(t, llm.ByteTokenizer{}, o.prompt, o.sample, o.sampler, in("sample.txt"), 0),
	)
	return nil
}

// thin returns a text of at most quickBytes, or else so many of them in pieces spread evenly over it.
func thin(text []byte) []byte {
	const piece, pieces = 4 << 10, quickBytes / (4 << 10)
	if len(text) <= quickBytes {
		return text
	}
	thinned := make([]byte, 0, quickBytes)
	for i := range pieces {
		at := i * (len(text) - piece) / (pieces - 1)
		thinned = append(thinned, text[at:at+piece]...)
	}
	return thinned
}

// openData returns the text to train on and the held-out text to score.
func openData(o options, stderr io.Writer) (*llm.Text, []byte, error) {
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
	fmt.Fprintf(stderr, "data      %s: %.1f MB in %d files to train on, %.0f kB held out\n",
		path, float64(corpus.Train.Size())/1e6, corpus.Train.Documents(), float64(len(heldOut))/1e3)
	return corpus.Train, heldOut, nil
}

type baselines struct{ order2, gzip float64 }

// untilDone reads until the context ends.
type untilDone struct {
	ctx context.Context
	io.Reader
}

func (r untilDone) Read(p []byte) (int, error) {
	if err := context.Cause(r.ctx); err != nil {
		return 0, err
	}
	return r.Reader.Read(p)
}

// score measures what simpler models make of the held-out text, in bits per byte.
func score(ctx context.Context, train *llm.Text, heldOut []byte, stderr io.Writer) (b baselines, err error) {
	m, err := llm.TrainOrder2(untilDone{ctx, train.Reader()}, nil)
	if err != nil {
		return b, err
	}
	if b.order2, err = m.BitsPerByte(heldOut); err != nil {
		return b, err
	}
	if b.gzip, err = llm.GzipBitsPerByte(heldOut); err != nil {
		return b, err
	}
	fmt.Fprintf(stderr, "to beat   order-2 model %.3f bits per byte, gzip -9 %.3f\n", b.order2, b.gzip)
	return b, nil
}

var precisions = map[string]cudaops.Precision{"bf16": cudaops.BFloat16, "f16": cudaops.Float16, "f32": cudaops.Float32}

// openDevice returns the GPU to train on, nil for the CPU.
func openDevice(o options, stderr io.Writer) (*cudaops.Device, error) {
	if o.device == "cpu" {
		return nil, nil
	}
	device, err := cudaops.Open()
	switch {
	case err == nil:
		fmt.Fprintf(stderr, "device    %v, %s\n", device, o.precision)
		return device, nil
	case o.device == "auto" && errors.Is(err, cudaops.ErrNoDevice):
		return nil, nil
	case o.device == "auto":
		fmt.Fprintf(stderr, "device    the CPU, as the GPU cannot be used: %v\n", err)
		return nil, nil
	}
	return nil, err
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
	adamw := []optim.AdamWOption{optim.WithBetas(0.9, 0.95), optim.WithWeightDecay(0.1),
		optim.WithGroup(optim.NameContains("norm", "kasmina"), optim.Decay(0))}
	if o.optimizer == "adamw" {
		lr := rate(3e-3)
		a, err := optim.NewAdamW(append(adamw, optim.WithLR(lr))...)
		return a, lr, err
	}
	lr := rate(0.02)
	m, err := optim.NewMuon(optim.WithLR(lr), optim.WithAdamW(append(adamw, optim.WithLR(lr*0.15))...))
	return m, lr, err
}

// report prints the comparison and, on the last line, the results as JSON.
func report(o options, e llm.Event, b baselines, stdout io.Writer) error {
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
	_, err = fmt.Fprintf(stdout, "\n%-28s %s\n%-28s %.3f\n%-28s %.3f\n%-28s %.3f\n\n%s\n", "on the same held-out text", "bits per byte",
		"this model", e.ValBPB, "order-2 byte model", b.order2, "gzip -9", b.gzip, line)
	return err
}
