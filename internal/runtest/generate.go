package runtest

import (
	"cmp"
	"math/rand/v2"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/graft"
)

// Limits describes a machine's capabilities, so that Generate returns only cases it can run.
type Limits struct {
	Float64   bool     // models of float64
	Bases     []string // types of frozen matrices
	Adapters  bool     // low-rank adapters
	Optimizer bool     // optimizers that wrap the ones of package optim
	Ranks     int      // the most
	Listening bool     // access to gradients, for directed LoRA
	Faults    []string // further operations that Session.Fail can make fail
}

// generator draws a case.
type generator struct {
	*rand.Rand
	Case
	limits Limits
}

// Generate returns the case for a seed.
func Generate(seed uint64, limits Limits) Case {
	g := &generator{Rand: rand.New(rand.NewPCG(seed, 0)), limits: limits}
	g.Seed = seed
	g.model()
	g.train()
	if g.chance(4) {
		g.tuning()
	} else {
		g.seeds()
		g.growth()
	}
	g.data()
	g.parts()
	g.checks()
	return g.Case
}

// chance returns true with probability 1/n.
func (g *generator) chance(n int) bool { return g.IntN(n) == 0 }

// pick returns one of several values.
func pick[T any](g *generator, of ...T) T { return of[g.IntN(len(of))] }

// vocab is the number of different tokens in texts.
const vocab = 40

func (g *generator) model() {
	c := llm.Config{Vocab: vocab, Dim: 8, Layers: 1 + g.IntN(2), Heads: 2, Seq: 8 + 2*g.IntN(3),
		FF: pick(g, 8, 12, 16)}
	if g.chance(4) {
		c.Dim = 16
	}

	if g.chance(4) {
		c.Layers++
	}

	if g.chance(3) {
		c.KVHeads = 1
	}

	c.Untied = g.chance(3)
	c.QKVBias, c.QKNorm = g.chance(6), g.chance(6)
	c.PostNorms, c.NormPlusOne, c.GELU = g.chance(8), g.chance(8), g.chance(8)
	if g.chance(8) {
		c.EmbedScale = 2
	}

	if g.chance(6) {
		c.Blocks = []llm.Block{{Window: 3}}
		if c.Layers > 1 && g.chance(2) {
			c.Blocks = append(c.Blocks, llm.Block{NoRoPE: g.chance(2)})
		}
	}

	switch {
	case g.chance(8): // as GPT-2
		c.QKNorm, c.PostNorms, c.NormPlusOne = false, false, false
		c.LayerNorm, c.GELU, c.PlainMLP = true, true, true
		c.QKVBias, c.OutBias, c.MLPBias = true, true, true
		c.Positions, c.Blocks = c.Seq+g.IntN(3), []llm.Block{{NoRoPE: true}}
	case g.chance(8): // as OLMo 2
		c.PostNorms, c.NoPreNorms, c.QKNorm, c.WideQKNorm = true, true, true, true
	}

	c.Documents, c.ZeroOutputs = g.chance(8), !c.PostNorms && g.chance(8)
	g.Case.Float64 = g.limits.Float64 && g.chance(10)
	g.Model = c
}

func (g *generator) train() {
	t := &g.Train
	t.Steps, t.Batch, t.Epoch = 7+g.IntN(12), 1+g.IntN(2), 1+g.IntN(3)
	t.Accumulate = pick(g, 1, 1, 2, 3)
	t.Clip = pick(g, 0, 1, 0.1)
	t.Recompute, t.Cosine = g.chance(5), g.chance(4)
	if g.chance(8) {
		t.RecomputeMLPs = 1 + g.IntN(2)
	}

	if g.chance(6) {
		t.Budget = pick(g, "tokens", "flops")
		t.Anneal = g.chance(2)
	}

	if g.chance(25) {
		t.Explode = 3 + g.IntN(t.Steps-3)
	}

	o := &g.Optimizer
	o.LR = pick(g, 0.003, 0.01, 0.03)
	switch g.IntN(8) {
	case 0, 1:
		o.Muon = true
	case 2:
		o.Lion, o.LR = true, o.LR/5
	case 3:
		o.Bits8 = true
	}

	if !o.Muon && !o.Lion && !o.Bits8 && g.chance(3) {
		betas := pick(g, [2]float64{0.9, 0.5}, [2]float64{0.9, 0}, [2]float64{0.95, 0.8},
			[2]float64{0.5, 0.99}, [2]float64{0.99, 0.95})
		o.Beta1, o.Beta2 = betas[0], betas[1]
	}

	if g.chance(3) {
		o.Decay = 0.1
		o.Spare = g.chance(2)
	}

	o.Group = g.chance(8)
}

// data chooses the training text.
func (g *generator) data() {
	g.Text = Text{Tokens: pick(g, 60, 150, 1000, 3000), Rare: g.chance(2)}
	switch g.IntN(10) {
	case 0, 1:
		g.Text.Packed = true
	case 2:
		if slices.Contains(g.Tuning.Adapter.Targets, llm.OutputLayer) {
			break // refused, because the loss of pairs contains the output layer
		}
		p := &op.Preference{Kind: pick(g, op.PreferenceSigmoid, op.PreferenceHinge, op.PreferenceIPO, op.PreferenceRobust),
			Beta: pick(g, 0.1, 0.5)}
		if g.chance(2) && (p.Kind == op.PreferenceSigmoid || p.Kind == op.PreferenceRobust) {
			p.Smoothing = 0.1
		}
		g.Text.Pairs = p
	}
}

// tuning chooses the parameters that learn, and how the others are stored.
func (g *generator) tuning() {
	t := &g.Tuning
	switch i := g.IntN(4); {
	case i < 2 && g.limits.Adapters:
		t.Adapter = g.adapter()
	case i == 2:
		t.Seeds, t.Rank = pick(g, "LowRank", "ChunkMLP"), 1+g.IntN(3)
	}

	if t.Seeds == "" && (t.Adapter.IsZero() || g.chance(4)) {
		t.Tuned, _ = g.Model.LastBlocks(1 + g.IntN(g.Model.Layers)) // the model has as many blocks
	}

	t.OmitBase = g.chance(2)
	if t.Seeds == "" && !g.Case.Float64 && len(g.limits.Bases) > 0 && g.chance(3) {
		t.Base = pick(g, g.limits.Bases...)
	}
}

// adapter returns adapters for some layers of the model.
func (g *generator) adapter() llm.LoRA {
	a := llm.LoRA{Rank: 1 + g.IntN(3), Alpha: pick(g, 1.0, 4), RankStabilized: g.chance(4), Magnitude: g.chance(4)}
	for _, name := range g.Model.Default().LinearLayers() {
		if g.chance(2) {
			a.Targets = append(a.Targets, name)
		}
	}

	if len(a.Targets) == 0 || g.chance(6) {
		a.Targets = append(a.Targets, llm.OutputLayer)
	}

	if !a.Magnitude && g.chance(6) {
		a.Targets = slices.Insert(a.Targets, 0, llm.EmbeddingLayer)
	}

	if g.chance(4) {
		a.Dropout = 0.2
	}

	if last := a.Targets[len(a.Targets)-1]; g.chance(6) {
		a.Ranks, a.Alphas = map[string]int{last: 4}, map[string]float64{last: 2}
	}

	return a
}

// parts chooses the parts of the run.
func (g *generator) parts() {
	p := &g.Parts
	if g.Tuning.Base == "" && g.chance(4) {
		p.EMA = pick(g, 0.5, 0.9, 0.99)
	}

	if g.chance(6) {
		p.Patience = 1 + g.IntN(3)
	}

	p.Best = g.chance(8)
	c := g.Model
	if g.Text.Pairs == nil && len(c.Weights)+len(c.Streams)+c.Depth == 0 && g.chance(3) {
		p.Retention = &Retention{Budget: pick(g, 0.003, 0.03, 10), Every: g.IntN(4)}
	}

	// Ranks grow only in adapters with a pair of matrices, and need moments in floating point.
	a := &g.Tuning.Adapter
	if !a.IsZero() && !a.Magnitude && a.Targets[0] != llm.EmbeddingLayer && g.Text.Pairs == nil && !g.Optimizer.Bits8 &&
		g.chance(2) {
		a.Growing = true
		p.RankGrowth = &RankGrowth{Old: g.chance(2), Times: 1 + g.IntN(3), Batches: 1 + g.IntN(2)}
		if g.chance(3) {
			p.RankGrowth.Parameters = 200
		}
	}
}

// seeds usually adds seeds at one to three sites of the model.
func (g *generator) seeds() {
	if g.chance(12) {
		return // a plain run
	}

	c := &g.Model
	for range 1 + g.IntN(2) {
		switch g.IntN(4) {
		case 0:
			c.Kasmina, c.Seeds = []int{g.IntN(c.Layers)}, pick(g, 2, 4)
			if c.Layers > 1 && g.chance(3) {
				c.Kasmina = []int{0, 1}
			}
			if g.chance(2) {
				c.SlotWidth = pick(g, 8, 16)
			}
			c.SlotWidth = max(c.SlotWidth, c.Dim/c.Seeds)
			if g.chance(4) {
				g.Kasmina = pick(g, llm.KasminaOptions{Stability: op.Strict},
					llm.KasminaOptions{GradClip: 0.05}, llm.KasminaOptions{AdaptiveClip: 2},
					llm.KasminaOptions{StopOnNonFinite: true})
			}
		case 1:
			c.Weights = c.WeightSites(pick(g, []string{"q"}, []string{"q", "down"}, []string{"v",
				"up"}, []string{"o"})...)
			if g.chance(4) {
				c.Weights = append(c.Weights, c.Weights[0]) // two seeds at one weight
			}
			if g.chance(6) {
				c.LoRAAlpha = 4
			}
		case 2:
			c.Streams = pick(g, []int{0}, []int{0, 0}, []int{c.Layers - 1, 0}, []int{0, 0,
				c.Layers - 1})
		case 3:
			c.Depth = 1 + g.IntN(3)
			if g.chance(4) {
				c.Boundary = 0.5
			}
			c.Layers = min(c.Layers, 2)
			for i, b := range c.Kasmina {
				c.Kasmina[i] = min(b, c.Layers-1)
			}
			c.Kasmina = slices.Compact(c.Kasmina)
			if len(c.Kasmina) == 0 && g.chance(2) {
				c.Kasmina, c.Seeds, c.SlotWidth = []int{c.Layers - 1}, 2, max(8, c.Dim/2)
			}
		}
	}

	// Remove places in blocks that the model does not have.
	c.Weights = slices.DeleteFunc(c.Weights, func(w llm.WeightSite) bool { return w.Block >= c.Layers })
	for i, s := range c.Streams {
		c.Streams[i] = min(s, c.Layers-1)
	}

	c.Blocks = c.Blocks[:min(len(c.Blocks), c.Layers)]
	if len(c.Weights) > 0 && len(c.Kasmina)+c.Depth == 0 && g.chance(3) {
		g.Train.Frozen = true
		g.Train.Directed = g.limits.Listening && g.chance(3)
	}

	l := &g.Lattices
	l.Embargo = g.IntN(3)
	if g.chance(6) {
		l.Noise = 0.3
	}

	if g.chance(4) {
		l.Telemetry = pick(g, state.Telemetry{Mode: state.Off},
			state.Telemetry{Mode: state.Sampling, Every: 2}, state.Telemetry{Mode: state.Debug},
			state.Telemetry{Reduction: state.MeanOfRows}, state.Telemetry{Reduction: state.MaxOfRows})
	}

	l.Quarantine = g.chance(6)
	if g.chance(6) {
		l.Transitions, l.History, l.Renormalize = 2, 2, 3
	}
}

// growth chooses the controller of the seeds.
func (g *generator) growth() {
	sites := sitesOf(g.Model)
	if len(sites) == 0 {
		return
	}

	judged := len(sites) > 1 || g.Model.Depth == 0
	if g.chance(4) {
		g.Orders = g.lives(sites, g.Train.Steps, 0, true)
		return
	}

	by := &Growth{Controller: pick(g, "script", "script", "script", "needs", "needs", "heuristic"),
		Every: pick(g, 1, 1, 2), Governed: g.chance(10)}
	by.Validation = judged || g.chance(2)
	switch {
	case g.Train.Frozen && g.chance(2):
		by.Controller = "adapters"
		by.Validation = g.chance(2)
	case g.Model.Depth > 0 && g.chance(5):
		by.Controller = pick(g, "depth", "depth", "schedule", "forecast")
		g.wholeLives(by)
	case g.chance(20):
		by.Controller = "dry run"
	case by.Controller == "script":
		by.Script = g.lives(sites, g.Train.Steps/g.Train.Epoch, 1, false)
	case by.Controller == "heuristic":
		g.Lattices.Gated = g.IntN(2)
		if g.Model.Depth > 0 || g.Lattices.Gated > 0 {
			g.wholeLives(by)
		}
	}

	if g.Model.Depth > 0 && g.chance(4) {
		by.Rewarm, by.Fresh = g.IntN(4), g.chance(2)
	}

	g.Growth = by
	if g.Train.Frozen || g.chance(3) {
		// Add orders that compete with the controller. The controller will reject several.
		g.Orders = g.lives(sites, g.Train.Steps, 0, true)
	}
}

// wholeLives makes the run long enough for a blueprint to pass through all stages, which takes 20 epochs.
// The trainer refuses shorter runs, and a budget of FLOPs could end this one earlier if the model grows.
func (g *generator) wholeLives(by *Growth) {
	g.Train.Steps, g.Train.Epoch, by.Every = 20, 1, 1
	if g.Train.Budget == "flops" {
		g.Train.Budget = "tokens"
	}
}

// place identifies a lattice of a model.
type place struct {
	site         blueprints.Site
	layer, seeds int
}

func sitesOf(c llm.Config) (all []place) {
	for range c.Kasmina {
		all = append(all, place{blueprints.Chunk, len(all), c.Seeds})
	}

	for site, n := range map[blueprints.Site]int{blueprints.Weight: len(c.Weights),
		blueprints.Stream: len(c.Streams), blueprints.Depth: c.Depth} {
		if n > 0 {
			all = append(all, place{site, 0, n})
		}
	}

	order := []blueprints.Site{blueprints.Chunk, blueprints.Weight, blueprints.Stream,
		blueprints.Depth}
	slices.SortStableFunc(all, func(a, b place) int {
		return cmp.Compare(slices.Index(order, a.site), slices.Index(order, b.site))
	})
	for i := range all {
		all[i].layer = i
	}

	return all
}

// lives returns orders that take some seeds through their lives. Some lives end early.
func (g *generator) lives(sites []place, steps, from int, anyway bool) (all []Order) {
	deep := from
	for _, p := range sites {
		for seed := range p.seeds {
			if p.site == blueprints.Chunk && seed > 1 || !g.chance(3) && seed > 0 && p.site !=
				blueprints.Depth {
				continue
			}
			at := from + g.IntN(max(1, steps/3))
			if p.site == blueprints.Depth {
				if at = deep; g.chance(3) {
					at += g.IntN(3)
				}
			}
			for at < steps {
				at = g.life(&all, p, seed, at, steps)
				if !g.chance(2) {
					break
				}
			}
			if p.site == blueprints.Depth {
				deep = at
			}
		}
	}

	if anyway && g.chance(4) { // an order that will be rejected
		all = append(all, Order{Step: g.IntN(steps), Commands: []state.Command{{Action: state.Move,
			To: pick(g, state.Fossilized, state.Grafting, state.Dormant)}}})
	}

	slices.SortStableFunc(all, func(a, b Order) int { return cmp.Compare(a.Step, b.Step) })
	if anyway && g.chance(4) {
		via := pick(g, "submit", "steer")
		for i := range all {
			all[i].Via = via
		}
	}

	return all
}

// life adds the orders for one life that starts at a step. It returns the step after the end of the life.
func (g *generator) life(all *[]Order, p place, seed, at, steps int) int {
	c := func(action state.Action) state.Command {
		return state.Command{Action: action, Layer: p.layer, Seed: seed}
	}
	move := func(to state.Stage) state.Command {
		m := c(state.Move)
		m.To = to
		return m
	}
	first := c(state.Germinate)
	first.Request = g.request(p, seed)
	commands := []state.Command{first}
	stage := state.Germinated
	order := func() {
		if len(commands) > 0 && at < steps {
			*all = append(*all, Order{Step: at, Commands: commands})
		}
		commands = nil
	}

	hurry := 1 + g.IntN(3) // how often, out of three, two moves happen at the same step
	for at < steps {
		if g.IntN(3) >= hurry || stage > state.Grafting && g.chance(2) {
			order()
			at += pick(g, 1, 1, 1, 2)
		}
		// Most early ends come after the blueprint has entered the model.
		odds := 12
		if stage >= state.Grafting {
			odds = 5
		}
		if stage > state.Germinated && g.chance(odds) {
			end := state.RolledBack
			switch {
			case stage == state.Training:
				end = pick(g, state.Cancelled, state.Culled)
			case stage == state.Evaluating || stage == state.FineTuning:
				end = pick(g, state.Culled, state.RolledBack)
			}
			order()
			at++
			commands = append(commands, move(end))
			order()
			at += 1 + g.IntN(2) + g.Train.Epoch*g.Lattices.Embargo
			commands = append(commands, c(state.Recycle))
			order()
			return at
		}
		if stage == state.FineTuning && g.chance(4) {
			order()
			return steps // the stage does not change any more
		}
		next := stage.Next()
		if next == stage {
			break
		}
		commands = append(commands, move(next))
		if stage = next; stage == state.Grafting && p.site != blueprints.Depth && g.chance(2) {
			set := c(state.SetAlpha)
			set.Alpha = pick(g, 0.25, 0.5, 1.0)
			commands = append(commands, set)
		}
	}

	order()
	return at + 1
}

// request returns a request for a seed to germinate.
func (g *generator) request(p place, seed int) (r state.GerminationRequest) {
	switch p.site {
	case blueprints.Chunk:
		r.Slot = 1 + seed
		if g.chance(6) {
			r.Slot = 1 // several seeds may share a slot
		}
		r.Kind = pick(g, blueprints.Residual, blueprints.AttentionGate, blueprints.MLPExpansion,
			blueprints.ConvFilter)
		if g.Model.SlotWidth >= 2*g.Model.Dim/g.Model.Seeds && g.chance(2) {
			r.Kind = pick(g, blueprints.LowRank, blueprints.ChunkMLP)
		}
	case blueprints.Weight:
		r.Kind, r.Size = blueprints.LoRA, 1+g.IntN(3)
	case blueprints.Stream:
		r.Kind, r.Size = pick(g, blueprints.Attention, blueprints.Perceptron), 1+g.IntN(2)
	case blueprints.Depth:
		r.Kind = pick(g, blueprints.Stack, blueprints.Interleave, blueprints.Interleave,
			blueprints.NewBlocks, blueprints.Middle)
		if r.Size = 2; r.Kind == blueprints.NewBlocks {
			r.Size = 1
		}
	}

	if p.site != blueprints.Depth && g.chance(2) {
		n := 1 + g.IntN(4)
		r.Strategy = pick[graft.Strategy](g, graft.FixedRamp{Epochs: n, Target: 1},
			graft.FixedRamp{Ramp: graft.Cosine, Epochs: n, Target: 0.5},
			graft.PerformanceLinked{Epochs: n, Target: 1, Gain: 0.5, MaxSpeed: 4},
			graft.DriftControlled{Epochs: n, Target: 1, Threshold: 0.1, Pause: 1},
			graft.GradNormGated{Epochs: n, Target: 0.75, Low: 0.01, High: 10})
	}

	return r
}

// checks chooses the optional properties to check.
func (g *generator) checks() {
	if !g.chance(3) {
		g.Checkpoint = &Checkpoint{Every: pick(g, 0, 1, 2, 5), Background: g.chance(3),
			Apart: g.chance(4), Parts: g.chance(3)}
	}

	resumes := g.IntN(3)
	if g.Model.Depth > 0 {
		resumes++
	}

	targets := slices.Clone(resumeTargets)
	if g.Tuning.omits() { // LoadModel refuses such files
		targets = slices.DeleteFunc(targets, func(into string) bool { return into == "loaded" })
	}

	for range resumes {
		g.Resumes = append(g.Resumes, Resume{g.IntN(g.Train.Steps), pick(g, targets...), g.chance(8)})
	}

	if g.chance(6) && g.limits.Ranks > 1 {
		g.Ranks = 2 + g.IntN(g.limits.Ranks-1)
	}

	g.Replay = g.Growth != nil && g.chance(4)
	if g.chance(3) {
		for _, i := range g.Perm(len(callbackNames))[:1+g.IntN(2)] {
			switch b := callbackNames[i]; {
			case b == "evaluate" && g.Parts.evaluates(): // parts would receive its results
			case b == "save" && g.Tuning.Base != "": // Model.Save refuses compact matrices
			default:
				g.Callbacks = append(g.Callbacks, b)
			}
		}
	}

	g.Train.Merge = g.chance(4)
	if g.chance(2) {
		g.Fault = g.fault()
	}
}

// fault chooses an operation that fails, unless the run will diverge.
func (g *generator) fault() *Fault {
	g.Train.Explode = 0
	ops := faultOps(g.limits)
	if g.Text.Pairs != nil {
		ops = append(ops, "LogProbs", "LogProbs")
	}
	if g.Optimizer.Lion || g.Optimizer.Bits8 { // they are not wrapped
		ops = slices.DeleteFunc(ops, func(op string) bool { return slices.Contains(optimizerOps, op) })
	}

	f := &Fault{Op: pick(g, ops...), At: float64(g.IntN(1000)) / 1000,
		Early: g.chance(2)}
	f.Diverged = isOf(f.Op, "callback") && g.chance(4)
	f.Resuming = resumable(f.Op) && g.chance(6) || f.Op == "part Load"
	f.Lasting = lasting(f.Op) && g.chance(3)
	return f
}

// OnlyRanks changes a generated case to a run on several ranks, and omits the properties that need only one. It
// returns false if ranks cannot make the run.
func OnlyRanks(c *Case, m Device) bool {
	c.Ranks = 2 + int(c.Seed%uint64(m.Limits.Ranks-1))
	c.Train.Accumulate = max(c.Ranks, c.Train.Accumulate)
	c.Kasmina.Stability, c.Kasmina.AdaptiveClip = op.Adaptive, 0
	c.Resumes, c.Replay, c.Callbacks, c.Fault = nil, false, nil, nil
	return possibleOnRanks(*c)
}

// OnlyFault changes a generated case so that an operation fails and no optional properties are
// checked. It returns false if no operation can fail.
func OnlyFault(c *Case, m Device) bool {
	g := &generator{Rand: rand.New(rand.NewPCG(c.Seed, 5)), limits: m.Limits}
	f := g.fault()
	c.Resumes, c.Ranks, c.Train.Explode = nil, 0, 0
	switch {
	case isOf(f.Op, "rank"):
		c.Ranks = 2
	case f.Op == "Decoder":
		c.Callbacks = []string{"sample"}
	case f.Op == "callback EvalEnd" && !c.Parts.evaluates():
		c.Callbacks = []string{"evaluate"}
	case f.Op == "record" && c.Growth == nil:
		return false
	}

	if c.Checkpoint == nil && (isOf(f.Op, "checkpoint") || f.Op == "callback Saved") {
		c.Checkpoint = &Checkpoint{Every: 2}
	}

	c.Fault = f
	return true
}
