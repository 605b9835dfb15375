package growth

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/board"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/regular"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/runlog"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// An experiment holds the common settings of its runs.
type experiment struct {
	options
	ctx    context.Context
	text   *corpus
	device *cudaops.Device // nil for the CPU
	board  *board.Board    // or nil
	w      io.Writer
	best   float64 // learning rate of the static runs; 0 until it is known
}

// A point is an evaluation: the share of the static budget and the held-out loss in nats per byte.
type point struct {
	share, loss   float64
	blocks, trial int // blocks of the model, and blocks on trial
}

// A trained value holds the result of a run.
type trained struct {
	rate    float64
	loss    float64 // held out, in nats per byte
	params  int
	steps   int
	flops   float64 // as llm.Config.FLOPs counts them
	seconds float64 // spent on steps, decisions and growth
	curve   []point

	evaluating time.Duration
}

// A comparison holds the two runs of a random seed. With -only, one of them is nil.
type comparison struct {
	seed          uint64
	static, grown *trained
}

// compare trains the two models of a random seed. The first seed tries all learning rates.
func (e *experiment) compare(seed uint64, first bool) (c comparison, err error) {
	c.seed = seed
	rates := e.rates
	if !first && e.best > 0 {
		rates = []float64{e.best}
	}

	if e.only != "grown" {
		for _, lr := range rates {
			r, err := e.train(seed, lr, false, "")
			if err != nil {
				return c, err
			}
			if c.static == nil || r.loss < c.static.loss {
				c.static, e.best = r, lr
			}
		}
	}

	if e.only == "static" {
		return c, nil
	}

	lr, replay := e.best, ""
	if lr == 0 {
		lr = e.rates[0]
	}

	if first {
		replay = e.replay
	}

	c.grown, err = e.train(seed, lr, true, replay)
	return c, err
}

// train trains one model.
func (e *experiment) train(seed uint64, lr float64, grown bool,
	replay string) (r *trained, err error) {
	name := fmt.Sprintf("static-%d-%g", seed, lr)
	if grown {
		name = fmt.Sprintf("grown-%d", seed)
	}

	t, err := e.trainer(seed, lr, grown)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()

	if grown {
		record, err := e.grow(t, name, replay)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, record.Close()) }()
	}

	r = &trained{rate: lr}
	t.On(e.follow(t, r, name, grown), runlog.JSON(filepath.Join(e.out, name+".jsonl")))
	if e.board != nil {
		if err := e.board.Watch(t, name); err != nil {
			return nil, err
		}
	}

	if err := t.Run(e.ctx); err != nil {
		return nil, err
	}

	last := t.Last()
	r.params, r.steps, r.flops = last.Params, last.Step, last.Spent.FLOPs
	r.seconds = (last.Elapsed - r.evaluating).Seconds()
	if last.Spent.Time > 0 {
		r.seconds = last.Spent.Time.Seconds()
	}

	return r, t.Model.Save(filepath.Join(e.out, name+".safetensors"))
}

// grow lets a trainer follow the controller or a record, and records the decisions.
func (e *experiment) grow(t *llm.Trainer, name, replay string) (*os.File, error) {
	g := llm.Growth{Controller: e.controller}
	if e.elsewhere() {
		g.Controller, g.Validation, g.Every = e.seedController(t), e.text.validation, 4
		if e.grows("depth") { // the curve needs a point in each epoch
			g.Controller, g.Every = control.Together(e.controller, g.Controller), 1
		}
	}

	if replay != "" {
		f, _, err := regular.Open(replay)
		if err != nil {
			return nil, err
		}
		g.Replay, err = llm.ReadRecord(f)
		if err := errors.Join(err, f.Close()); err != nil {
			return nil, fmt.Errorf("%s: %w", replay, err)
		}
	}

	path := filepath.Join(e.out, name+".record.jsonl")
	if same, err := filepath.Abs(replay); err == nil && replay != "" {
		if here, err := filepath.Abs(path); err == nil && here == same { // the run would overwrite the record
			path = filepath.Join(e.out, name+".replayed.jsonl")
		}
	}

	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}

	g.Record = f
	if err := t.Grow(g); err != nil {
		return nil, errors.Join(err, f.Close())
	}

	return f, nil
}

// follow evaluates a run outside its time, adds to its curve, and reports progress.
func (e *experiment) follow(t *llm.Trainer, r *trained, name string, grown bool) llm.Callback {
	evaluations := float64(e.evaluations)
	next, of := 1/evaluations, 1.0
	if grown {
		of = e.grownShare
	}

	return func(v llm.Event) error {
		switch v.Kind {
		case llm.Reshaped:
			if v.Err != nil {
				fmt.Fprintf(e.w, "%-12s %s: %v\n", name, v.Text, v.Err)
				return nil
			}
			fmt.Fprintf(e.w, "%-12s %s\n", name, v.Text)
			r.curve = append(r.curve, e.where(t, of*v.Share, math.NaN()))
		case llm.StepEnd:
			due := v.Share >= next
			if e.every > 0 {
				due = v.Step%e.every == 0
			}
			if !due && !v.Last {
				return nil
			}
			next = math.Floor(v.Share*evaluations+1) / evaluations
			began := time.Now()
			_, bits, err := t.Evaluate(e.text.heldOut)
			if err != nil {
				return err
			}
			r.evaluating += time.Since(began)
			r.loss = bits * math.Ln2
			r.curve = append(r.curve, e.where(t, of*v.Share, r.loss))
			fmt.Fprintf(e.w,
				"%-12s %3.0f%% of %v, step %d, %d blocks, held-out loss %.4f nats per byte\n", name,
				100*v.Share, v.Budget, v.Step, t.Model.Config.Layers, r.loss)
		}
		return nil
	}
}

// where returns the current point of a run.
func (e *experiment) where(t *llm.Trainer, share, loss float64) point {
	p := point{share: share, loss: loss, blocks: t.Model.Config.Layers}
	for _, r := range t.Model.Kasmina.Report() {
		for _, s := range r.Seeds {
			if r.Site == blueprints.Depth && s.Stage.Grafted() {
				p.trial = p.blocks - e.from
			}
		}
	}
	return p
}

// The learning rate rises for warmup steps, and ends at the share floor of its peak.
const warmup, floor = 50, 0.1

// chunks is the number of seeds in each Kasmina layer with -site chunk.
const chunks = 16

// epochs is the number of epochs in a run with -tokens.
func (e *experiment) epochs() int {
	return int(e.steps()) / e.epoch
}

// seed adds seeds at the chosen sites.
func (e *experiment) seed(c *llm.Config) {
	if e.grows("depth") {
		c.Layers, c.Depth = e.from, 1
	}

	blocks := make([]int, c.Layers)
	for i := range blocks {
		blocks[i] = i
	}

	if e.grows("chunk") {
		c.Kasmina, c.Seeds, c.Slots, c.SlotWidth = blocks, chunks, chunks+1, 4*c.Dim/chunks
	}

	if e.grows("weight") {
		c.Weights = c.WeightSites("q", "k", "v", "o", "gate", "up", "down")
	}

	if e.grows("stream") {
		c.Streams = blocks
	}
}

// seedController returns the controller for growth at other sites than depth.
func (e *experiment) seedController(t *llm.Trainer) state.Controller {
	h := *e.seeds
	h.Random = t.Loader.Config().Seed
	thresholds, _ := t.Model.Kasmina.Lattice(0).Thresholds()
	h.RampEpochs = max(1, thresholds.MinEpochs[state.Grafting])
	return &h
}

// trainer returns the trainer of a static model, or of a model that starts small.
func (e *experiment) trainer(seed uint64, lr float64, grown bool) (*llm.Trainer, error) {
	c, opts := e.model, []state.Option{}
	if grown {
		e.seed(&c)
		if e.elsewhere() {
			opts = append(opts, state.WithThresholds(state.DefaultThresholds().Within(e.epochs())))
		}
	}

	m, err := llm.NewModel(c, tensor.Float32, seed, opts...)
	if err != nil {
		return nil, err
	}

	loader, err := data.NewLoader(e.text.tokens, data.LoaderConfig{Batch: e.batch,
		Seq: c.Seq, Seed: seed})
	if err != nil {
		return nil, err
	}

	opt, err := e.newOptimizer(lr)
	if err != nil {
		return nil, err
	}

	train := llm.TrainConfig{Batch: e.batch, Epoch: e.epoch, Clip: 1, Budget: e.budget}
	if grown {
		train.Budget.Time = time.Duration(e.grownShare * float64(e.budget.Time))
		train.Budget.Tokens = int64(e.grownShare * float64(e.budget.Tokens))
		train.Budget.FLOPs *= e.grownShare
	}

	if train.Schedule, err = optim.Warmup(lr, warmup); err != nil {
		return nil, err
	}

	if train.Annealing, err = optim.CosineAnnealing(floor); err != nil {
		return nil, err
	}

	if e.device != nil {
		train.Engine = gpu.Engine(e.device, e.precision)
	}

	return llm.NewTrainer(m, loader, opt, train)
}

func (e *experiment) newOptimizer(lr float64) (optim.Optimizer, error) {
	choice, err := optim.ByName(e.optimizer)
	if err != nil {
		return nil, err
	}
	return choice.New(lr, optim.WithGroup(optim.NameContains("norm"), optim.Decay(0)))
}

type results []comparison

// timeTo returns the share of the static budget after which a run reached a loss, or NaN if it never
// did.
func (r *trained) timeTo(loss float64) float64 {
	for _, p := range r.curve {
		if p.loss <= loss {
			return p.share
		}
	}
	return math.NaN()
}

// report prints the table and, on the last line, the results as JSON.
func (all results) report(stdout io.Writer) error {
	var out struct {
		Seeds        []uint64   `json:"random_seeds"`
		StaticLoss   []float64  `json:"static_loss"` // held out, in nats per byte
		GrownLoss    []float64  `json:"grown_loss"`
		StaticParams int        `json:"static_params"`
		GrownParams  int        `json:"grown_params"`
		StaticRate   float64    `json:"static_learning_rate"`
		StaticSteps  []int      `json:"static_steps"`
		GrownSteps   []int      `json:"grown_steps"`
		StaticFLOPs  []float64  `json:"static_flops"`
		GrownFLOPs   []float64  `json:"grown_flops"`
		Seconds      float64    `json:"seconds"` // of the longest run
		Share        []*float64 `json:"share_of_time_to_static_loss"`
	}

	fmt.Fprintf(stdout, "\n%-12s %-7s %9s %14s %11s %7s %8s   %s\n", "random seed", "model",
		"rate", "held-out loss",
		"parameters", "steps", "seconds", "static run's loss at")
	for _, c := range all {
		out.Seeds = append(out.Seeds, c.seed)
		for i, r := range []*trained{c.static, c.grown} {
			if r == nil {
				continue
			}
			name, at := "static", ""
			out.Seconds = max(out.Seconds, math.Round(100*r.seconds)/100)
			if i == 0 {
				out.StaticLoss, out.StaticParams = append(out.StaticLoss, r.loss), r.params
				out.StaticRate, out.StaticSteps = r.rate, append(out.StaticSteps, r.steps)
				out.StaticFLOPs = append(out.StaticFLOPs, r.flops)
			} else {
				name = "grown"
				out.GrownLoss, out.GrownParams = append(out.GrownLoss, r.loss), r.params
				out.GrownSteps = append(out.GrownSteps, r.steps)
				out.GrownFLOPs = append(out.GrownFLOPs, r.flops)
				if c.static != nil {
					var share *float64
					at = "never"
					if s := r.timeTo(c.static.loss); s == s {
						share, at = &s, fmt.Sprintf("%.0f%% of the time", 100*s)
					}
					out.Share = append(out.Share, share)
				}
			}
			fmt.Fprintf(stdout, "%-12d %-7s %9g %14.4f %11d %7d %8.1f   %s\n", c.seed, name,
				r.rate, r.loss, r.params,
				r.steps, r.seconds, at)
		}
	}

	line, err := json.Marshal(out)
	if err == nil {
		_, err = fmt.Fprintf(stdout, "\n%s\n", line)
	}

	return err
}
