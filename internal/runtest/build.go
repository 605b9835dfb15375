package runtest

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// tokens is a text in memory. One token in seven is frequent, and one token ends documents.
type tokens struct {
	ids []int
	in  *injector
	// documents reports whether the text has a token that ends documents.
	name string
}

// endOfDocument is the token that ends each document.
const endOfDocument = 1

type documents struct{ *tokens }

func (documents) EndOfDocument() int { return endOfDocument }

// ids returns the tokens of the training text.
func (c Case) ids() []int {
	r := rand.New(rand.NewPCG(c.Seed, 1))
	ids := make([]int, c.Text.Tokens)
	last := 0
	for i := range ids {
		// A token often depends on the previous token, so that there is something to learn.
		if last = (last*7 + 3) % (vocab - 10); r.IntN(3) == 0 {
			last = r.IntN(vocab - 10)
		}
		ids[i] = last
	}

	if c.Text.Rare {
		for id := vocab - 10; id < vocab; id++ {
			ids[r.IntN(len(ids))] = id
		}
	}

	return ids
}

func (c Case) tokens(in *injector) data.Tokens {
	t := &tokens{c.ids(), in, fmt.Sprintf("tokens %d %d", c.Seed, c.Text.Tokens)}
	if c.Model.Documents {
		return documents{t}
	}

	return t
}

func (t *tokens) Len() int64          { return int64(len(t.ids)) }
func (t *tokens) VocabSize() int      { return vocab }
func (t *tokens) Tokenizer() string   { return "letters" }
func (t *tokens) Fingerprint() string { return t.name }
func (t *tokens) ReadTokens(dst []int, offset int64) error {
	if err := t.in.call("ReadTokens"); err != nil {
		return err
	}
	if copy(dst, t.ids[offset:]) < len(dst) {
		return io.ErrUnexpectedEOF
	}
	return nil
}

// letters is a tokenizer with one token per byte.
type letters struct{}

func (letters) Name() string   { return "letters" }
func (letters) VocabSize() int { return vocab }
func (letters) Encode(text []byte) (ids []int) {
	for _, b := range text {
		ids = append(ids, int(b)%vocab)
	}
	return ids
}
func (letters) Decode(ids []int) (text []byte, err error) {
	for _, id := range ids {
		if id < 0 || id >= vocab {
			return nil, fmt.Errorf("token %d is outside the vocabulary", id)
		}
		text = append(text, byte(id))
	}
	return text, nil
}

// evaluation returns the validation text in a few batches of the given size.
func (c Case) evaluation(batch int) (*data.Evaluation, error) {
	r := rand.New(rand.NewPCG(c.Seed, 2))
	text := make([]byte, 3*c.Model.Seq+5)
	for i := range text {
		text[i] = byte(r.IntN(vocab - 10))
	}
	return data.NewEvaluation(text, letters{}, batch, c.Model.Seq)
}

// options returns the options of all lattices.
func (l Lattices) options() (all []state.Option) {
	if l.Gated > 0 {
		t := state.DefaultThresholds()
		for stage := state.Training; stage <= state.FineTuning; stage++ {
			t.MinEpochs[stage] = l.Gated
		}
		t.TrainingError, t.Stability, t.FossilStable, t.Improvement = 1, 0.1, 0.1, -1
		all = append(all, state.WithThresholds(t))
	} else {
		all = append(all, state.WithoutGates())
	}

	all = append(all, state.WithEmbargo(l.Embargo), state.WithTelemetry(l.Telemetry))
	if l.Noise > 0 {
		all = append(all, state.WithAlphaNoise(l.Noise))
	}

	if l.Quarantine {
		all = append(all, state.WithQuarantine())
	}

	if l.Transitions > 0 {
		all = append(all, state.WithTransitions(l.Transitions))
	}

	if l.History > 0 {
		all = append(all, state.WithHistory(l.History))
	}

	if l.Renormalize > 0 {
		all = append(all, state.WithRenormalization(l.Renormalize))
	}

	return all
}

// newModel returns the initial model of the case.
func (c Case) newModel() (*llm.Model, error) {
	dt := tensor.Float32
	if c.Float64 {
		dt = tensor.Float64
	}

	m, err := llm.NewModel(c.Model.Default(), dt, c.Seed, c.Lattices.options()...)
	if err != nil {
		return nil, err
	}

	m.KasminaOptions = c.Kasmina
	if !c.Tuning.isZero() {
		return c.tune(m)
	}

	if c.Model.Depth == 0 || c.Lattices.Gated > 0 {
		return m, nil
	}

	// The lattice of depth always has gates. Without them, orders could take a seed through its whole
	// life.
	free, err := state.NewLattice(c.Model.Depth, c.Model.Depth, append(c.Lattices.options(),
		state.At(blueprints.Depth))...)
	if err != nil {
		return nil, err
	}

	return m, m.Kasmina.Lattice(m.LayerAt(blueprints.Depth)).SetArrays(free.Arrays())
}

// newOptimizer returns the optimizer of the case. The optimizer is wrapped only if its calls may fail,
// because the trainer and the engines may check its type.
func (c Case) newOptimizer(in *injector) (optim.Optimizer, error) {
	d := c.Optimizer
	opts := []optim.Option{optim.WithLR(d.LR), optim.WithWeightDecay(d.Decay)}
	if d.Spare {
		opts = append(opts, optim.WithGroup(optim.NameContains("kasmina"), optim.Decay(0)))
	}

	if d.Group {
		opts = append(opts, optim.WithGroup(optim.NameContains("mlp"), optim.LRScale(0.5)))
	}

	switch {
	case d.Lion:
		return optim.NewLion(optionsOf[optim.LionOption](opts)...)
	case d.Bits8:
		// Without this option, none of the small parameters would have 8-bit moments.
		return optim.NewAdamW8bit(append(optionsOf[optim.AdamW8bitOption](opts), optim.WithMin8bitSize(64))...)
	}

	wrapped := c.Fault != nil && slices.Contains(optimizerOps, c.Fault.Op)
	if d.Muon {
		o, err := optim.NewMuon(append(optionsOf[optim.MuonOption](opts), optim.WithAdamW(optim.WithLR(d.LR)))...)
		if err != nil || !wrapped {
			return o, err
		}
		return &faultyMuon{o, in}, nil
	}

	own := optionsOf[optim.AdamWOption](opts)
	if d.Beta1 > 0 {
		own = append(own, optim.WithBetas(d.Beta1, d.Beta2))
	}

	o, err := optim.NewAdamW(own...)
	if err != nil || !wrapped {
		return o, err
	}

	return &faultyAdamW{o, in}, nil
}

// optionsOf converts options that all optimizers take to the option type of one.
func optionsOf[O any](opts []optim.Option) (own []O) {
	for _, o := range opts {
		own = append(own, any(o).(O))
	}
	return own
}

// config returns the training configuration of the case, without the engine.
func (c Case) config() (llm.TrainConfig, error) {
	t := c.Train
	tc := llm.TrainConfig{Steps: t.Steps, Batch: t.Batch, Accumulate: t.Accumulate, Clip: t.Clip,
		Epoch: t.Epoch, Recompute: t.Recompute, RecomputeMLPs: t.RecomputeMLPs, Frozen: t.Frozen, Directed: t.Directed,
		Tuned: c.Tuning.patterns(), OmitBase: c.Tuning.OmitBase, Preference: c.Text.Pairs,
		Schedule: optim.Constant(c.Optimizer.LR),
		Notes:    map[string]string{"case": fmt.Sprint(c.Seed)}}
	var err error
	if t.Cosine {
		if tc.Schedule, err = optim.WarmupCosine(c.Optimizer.LR, c.Optimizer.LR/10, 2,
			t.Steps); err != nil {
			return tc, err
		}
	}

	if plain := tc.Schedule; t.Explode > 0 {
		tc.Schedule = func(step int) float64 {
			if step == t.Explode-1 {
				return 1e30
			}
			return plain(step)
		}
	}

	stepTokens := t.Batch * max(1, t.Accumulate) * c.Model.Seq
	switch t.Budget {
	case "tokens":
		tc.Steps, tc.Budget.Tokens = 0, int64(t.Steps*stepTokens-1)
	case "flops":
		tc.Steps = 2 * t.Steps
		tc.Budget.FLOPs = float64(t.Steps*stepTokens) * c.Model.Default().FLOPs()
	}

	if t.Anneal {
		tc.Annealing, err = optim.CosineAnnealing(0.1)
	}

	return tc, err
}

// Script is a controller that gives fixed commands after each epoch.
type Script struct {
	Orders []Order
	in     *injector
}

// Decide returns the commands for the end of an epoch.
func (s Script) Decide(reports []state.Report) (all []state.Command) {
	if err := s.in.call("Decide"); err != nil {
		panic(err)
	}
	for _, o := range s.Orders {
		if o.Step == reports[0].Epoch {
			all = append(all, o.Commands...)
		}
	}
	return s.in.without(reports[0].Epoch, all)
}

// Needs is a controller that plants blueprints at the largest gradients, moves every blueprint to its
// next stage after each epoch, and rolls some back. Its decisions depend only on the reports.
type Needs struct {
	Seed  uint64
	Sizes int // number of different sizes of blueprints
	in    *injector
}

// Decide returns the commands for the end of an epoch.
func (n Needs) Decide(reports []state.Report) (all []state.Command) {
	if err := n.in.call("Decide"); err != nil {
		panic(err)
	}

	for layer, report := range reports {
		neediest := -1
		for _, s := range report.Seeds {
			c := state.Command{Action: state.Move, Layer: layer, Seed: s.Seed}
			r := rand.New(rand.NewPCG(n.Seed, uint64(report.Epoch)<<20|uint64(layer)<<10|
				uint64(s.Seed)))
			switch {
			case s.Stage == state.Dormant:
				if neediest < 0 || s.Gradient.Norm > report.Seeds[neediest].Gradient.Norm {
					neediest = s.Seed
				}
				continue
			case s.Stage == state.Fossilized:
				continue
			case s.Stage.Ended():
				c.Action = state.Recycle
			case s.Stage >= state.Grafting && r.IntN(5) == 0:
				c.To = state.RolledBack
			case r.IntN(4) == 0:
				continue // stay in this stage for another epoch
			default:
				c.To = s.Stage.Next()
			}
			all = append(all, c)
		}
		if neediest < 0 || report.Epoch%2 == 0 {
			continue
		}
		plant := state.Command{Action: state.Germinate, Layer: layer, Seed: neediest}
		switch report.Site {
		case blueprints.Chunk:
			plant.Request = state.GerminationRequest{Kind: blueprints.ConvFilter, Slot: 1 + neediest}
			if report.Epoch%3 == 0 {
				plant.Request.Kind = blueprints.Residual
			}
		case blueprints.Weight:
			plant.Request = state.GerminationRequest{Kind: blueprints.LoRA, Size: n.Sizes}
		case blueprints.Stream:
			plant.Request = state.GerminationRequest{Kind: blueprints.Perceptron, Size: n.Sizes}
		case blueprints.Depth:
			plant.Request = state.GerminationRequest{Kind: blueprints.Interleave, Size: 2}
			if n.Seed%2 == 0 {
				plant.Request = state.GerminationRequest{Kind: blueprints.NewBlocks, Size: 1}
			}
		}
		all = append(all, plant)
	}

	return n.in.without(reports[0].Epoch, all)
}

// growthOf returns the growth of the case, which judges seeds on a text.
func (c Case) growthOf(in *injector, text *data.Evaluation, refused func(state.Command, error), record *bytes.Buffer) (
	g llm.Growth, err error) {
	p := c.Growth
	g = llm.Growth{Every: p.Every, Rewarm: p.Rewarm, FreshMoments: p.Fresh, Refused: refused, Record: faultyWriter{record, in}}
	if p.Validation {
		g.Validation = text
	}

	if p.Governed {
		g.Governor = &control.Governor{Harm: 1e-9, Sure: 0.5, Norm: 1}
	}

	switch p.Controller {
	case "script":
		g.Controller = Script{p.Script, in}
	case "needs":
		g.Controller = Needs{c.Seed, 2 + int(c.Seed%3), in}
	case "heuristic":
		h := control.NewHeuristic(4, 1<<20)
		h.Patience, h.RampEpochs, h.Hunger, h.Rank, h.Features = 3, 2, 0.01, 2, 4
		if c.Model.Depth > 0 {
			d := control.NewDepth(blueprints.Interleave, 2)
			d.Begin, d.End, d.Settle, d.Patience = 0.42, 0.45, 0.42, 0.45
			g.Controller = control.Together(d, h)
			break
		}
		g.Controller = h
	case "depth":
		d := control.NewDepth(blueprints.Stack, 2)
		d.Begin, d.End, d.Settle, d.Patience = 0.42, 0.45, 0.42, 0.45
		g.Controller = d
	case "forecast":
		f := control.NewForecast(blueprints.Interleave, 4)
		f.Settle, f.Patience = 0.42, 0.45
		g.Controller = f
	case "dry run":
		g.Controller = control.DryRun(Needs{c.Seed, 2, in}, nil)
	case "schedule":
		g.Controller = &control.Schedule{Growths: []control.Planned{
			{Kind: blueprints.Middle, Size: 2, Share: 0.2}}}
	case "adapters":
		a := control.NewAdapters(200)
		a.Rank = 3
		if !c.Train.Directed {
			a.Where, a.Random = []control.Where{control.Unhealthiest, control.AllAtOnce, control.AtRandom}[c.Seed%3], c.Seed
		}
		g.Controller = a
	default:
		return g, fmt.Errorf("runtest: no controller %q", p.Controller)
	}

	return g, nil
}
