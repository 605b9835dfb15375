// Command grow trains the same small language model twice from one random seed, on the same
// batches: as it is, and with a controller that lets it grow where its activations are unhealthy.
// It shows what happens to the seeds as it happens, and ends with a comparison of the two and a
// picture of every seed's stages. A log of each run, with a JSON object a line, stands beside its
// model.
//
//	go run ./examples/grow                   # about two minutes on two cores, on the Go source tree
//	go run ./examples/grow -data ~/notes -runs 3
//	go run ./examples/grow -dry-run          # says what the controller would do, and does nothing
//
// Both models are judged on held-out text that neither the training nor the controller has seen.
// The last line that it prints is a JSON object with the results.
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
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/runlog"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "grow:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(o.out, 0o777); err != nil {
		return err
	}
	text, err := openText(ctx, o)
	if err != nil {
		return err
	}
	fmt.Fprintf(stderr, "data      %s: %.1f MB to train on\n", text.path, float64(text.train.Size())/1e6)
	device, err := openDevice(o.device, stderr)
	if err != nil {
		return err
	}
	if device != nil {
		defer device.Close()
	}
	var results []comparison
	for r := range o.runs {
		c := comparison{Seed: o.seed + uint64(r)}
		if c.Plain, err = train(ctx, o, text, device, c.Seed, false, stderr); err != nil {
			return err
		}
		if c.Grown, err = train(ctx, o, text, device, c.Seed, true, stderr); err != nil {
			return err
		}
		results = append(results, c)
	}
	return report(stdout, results)
}

// comparison is what has become of one random seed.
type comparison struct {
	Seed  uint64 `json:"seed"`
	Plain result `json:"plain"`
	Grown result `json:"grown"`
}

type result struct {
	Loss       float64 `json:"val_loss"`   // nats a byte of held-out text
	Parameters int     `json:"parameters"` // slots that no living blueprint uses not included
	Seconds    float64 `json:"seconds"`
	Fossilized int     `json:"fossilized"`
	Given      int     `json:"given_up"` // blueprints that were culled, cancelled or rolled back
}

// train trains one of the two models.
func train(ctx context.Context, o options, text *corpus, device *cudaops.Device, seed uint64, grown bool, stderr io.Writer) (r result, err error) {
	t, err := newTrainer(o, text, device, seed, grown)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	addCallbacks(t, o, seed, grown, stderr)
	var h *history
	if grown {
		if h, err = follow(t, o, text, &r, stderr); err != nil {
			return r, err
		}
		t.On(h.observe)
	}
	start := time.Now()
	if err := t.Run(ctx); err != nil {
		return r, err
	}
	r.Seconds = math.Round(10*time.Since(start).Seconds()) / 10
	if r.Loss, _, err = t.Evaluate(text.test); err != nil {
		return r, err
	}
	r.Parameters = inUse(t.Model)
	if grown {
		path := filepath.Join(o.out, fmt.Sprintf("lattice-%d.png", seed))
		if err := h.draw(path, fmt.Sprintf("Stages of all seeds, random seed %d", seed)); err != nil {
			return r, err
		}
		fmt.Fprintf(stderr, "picture   %s\n", path)
	}
	return r, t.Model.Save(filepath.Join(o.out, fmt.Sprintf("%s-%d.safetensors", name(grown), seed)))
}

// addCallbacks shows a run, logs it, and looks after its seeds.
func addCallbacks(t *llm.Trainer, o options, seed uint64, grown bool, stderr io.Writer) {
	log := filepath.Join(o.out, fmt.Sprintf("%s-%d.jsonl", name(grown), seed))
	t.On(progress(t, stderr, grown), runlog.JSON(log))
	if o.scrub > 0 {
		t.On(llm.Scrub(t, stderr, o.scrub))
	}
}

func name(grown bool) string {
	if grown {
		return "grown"
	}
	return "plain"
}

func newTrainer(o options, text *corpus, device *cudaops.Device, seed uint64, grown bool) (*llm.Trainer, error) {
	c := o.model
	if !grown {
		c.Kasmina, c.Seeds, c.Slots, c.SlotWidth = nil, 0, 0, 0
	}
	m, err := llm.NewModel(c, tensor.Float32, seed, state.WithThresholds(o.thresholds), state.WithEmbargo(o.embargo))
	if err != nil {
		return nil, err
	}
	loader, err := data.NewLoader(text.tokens, data.LoaderConfig{Batch: o.train.Batch, Seq: c.Seq, Seed: seed})
	if err != nil {
		return nil, err
	}
	peak := o.lr
	opt, err := optim.NewAdamW(optim.WithLR(peak), optim.WithBetas(0.9, 0.95), optim.WithWeightDecay(0.1),
		optim.WithGroup(optim.NameContains("norm", "kasmina"), optim.Decay(0)))
	if err != nil {
		return nil, err
	}
	if o.train.Schedule, err = optim.WarmupCosine(peak, peak/20, o.train.Steps/20, o.train.Steps); err != nil {
		return nil, err
	}
	if device != nil {
		o.train.Engine = gpu.Engine(device, cudaops.Float32)
	}
	return llm.NewTrainer(m, loader, opt, o.train)
}

// inUse is the number of a model's parameters without the slots that no living blueprint uses.
func inUse(m *llm.Model) int {
	n := m.NumParams()
	for _, r := range m.Kasmina.Report() {
		used := map[int]bool{}
		for _, s := range r.Seeds {
			if s.Stage > state.Dormant && !s.Stage.Ended() {
				used[s.Slot] = true
			}
		}
		n -= (r.Slots - len(used)) * r.SlotParameters
	}
	return n
}

func openDevice(device string, stderr io.Writer) (*cudaops.Device, error) {
	if device == "cpu" {
		return nil, nil
	}
	d, err := cudaops.Open()
	switch {
	case err == nil:
		fmt.Fprintf(stderr, "device    %v\n", d)
		return d, nil
	case device == "auto":
		if !errors.Is(err, cudaops.ErrNoDevice) {
			fmt.Fprintf(stderr, "device    the CPU, as the GPU cannot be used: %v\n", err)
		}
		return nil, nil
	}
	return nil, err
}

// report prints the table and, on the last line, the results as JSON.
func report(stdout io.Writer, results []comparison) error {
	fmt.Fprintf(stdout, "\n%-12s %-6s %16s %11s %8s   %s\n", "random seed", "model", "validation loss", "parameters", "seconds", "blueprints")
	for _, c := range results {
		for _, grown := range []bool{false, true} {
			r, fate := c.Plain, ""
			if grown {
				r = c.Grown
				fate = fmt.Sprintf("%d fossilized, %d given up", r.Fossilized, r.Given)
			}
			fmt.Fprintf(stdout, "%-12d %-6s %16.4f %11d %8.1f   %s\n", c.Seed, name(grown), r.Loss, r.Parameters, r.Seconds, fate)
		}
	}
	line, err := json.Marshal(results)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(stdout, "\n%s\n", line)
	return err
}
