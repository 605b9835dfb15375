// Package forgetting measures how much a model forgets while it learns a new kind of text, for the
// program bench.
//
// It trains a small base model on the sources of Go, fine-tunes it on English prose with different methods,
// and records the losses on held-out text of both kinds during each run. A method is better than another if
// it forgets less at the same loss on the new text, whatever learning rate and number of steps it needs.
package forgetting

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// config describes the base model, a model of bytes.
var config = llm.Config{Vocab: 256, Dim: 128, Layers: 5, Heads: 4, Seq: 128}

const (
	batch = 8 // sequences per step

	// alphaPerRank is alpha/rank of LoRA. rsLoRA has the alpha of rank 16.
	alphaPerRank = 2
	chunkRank    = 64 // rank of the chunk seeds
)

// An arm is a method of tuning, with its settings.
type arm struct {
	name  string
	rates []float64
	rank  int  // rank of the adapters; 0 without adapters
	rs    bool // rank-stabilized
	grows bool // the ranks grow
	old   bool // directions that the old text uses are avoided
	fixed bool // the matrices a are fixed once their directions have been chosen
	chunk bool // chunk seeds
	mixed bool // a tenth of the text to learn is old text
}

// plain reports whether the arm is LoRA as most people use it, with which the other arms are compared.
func (a arm) plain() bool { return a.rank > 0 && !a.rs && !a.grows && !a.mixed }

// arms returns all methods of tuning, with at least three learning rates each. If the matrices a are fixed, only half
// of the parameters learn, so a fourth and higher rate is added.
func arms() []arm {
	adapter, weights := []float64{1e-3, 3e-3, 1e-2}, []float64{1e-4, 3e-4, 1e-3}
	return []arm{
		{name: "LoRA r4", rank: 4, rates: adapter},
		{name: "LoRA r16", rank: 16, rates: adapter},
		{name: "LoRA r64", rank: 64, rates: adapter},
		{name: "rsLoRA r64", rank: 64, rs: true, rates: adapter},
		{name: "LoRA r16, a tenth old text", rank: 16, mixed: true, rates: adapter},
		{name: "all weights", rates: weights},
		{name: "growing", rank: 16, grows: true, rates: adapter},
		{name: "growing, old text", rank: 16, grows: true, old: true, rates: adapter},
		{name: "growing, old text, fixed a", rank: 16, grows: true, old: true, fixed: true, rates: append(adapter, 3e-2)},
		{name: "growing, old text, fixed a, a tenth old text", rank: 16, grows: true, old: true, fixed: true, mixed: true,
			rates: append(adapter, 3e-2)},
		{name: "chunk seeds", chunk: true, rates: adapter},
	}
}

type options struct {
	out                     string
	seeds                   []uint64
	baseSteps, steps, every int
	arms                    string
	atOnce                  int
	redraw                  bool
}

// A record is the result of a run, a line of runs.jsonl.
type record struct {
	Arm     string  `json:"arm"`
	Rate    float64 `json:"rate"`
	Seed    uint64  `json:"seed"`
	Params  int     `json:"params"`
	Base    point   `json:"base"`
	Points  []point `json:"points"`
	Seconds float64 `json:"seconds"`
}

// A point holds held-out losses in nats per byte.
type point struct {
	Step int     `json:"step"`
	New  float64 `json:"new"`
	Old  float64 `json:"old"`
}

// Run makes the runs that are missing in the folder -out, prints a table and draws a picture. The last line of
// output is a JSON object.
func Run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o := options{}
	f := flag.NewFlagSet("forgetting", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&o.out, "out", filepath.Join("runs", "forgetting"), "`folder` for the base model, the record of the "+
		"runs, and the picture; runs that it has already are not repeated")
	seeds := f.String("seeds", "1,2,3", "random `seeds` of the adapters and the order of the data")
	f.IntVar(&o.baseSteps, "base-steps", 1000, "steps of the base model")
	f.IntVar(&o.steps, "steps", 60, "steps of tuning")
	f.IntVar(&o.every, "every", 20, "steps between two measurements")
	f.StringVar(&o.arms, "arms", "", "methods of tuning whose names contain one of these `words`, separated by commas "+
		"(default: all)")
	f.IntVar(&o.atOnce, "at-once", 1, "number of simultaneous runs")
	f.BoolVar(&o.redraw, "redraw", false, "train nothing, and report the runs that exist")
	if err := f.Parse(args); err != nil {
		return err
	}
	if o.baseSteps < 1 || o.steps < 1 || o.every < 1 || o.atOnce < 1 {
		return errors.New("-base-steps, -steps, -every and -at-once must be at least 1")
	}
	for word := range strings.SplitSeq(*seeds, ",") {
		seed, err := strconv.ParseUint(word, 10, 64)
		if err != nil || seed == 0 {
			return fmt.Errorf("-seeds is %q, want positive numbers separated by commas, such as 1,2,3", *seeds)
		}
		o.seeds = append(o.seeds, seed)
	}

	if err := os.MkdirAll(o.out, 0o777); err != nil {
		return err
	}
	records, err := readRecords(o.in("runs.jsonl"))
	if err != nil {
		return err
	}
	if !o.redraw {
		if records, err = o.train(ctx, records, stderr); err != nil {
			return err
		}
	}
	return report(o.in("forgetting.png"), records, stdout)
}

func (o options) in(name string) string { return filepath.Join(o.out, name) }

// readRecords reads the records of earlier runs. A line that a killed process left incomplete is skipped.
func readRecords(path string) (all []record, err error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	for line := range strings.Lines(string(text)) {
		var r record
		if json.Unmarshal([]byte(line), &r) == nil && r.Arm != "" {
			all = append(all, r)
		}
	}
	return all, err
}

// train makes the runs without a record.
func (o options) train(ctx context.Context, records []record, stderr io.Writer) ([]record, error) {
	texts, err := openTexts(ctx)
	if err != nil {
		return nil, err
	}

	file, err := os.OpenFile(o.in("runs.jsonl"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o666)
	if err != nil {
		return nil, err
	}
	defer file.Close()

	// A killed process may have left its last line incomplete, so end this line.
	if _, err := file.Write([]byte{'\n'}); err != nil {
		return nil, err
	}

	base, err := o.base(ctx, texts, stderr)
	if err != nil {
		return nil, err
	}

	running, cancel := context.WithCancel(ctx) // until a run fails
	defer cancel()
	var mu sync.Mutex // guards records and file
	tune := func(n run) error {
		r, err := o.tune(running, texts, base, n.arm, n.rate, n.seed)
		if err != nil {
			return fmt.Errorf("%s at %v: %w", n.arm.name, n.rate, err)
		}
		line, err := json.Marshal(r)
		if err != nil {
			return err
		}

		mu.Lock()
		defer mu.Unlock()
		if _, err := file.Write(append(line, '\n')); err != nil {
			return err
		}
		records = append(records, r)
		last := r.Points[len(r.Points)-1]
		fmt.Fprintf(stderr, "seed %d  %-28s rate %-6v new %.4f (from %.4f)  old %+.4f  %d parameters, %.0f s\n", r.Seed,
			r.Arm, r.Rate, last.New, r.Base.New, last.Old-r.Base.Old, r.Params, r.Seconds)
		return nil
	}

	queue := make(chan run)
	errs := make([]error, o.atOnce)
	var workers sync.WaitGroup
	for i := range errs {
		workers.Go(func() {
			for n := range queue {
				if errs[i] = tune(n); errs[i] != nil {
					cancel()
					return
				}
			}
		})
	}
	for _, n := range o.missing(records) {
		select {
		case queue <- n:
		case <-running.Done():
		}
	}
	close(queue)
	workers.Wait()
	return records, errors.Join(append(errs, ctx.Err())...)
}

// A run tunes the base model in one way.
type run struct {
	arm  arm
	rate float64
	seed uint64
}

// missing returns the selected runs that have no record.
func (o options) missing(records []record) (all []run) {
	words := strings.Split(o.arms, ",") // a single empty word, which every name contains, by default
	for _, seed := range o.seeds {
		for _, a := range arms() {
			if !slices.ContainsFunc(words, func(w string) bool { return strings.Contains(a.name, w) }) {
				continue
			}
			for _, rate := range a.rates {
				if !slices.ContainsFunc(records, func(r record) bool {
					return r.Arm == a.name && r.Rate == rate && r.Seed == seed
				}) {
					all = append(all, run{a, rate, seed})
				}
			}
		}
	}
	return all
}

// texts holds the two kinds of text.
type texts struct {
	old, new         data.Tokens
	heldOld, heldNew *data.Evaluation // for measurements
	listen           *data.Evaluation // old text that growing adapters listen to
}

// openTexts reads the sources of Go, and Newton's Opticks, which is among them.
func openTexts(ctx context.Context) (t texts, err error) {
	source, err := data.GoSource()
	if err != nil {
		return t, err
	}
	code, err := data.Open(source, data.WithExtensions(".go"))
	if err != nil {
		return t, err
	}
	prose, err := data.Open(filepath.Join(source, "testdata", "Isaac.Newton-Opticks.txt"), data.WithHeldOut(0.1))
	if err != nil {
		return t, err
	}

	bytes := tokenizer.Bytes{}
	if t.old, err = data.Tokenize(ctx, code.Train, bytes); err != nil {
		return t, err
	}
	if t.new, err = data.Tokenize(ctx, prose.Train, bytes); err != nil {
		return t, err
	}

	for _, e := range []struct {
		text *data.Text
		into **data.Evaluation
	}{{code.HeldOut, &t.heldOld}, {prose.HeldOut, &t.heldNew}, {code.Train, &t.listen}} {
		sample, err := e.text.Sample(4*batch*config.Seq + 1)
		if err != nil {
			return t, err
		}
		if *e.into, err = data.NewEvaluation(sample, bytes, batch, config.Seq); err != nil {
			return t, err
		}
	}
	return t, nil
}

// A mixture is a new text followed by the beginning of an old text. The old text has a tenth of the tokens.
type mixture struct {
	data.Tokens // the new text
	old         data.Tokens
}

// Len implements [data.Tokens].
func (m mixture) Len() int64 { return m.Tokens.Len() + m.Tokens.Len()/9 }

// Fingerprint implements [data.Tokens].
func (m mixture) Fingerprint() string { return m.Tokens.Fingerprint() + "+" + m.old.Fingerprint() }

// ReadTokens implements [data.Tokens].
func (m mixture) ReadTokens(dst []int, offset int64) error {
	n := min(max(0, m.Tokens.Len()-offset), int64(len(dst))) // tokens of the new text
	if n > 0 {
		if err := m.Tokens.ReadTokens(dst[:n], offset); err != nil {
			return err
		}
	}
	if n == int64(len(dst)) {
		return nil
	}
	return m.old.ReadTokens(dst[n:], offset+n-m.Tokens.Len())
}

// base returns the base model of all runs. It loads the model if an earlier command has saved it, and
// trains it otherwise.
func (o options) base(ctx context.Context, t texts, stderr io.Writer) (*llm.Model, error) {
	const seed = 1
	path := o.in("base.safetensors")
	if _, err := os.Stat(path); err == nil {
		return llm.LoadModel(ctx, path)
	}

	began := time.Now()
	m, err := llm.NewModel(config.Default(), tensor.Float32, seed)
	if err != nil {
		return nil, err
	}
	loader, err := data.NewLoader(t.old, data.LoaderConfig{Batch: batch, Seq: config.Seq, Seed: seed})
	if err != nil {
		return nil, err
	}
	optimizer, err := optim.NewMuon(optim.WithLR(0.02), optim.WithAdamW(optim.WithLR(0.003)))
	if err != nil {
		return nil, err
	}
	trainer, err := llm.NewTrainer(m, loader, optimizer, llm.TrainConfig{Steps: o.baseSteps, Batch: batch, Clip: 1,
		Schedule: falling(0.02, o.baseSteps)})
	if err != nil {
		return nil, err
	}
	if err := errors.Join(trainer.Run(ctx), trainer.Close()); err != nil {
		return nil, err
	}
	fmt.Fprintf(stderr, "base model of %d parameters: loss %.4f, %.0f s\n", m.NumParams(), trainer.Last().Loss,
		time.Since(began).Seconds())
	return m, m.Save(path)
}

// falling returns a schedule that rises for a twentieth of the steps and then falls linearly.
func falling(rate float64, steps int) optim.Schedule {
	warmup := max(1, steps/20)
	return func(step int) float64 {
		if step < warmup {
			return rate * float64(step+1) / float64(warmup+1)
		}
		return rate * float64(steps-step) / float64(steps-warmup)
	}
}

// tune tunes the base model in one way.
func (o options) tune(ctx context.Context, t texts, base *llm.Model, a arm, rate float64, seed uint64) (r record,
	err error) {
	began := time.Now()
	m, err := a.model(base, seed)
	if err != nil {
		return r, err
	}
	text := t.new
	if a.mixed {
		text = mixture{t.new, t.old}
	}
	loader, err := data.NewLoader(text, data.LoaderConfig{Batch: batch, Seq: config.Seq, Seed: seed})
	if err != nil {
		return r, err
	}

	opts := []optim.AdamWOption{optim.WithLR(rate), optim.WithWeightDecay(0)}
	switch {
	case a.fixed:
		opts = append(opts, optim.WithGroup(optim.NameContains("lora_A"), optim.LRScale(0)))
	case a.chunk: // the host stays as it is
		host := func(name string, _ []int) bool { return !strings.Contains(name, "kasmina") }
		opts = append(opts, optim.WithGroup(host, optim.LRScale(0)))
	}
	optimizer, err := optim.NewAdamW(opts...)
	if err != nil {
		return r, err
	}

	trainer, err := llm.NewTrainer(m, loader, optimizer, llm.TrainConfig{Steps: o.steps, Batch: batch, Clip: 1,
		Schedule: falling(rate, o.steps)})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, trainer.Close()) }()
	if a.grows {
		c := llm.RankGrowthConfig{Batches: 4}
		if a.old {
			c.Old = t.listen
		}
		growth, err := llm.NewRankGrowth(c)
		if err != nil {
			return r, err
		}
		if err := trainer.Use(growth); err != nil {
			return r, err
		}
	}

	measure := func() (p point, err error) {
		p.Step = trainer.Step()
		if p.New, _, err = trainer.Evaluate(t.heldNew); err == nil {
			p.Old, _, err = trainer.Evaluate(t.heldOld)
		}
		return p, err
	}
	r = record{Arm: a.name, Rate: rate, Seed: seed}
	if r.Base, err = measure(); err != nil {
		return r, err
	}
	trainer.On(func(e llm.Event) error {
		if e.Kind != llm.StepEnd || !e.Last && e.Step%o.every != 0 && e.Step != o.every/2 {
			return nil
		}
		p, err := measure()
		r.Points = append(r.Points, p)
		return err
	})
	if err := trainer.Run(ctx); err != nil {
		return r, err
	}

	r.Params, r.Seconds = trainer.Last().Params, time.Since(began).Seconds()
	if a.chunk {
		r.Params = 2 * chunkRank * config.Dim * config.Layers
	}
	return r, nil
}

// model returns a model to tune with the same outputs as the base model. It does not modify the base
// model.
func (a arm) model(base *llm.Model, seed uint64) (*llm.Model, error) {
	c := base.Config
	if a.chunk {
		c.Seeds, c.Slots, c.SlotWidth = 1, 2, 2*chunkRank*c.Dim
		for i := range c.Layers {
			c.Kasmina = append(c.Kasmina, i)
		}
	}
	m, err := llm.NewModelFrom(c, tensor.Float32, func(p llm.Param) error {
		if from := base.Param(p.Name); from != nil {
			copy(p.Value.Float32s(), from.Float32s())
		}
		return nil
	}, state.WithoutGates())
	if err != nil {
		return nil, err
	}

	if a.chunk {
		for layer := range c.Kasmina {
			commands := []state.Command{{Action: state.Germinate, Layer: layer,
				Request: state.GerminationRequest{Slot: 1, Kind: blueprints.LowRank}}}
			for _, to := range []state.Stage{state.Training, state.Grafting, state.Stabilization, state.Evaluating,
				state.FineTuning} {
				commands = append(commands, state.Command{Action: state.Move, Layer: layer, To: to})
			}
			if err := m.Kasmina.Do(commands...); err != nil {
				return nil, err
			}
		}
		return m, nil
	}
	if a.rank == 0 {
		return m, nil
	}

	targets, err := c.MatchLayers(llm.AllLinear)
	if err != nil {
		return nil, err
	}
	lora := llm.LoRA{Rank: a.rank, Alpha: alphaPerRank * float64(a.rank), Targets: targets, RankStabilized: a.rs,
		Growing: a.grows}
	if a.rs {
		lora.Alpha = alphaPerRank * 16
	}
	return llm.Adapt(m, lora, seed)
}
