// Command bench times whole training steps and prints one JSON line for each: name, microseconds, TFLOP/s, tokens per second
// and memory.
//
//	go run ./examples/bench                    # every model, on the GPU, in bfloat16
//	go run ./examples/bench -models llama124M  # some of them
//
// A step is everything from token ids on the host to updated weights, and the loss back on the host. Times are medians.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/optim"
)

// size is a model and its batch.
type size struct {
	name   string
	config llm.Config
	batch  int
}

var sizes = []size{
	{"llama124M", llm.Config{Vocab: 50304, Dim: 768, Layers: 12, Heads: 12, FF: 2048, Seq: 1024}, 32},
	{"llama350M", llm.Config{Vocab: 50304, Dim: 1024, Layers: 24, Heads: 16, FF: 2816, Seq: 1024}, 16},
	{"llama925M", llm.Config{Vocab: 50304, Dim: 2048, Layers: 16, Heads: 16, FF: 5632, Seq: 2048}, 8},
}

// result is a line of output.
type result struct {
	Bench    string  `json:"bench"`
	Peer     string  `json:"peer"`
	Us       float64 `json:"us"`
	TFLOPs   float64 `json:"tflops"`
	TokensPS int     `json:"tok_s"`
	Params   int     `json:"params"`
	PeakGiB  float64 `json:"peak_gib"`
	Loss     float64 `json:"loss"` // of the last step
}

func main() {
	models := flag.String("models", "llama124M,llama350M,llama925M", "which models, separated by commas")
	steps := flag.Int("steps", 20, "steps to time")
	precision := flag.String("precision", "bf16", "bf16 or f32")
	muon := flag.Bool("muon", false, "train with Muon instead of AdamW")
	profile := flag.Bool("profile", false, "also print, to standard error, what each op of a step took")
	batch := flag.Int("batch", 0, "sequences in a batch (default: the model's own)")
	flag.Parse()
	if err := run(strings.Split(*models, ","), *steps, *precision, *muon, *profile, *batch); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(models []string, steps int, precision string, muon, profile bool, batch int) error {
	p, ok := map[string]cudaops.Precision{"bf16": cudaops.BFloat16, "f32": cudaops.Float32}[precision]
	if !ok || steps < 1 {
		return fmt.Errorf("-precision is %q and -steps %d, want bf16 or f32, and at least 1", precision, steps)
	}
	device, err := cudaops.Open()
	if err != nil {
		return err
	}
	defer device.Close()
	fmt.Fprintln(os.Stderr, device)
	for _, s := range sizes {
		if !slices.Contains(models, s.name) {
			continue
		}
		if batch > 0 {
			s.batch = batch
		}
		r, err := s.train(device, steps, p, muon, profile)
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		line, err := json.Marshal(r)
		if err != nil {
			return err
		}
		fmt.Println(string(line))
	}
	return nil
}

// train times steps of training on random tokens.
func (s size) train(device *cudaops.Device, steps int, precision cudaops.Precision, muon, profile bool) (r result, err error) {
	c := s.config.Default()
	m, err := llm.NewModel(c, tensor.Float32, 1)
	if err != nil {
		return r, err
	}
	g, err := m.Graph(llm.ForTraining, s.batch)
	if err != nil {
		return r, err
	}
	machine, err := cudaops.NewMachine(device, g.G, cudaops.WithParams(g.Params...), cudaops.WithOutputs(g.Loss),
		cudaops.WithPrecision(precision), cudaops.WithStrict())
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, machine.Close()) }()
	opt, err := newOptimizer(muon)
	if err != nil {
		return r, err
	}
	if err := machine.SetOptimizer(opt, 1); err != nil {
		return r, err
	}
	random := rand.New(rand.NewPCG(1, 1))
	var times []float64
	for i := range steps + 5 {
		if err := letTokens(random, c.Vocab, g.IDs, g.Targets); err != nil {
			return r, err
		}
		start := time.Now()
		if r.Loss, err = step(machine, g.Loss); err != nil {
			return r, err
		}
		if i >= 5 {
			times = append(times, time.Since(start).Seconds())
		}
	}
	if profile {
		if err := printProfile(machine); err != nil {
			return r, err
		}
	}
	slices.Sort(times)
	median, tokens, n := times[len(times)/2], float64(s.batch*c.Seq), m.NumParams()
	flops := tokens * (6*float64(n) + 6*float64(c.Layers*c.Dim*c.Seq)) // causal attention counted at half
	r.Bench, r.Peer, r.Params = "train_"+s.name, "kasmina", n
	r.Us, r.TFLOPs, r.TokensPS = math.Round(median*1e6), math.Round(flops/median/1e11)/10, int(tokens/median)
	r.PeakGiB = math.Round(float64(machine.Memory())/(1<<30)*100) / 100
	return r, nil
}

// printProfile prints what each op took.
func printProfile(m *cudaops.Machine) error {
	ops, err := m.Profile()
	if err != nil {
		return err
	}
	for _, o := range ops {
		fmt.Fprintf(os.Stderr, "%-28s %4d tasks %10v\n", o.Op, o.Tasks, o.Time.Round(time.Microsecond))
	}
	return nil
}

func newOptimizer(muon bool) (optim.Optimizer, error) {
	if muon {
		return optim.NewMuon(optim.WithLR(0.002))
	}
	return optim.NewAdamW(optim.WithLR(3e-4))
}

// step computes loss and gradients, updates the parameters and returns the loss.
func step(m *cudaops.Machine, loss *gorgonia.Node) (float64, error) {
	if err := m.RunAll(); err != nil {
		return 0, err
	}
	if _, err := m.Update(); err != nil {
		return 0, err
	}
	v, err := m.Value(loss)
	if err != nil {
		return 0, err
	}
	return float64(v.Data().(float32)), nil
}

// letTokens gives ids and targets random tokens.
func letTokens(r *rand.Rand, vocab int, nodes ...*gorgonia.Node) error {
	for _, n := range nodes {
		x := make([]int, n.Shape()[0])
		for i := range x {
			x[i] = r.IntN(vocab)
		}
		if err := gorgonia.Let(n, tensor.New(tensor.WithShape(len(x)), tensor.WithBacking(x))); err != nil {
			return err
		}
	}
	return nil
}
