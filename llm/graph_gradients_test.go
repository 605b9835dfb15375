package llm

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/site"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// randomConfig returns the configuration of a small model of random shape.
func randomConfig(r *rand.Rand) Config {
	kv := 1 + r.IntN(3)
	c := Config{Vocab: 5 + r.IntN(9), Layers: 1 + r.IntN(2), KVHeads: kv,
		Heads: kv * (1 + r.IntN(3)), HeadDim: 2 * (1 + r.IntN(3)),
		Seq: 1 + r.IntN(9), FF: 1 + r.IntN(9), Seeds: 1 + r.IntN(3), Untied: r.IntN(2) == 0,
		Documents: r.IntN(2) == 0}
	c.Dim = c.Seeds * (1 + r.IntN(5))
	for b := range c.Layers {
		if r.IntN(3) > 0 {
			c.Kasmina = append(c.Kasmina, b)
		}
	}

	if r.IntN(2) == 0 {
		c.SlotWidth = c.Dim/c.Seeds*2 + r.IntN(9)
	}

	c.Traits = randomTraits(r, c)
	return c.Default()
}

// randomTraits returns a random combination of the traits of published families.
func randomTraits(r *rand.Rand, c Config) Traits {
	coin := func() bool { return r.IntN(2) == 0 }
	t := Traits{QKVBias: coin(), QKNorm: coin(), NormPlusOne: coin(),
		PostNorms: coin(), GELU: coin()}
	if coin() {
		t.AttentionScale = 0.1 + r.Float64()
	}

	if coin() {
		t.EmbedScale = 0.1 + 3*r.Float64()
	}

	scaling := func() op.RoPEScaling {
		return []op.RoPEScaling{{}, {Factor: 3}, {Factor: 8, LowFreq: 1, HighFreq: 4, Original: 64},
			{Factor: 4, BetaFast: 32, BetaSlow: 1, Original: 2000}}[r.IntN(4)]
	}
	t.Scaling = scaling()
	for range r.IntN(1 + c.Layers) {
		b := Block{NoRoPE: r.IntN(3) == 0}
		if coin() {
			b.Window = 1 + r.IntN(c.Seq)
		}
		if !b.NoRoPE && coin() {
			b.Base, b.Scaling = 100, scaling()
		}
		t.Blocks = append(t.Blocks, b)
	}

	return t
}

// randomBatch returns a random batch with some rows that have no target.
func randomBatch(r *rand.Rand, c Config, sequences int) data.Batch {
	n := sequences * c.Seq
	b := data.Batch{Inputs: make([]int, n), Targets: make([]int, n), Starts: make([]int, n)}
	for i := range n {
		b.Inputs[i], b.Targets[i] = r.IntN(c.Vocab), r.IntN(c.Vocab+2)-2
		if i == 0 {
			b.Targets[i] = r.IntN(c.Vocab)
		}
		if b.Targets[i] >= 0 {
			b.Count++
		}
		if at := i % c.Seq; at > 0 && r.IntN(3) == 0 {
			b.Starts[i] = at
		} else if at > 0 {
			b.Starts[i] = b.Starts[i-1]
		}
	}

	return b
}

// TestGradients compares the gradients of random models with central differences. The models have grouped
// queries, documents, tied and untied output layers, random traits, and seeds in all stages that have
// gradients equal to derivatives of the loss. The gradients of a step with several batches, recomputed or
// not, are compared with the mean over the batches.
func TestGradients(t *testing.T) {
	models := 1 // another one in each run
	if randtest.Long() {
		models = 5
	}

	for i := range models {
		seed := randtest.Seed(t)
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Logf("random seed %d", seed)
			r := rand.New(rand.NewPCG(seed, 0))
			c := randomConfig(r)
			t.Logf("%+v", c)
			m := must(NewModel(c, tensor.Float64, r.Uint64(), state.WithoutGates()))
			for _, p := range m.Params { // away from points with vanishing gradients
				x := p.Value.Float64s()
				for k := range x {
					x[k] += 0.3 * r.NormFloat64()
				}
			}
			plant(t, r, m)
			checkModel(t, r, m)
		})
	}
}

// TestSiteGradients is TestGradients for blueprints at weights and in the stream, including user-defined
// ones.
func TestSiteGradients(t *testing.T) {
	models := 1 // another one in each run
	if randtest.Long() {
		models = 5
	}

	own := ownKinds(t)
	for i := range models {
		seed := randtest.Seed(t)
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Logf("random seed %d", seed)
			r := rand.New(rand.NewPCG(seed, 0))
			c := withSites(r, randomConfig(r), own)
			t.Logf("%+v", c)
			m := must(newModel(c, tensor.Float64, r.Uint64(), state.WithoutGates()))
			for _, p := range m.Params {
				x := p.Value.Float64s()
				for k := range x {
					x[k] += 0.3 * r.NormFloat64()
				}
			}
			plant(t, r, m)
			plantSites(t, r, m)
			checkModel(t, r, m)
		})
	}
}

// TestGradientsOfSharedSlots lets two seeds with graph blueprints share a slot. Their gradients must add
// up, even if a seed is one feature wide and an array has a single element.
func TestGradientsOfSharedSlots(t *testing.T) {
	own := ownKinds(t)
	for _, width := range []int{1, 5} {
		r := rand.New(rand.NewPCG(randtest.Seed(t), 0))
		m := must(NewModel(Config{Vocab: 5, Dim: 2 * width, Layers: 1, Heads: 1, KVHeads: 1,
			HeadDim: 2, FF: 3, Seq: 2, Kasmina: []int{0}, Seeds: 2,
			SlotWidth: 2 * width}.Default(), tensor.Float64, r.Uint64(), state.WithoutGates()))
		for _, l := range m.Kasmina.Lattices() {
			for seed, kind := range own[2:] {
				require.NoError(t, l.RequestGermination(seed,
					state.GerminationRequest{Slot: 1, Kind: kind}))
				for stage := state.Training; stage <= state.Grafting; stage++ {
					require.NoError(t, l.Transition(seed, stage))
				}
				require.NoError(t, l.SetAlpha(seed, 0.5))
			}
		}
		checkModel(t, r, m)
	}
}

// withSites returns a layout with a planted seed on some layers and after some blocks.
func withSites(r *rand.Rand, c Config, own [4]blueprints.Kind) layout {
	layers := []string{"q", "k", "v", "o", "gate", "up", "down", "head"}
	for range 1 + r.IntN(4) {
		s := WeightSite{Block: r.IntN(c.Layers), Layer: layers[r.IntN(len(layers))]}
		if s.Layer == "head" {
			s.Block = 0
		}
		c.Weights = append(c.Weights, s)
	}

	for range 1 + r.IntN(3) {
		c.Streams = append(c.Streams, r.IntN(c.Layers))
	}

	c.LoRAAlpha = r.Float64() * 3
	l := layout{Config: c}
	for seed := range c.Weights {
		kind := []blueprints.Kind{blueprints.LoRA, blueprints.LoRA, own[0]}[r.IntN(3)]
		l = l.Plant(Planted{Site: blueprints.Weight, Seed: seed, Kind: kind.String(), Size: 1})
	}

	for seed := range c.Streams {
		kind := []blueprints.Kind{blueprints.Attention, blueprints.Perceptron, own[1]}[r.IntN(3)]
		l = l.Plant(Planted{Site: blueprints.Stream, Seed: seed, Kind: kind.String(), Size: 1})
	}

	return l
}

// plantSites moves planted blueprints to stages where gradients are derivatives of the loss.
func plantSites(t *testing.T, r *rand.Rand, m *Model) {
	for _, p := range m.Planted {
		kind, _ := blueprints.ByName(p.Kind)
		last := []state.Stage{state.Grafting, state.Stabilization, state.FineTuning}[r.IntN(3)]
		commands := []state.Command{{Action: state.Germinate,
			Request: state.GerminationRequest{Kind: kind, Size: p.Size}}}
		for stage := state.Training; stage <= last; stage++ {
			commands = append(commands, state.Command{Action: state.Move, To: stage})
		}
		if last != state.FineTuning {
			commands = append(commands, state.Command{Action: state.SetAlpha, Alpha: r.Float64()})
		}
		for i := range commands {
			commands[i].Layer, commands[i].Seed = m.LayerAt(p.Site), p.Seed
		}
		if err := m.Kasmina.Do(commands...); err != nil {
			t.Fatal(err)
		}
	}
}

// ownKinds registers a kind at a weight, which scales its rows, a kind in the stream, and two chunk
// kinds.
func ownKinds(t *testing.T) (kinds [4]blueprints.Kind) {
	t.Helper()
	for i, own := range []struct {
		blueprints.Blueprint
		site.Build
	}{{blueprints.Blueprint{Name: "Rows of a weight", Site: blueprints.Weight,
		Parameters: func(h blueprints.Host, _ int) ([]blueprints.Parameter, error) {
			return []blueprints.Parameter{{Name: "rows", Shape: []int{h.Out, h.In}}}, nil
		}}, func(x *gorgonia.Node, params gorgonia.Nodes, _ int) (*gorgonia.Node, error) {
		return gorgonia.HadamardProd(x, params[0])
	}}, {blueprints.Blueprint{Name: "Bottleneck", Site: blueprints.Stream,
		Parameters: func(h blueprints.Host, size int) ([]blueprints.Parameter, error) {
			return []blueprints.Parameter{{Name: "down", Shape: []int{size, h.In}, Deviation: 0.1},
				{Name: "up", Shape: []int{h.Out, size}}}, nil
		}}, func(x *gorgonia.Node, params gorgonia.Nodes, _ int) (*gorgonia.Node, error) {
		h, err := op.Linear(x, params[0])
		if err != nil {
			return nil, err
		}
		if h, err = gorgonia.Tanh(h); err != nil {
			return nil, err
		}
		return op.Linear(h, params[1])
	}}, {blueprints.Blueprint{Name: "Squares of a chunk", Identity: ones},
		func(x *gorgonia.Node, params gorgonia.Nodes, _ int) (*gorgonia.Node, error) {
			squares, err := gorgonia.Square(x)
			if err != nil {
				return nil, err
			}
			w, err := gorgonia.BroadcastHadamardProd(squares, params[0], nil, []byte{0})
			if err != nil {
				return nil, err
			}
			return gorgonia.Add(x, w)
		}}, {blueprints.Blueprint{Name: "Bottleneck of a chunk", Identity: ones,
		Size: func(c, width int) int { return 2 * c },
		Parts: func(c, n int) []blueprints.Part {
			return []blueprints.Part{{Name: "down", Shape: []int{1, c}},
				{Name: "up", Shape: []int{c, 1}}}
		}}, func(x *gorgonia.Node, params gorgonia.Nodes, _ int) (*gorgonia.Node, error) {
		h, err := op.Linear(x, params[0])
		if err != nil {
			return nil, err
		}
		if h, err = gorgonia.Tanh(h); err != nil {
			return nil, err
		}
		if h, err = op.Linear(h, params[1]); err != nil {
			return nil, err
		}
		return gorgonia.Add(x, h)
	}}} {
		var ok bool
		if kinds[i], ok = blueprints.ByName(own.Name); ok { // registered by an earlier run of this test
			continue
		}
		kinds[i] = must(site.Register(own.Blueprint, own.Build))
	}

	return kinds
}

// ones sets the initial weights to 1.
func ones(w []float64, _ int, _ *rand.Rand) float64 {
	for i := range w {
		w[i] = 1
	}
	return 1
}

// plant germinates blueprints of all kinds except MLPExpansion, where differences fail at its kink. It
// moves most seeds to a stage that blends them in and trains them.
func plant(t *testing.T, r *rand.Rand, m *Model) {
	kinds := []blueprints.Kind{blueprints.Residual, blueprints.AttentionGate, blueprints.ConvFilter,
		blueprints.LowRank, blueprints.ChunkMLP}
	own := ownKinds(t)
	kinds = append(kinds, own[2:]...)
	for _, l := range m.Kasmina.Lattices() {
		if l.Site() != blueprints.Chunk {
			continue
		}
		for seed := range l.Seeds() {
			kind := kinds[r.IntN(len(kinds))]
			slot := 1 + r.IntN(m.Config.Slots-1)
			err := l.RequestGermination(seed, state.GerminationRequest{Slot: slot, Kind: kind})
			if err != nil || r.IntN(4) == 0 {
				continue // its kind needs more weights than a slot has, or it stays germinated
			}
			last := []state.Stage{state.Grafting, state.Stabilization, state.FineTuning}[r.IntN(3)]
			for stage := state.Training; stage <= last; stage++ {
				if err := l.Transition(seed, stage); err != nil {
					t.Fatal(err)
				}
			}
			if err := l.SetAlpha(seed, r.Float64()); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// checkModel compares a model's gradients on two batches with central differences, and the accumulated
// gradients of both batches with their mean.
func checkModel(t *testing.T, r *rand.Rand, m *Model) {
	t.Helper()
	const sequences = 2
	batches := []data.Batch{randomBatch(r, m.Config, sequences),
		randomBatch(r, m.Config, sequences)}
	// mean derivatives by the index of the element in its parameter
	means := make([]map[int]float64, len(m.Params))
	seed := r.Uint64()
	for _, b := range batches {
		g := must(m.Graph(ForLoss, sequences))
		if err := g.Let(b); err != nil {
			t.Fatal(err)
		}
		report, err := autodiff.CheckGradients(g.Loss, g.Params, autodiff.WithSamples(3),
			autodiff.WithSeed(seed))
		if err != nil {
			t.Fatal(err)
		}
		for i, in := range report.Inputs {
			if worst := in.Worst(); !(worst.RelError < 1e-6) {
				t.Errorf("%s at %s: the derivative is %v, differences give %v", in.Name, worst.At(),
					worst.Analytic, worst.Numeric)
			}
			if means[i] == nil {
				means[i] = map[int]float64{}
			}
			for _, e := range in.Elements {
				if at, err := tensor.Ltoi(in.Shape, in.Shape.CalcStrides(),
					e.Index...); err == nil && !e.Direction {
					means[i][at] += e.Analytic / float64(len(batches))
				}
			}
		}
	}

	for _, recompute := range []bool{false, true} {
		g := must(TrainConfig{Batch: sequences, Accumulate: len(batches),
			Recompute: recompute}.Graph(m))
		machine := must(cpuops.NewMachine(g.G, cpuops.WithParams(g.Params...),
			cpuops.WithOutputs(g.Loss)))
		for _, b := range batches {
			if _, err := (Runner{Graph: g, Machine: machine}).Run(b); err != nil {
				t.Fatal(err)
			}
		}
		for i, p := range machine.ValueGrads() {
			v, err := p.Grad()
			if err != nil {
				t.Fatal(err)
			}
			for at, want := range means[i] {
				if got := v.Data().([]float64)[at]; !(math.Abs(got-want) <= 1e-12*(1+
					math.Abs(want))) {
					t.Errorf("recompute %v: the gradient of %s at %d is %v, want %v", recompute,
						m.Params[i].Name, at, got, want)
				}
			}
		}
	}
}
