package cudaops

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/internal/cpu/sampling"
	"github.com/kasmina-go/kasmina/internal/modeltest"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/state"
)

// samplings lists settings that use all parts of a rule.
var samplings = []sampler.Config{
	{}, {Temperature: 1, Seed: 3}, {Temperature: 0.7, TopK: 5, TopP: 0.8, Seed: 4},
	{Temperature: 2, MinP: 0.05, Repetition: 1.3, Presence: 0.2, Frequency: 0.1, Seed: 5},
	{Repetition: 2, Bias: map[int]float64{3: 1.5, 7: math.Inf(-1)}},
	{Temperature: 1, LogProbs: true, Top: 2, Seed: 6}, // on the host
}

// inferences returns two inferences for the same model on a fake device: drawing draws tokens on the
// device, and plain on the host.
func inferences(t *testing.T, device *Device) (drawing, plain *llm.Inference, c llm.Config) {
	m, err := llm.NewModel(llm.Config{Vocab: 19, Dim: 16, Layers: 2, Heads: 4, KVHeads: 2, Seq: 60}.Default(),
		tensor.Float32, 1)
	require.NoError(t, err)
	inference := func(draws bool) *llm.Inference {
		g, read := valueless(t, m, llm.ForLogits, Float32)
		owner, err := NewMachine(device, g.G, WithFrozen(read, g.Params...))
		require.NoError(t, err)
		i := llm.InferenceOf(m.Config, func(g *llm.Graph) (llm.Machine, error) {
			opts := []MachineOption{WithStrict(), WithParamsOf(owner), WithOutputs(g.Outputs()...)}
			if g.Draws {
				opts = append(opts, WithDraws(g.Logits, g.IDs))
			}
			return NewMachine(device, g.G, opts...)
		}, owner.Close)
		i.DrawsOnDevice = draws
		return i
	}
	return inference(true), inference(false), m.Config
}

// A decoder computes logits for the host to draw tokens from.
type decoder interface {
	Decoder() (func(context.Context, []int) (any, error), error)
}

// onHost returns n tokens that follow a prompt, drawn by the host.
func onHost(t *testing.T, d decoder, c sampler.Config, prompt []int, n int) []int {
	tokens, err := hostTokens(t.Context(), d, c, prompt, n)
	require.NoError(t, err)
	return tokens
}

func hostTokens(ctx context.Context, d decoder, c sampler.Config, prompt []int, n int) ([]int, error) {
	s, err := sampler.New(c)
	if err != nil {
		return nil, err
	}

	s.Observe(prompt...)
	next, err := d.Decoder()
	if err != nil {
		return nil, err
	}

	tokens := slices.Clone(prompt)
	for range n {
		logits, err := next(ctx, tokens)
		if err != nil {
			return nil, err
		}
		id, err := sampler.Draw(s, logits.([]float32))
		if err != nil {
			return nil, err
		}
		tokens = append(tokens, id)
	}
	return tokens[len(prompt):], nil
}

// TestDraws checks that a device running one step ahead draws the same tokens as the host. Between draws,
// the texts are changed, cut off and continued by other samplers.
func TestDraws(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	drawing, plain, _ := inferences(t, device)
	prompt := []int{3, 1, 4, 1, 5}
	for _, c := range samplings {
		want := onHost(t, plain, c, prompt, 40)
		draw, err := drawing.Drawer()
		require.NoError(t, err)
		s, err := sampler.New(c)
		require.NoError(t, err)
		s.Observe(prompt...)
		tokens := slices.Clone(prompt)
		for i := range 40 {
			id, err := draw(t.Context(), tokens, s, i == 39)
			require.NoError(t, err)
			require.Equal(t, want[i], id, "token %d of %+v", i, c)
			tokens = append(tokens, id)
		}
	}

	// The device guesses wrong.
	draw, err := drawing.Drawer()
	require.NoError(t, err)
	r := rand.New(rand.NewPCG(1, 2))
	tokens := slices.Clone(prompt)
	for range 60 {
		switch r.IntN(3) {
		case 0:
			tokens = append(tokens[:max(2, len(tokens)-r.IntN(4))], r.IntN(19))
		case 1:
			tokens = tokens[:max(2, len(tokens)-r.IntN(9))]
		}
		if len(tokens) > 50 {
			tokens = tokens[:10]
		}
		c := samplings[r.IntN(len(samplings))]
		s, err := sampler.New(c)
		require.NoError(t, err)
		s.Observe(tokens...)
		want := onHost(t, plain, c, tokens, 3)
		for i := range 3 {
			id, err := draw(t.Context(), tokens, s, false)
			require.NoError(t, err)
			require.Equal(t, want[i], id)
			tokens = append(tokens, id)
		}
	}

	require.NoError(t, drawing.Close())
	require.NoError(t, plain.Close())
	requireNoLeaks(t, device)
}

// countingMachine counts the rows that take their token from the preceding pass.
type countingMachine struct {
	*Machine
	ahead *atomic.Int64
}

func (m countingMachine) Draw(ctx context.Context, p sampling.Pass) (func() ([]int, error), error) {
	for _, row := range p.From {
		if row >= 0 {
			m.ahead.Add(1)
		}
	}
	return m.Machine.Draw(ctx, p)
}

// TestDrawsInBatches checks the tokens of several texts that different samplers continue at the same
// time. Texts join and leave at any time, are cut off, and continue with other tokens or samplers. The
// device must draw a good share of the tokens before they are requested, and must not leak memory.
func TestDrawsInBatches(t *testing.T) {
	randtest.Concurrent(t)
	device, _ := openFake(t, fake.Config{})
	drawing, plain, _ := inferences(t, device)
	var ahead, all atomic.Int64
	newMachine := drawing.Make
	drawing.Make = func(g *llm.Graph) (llm.Machine, error) {
		m, err := newMachine(g)
		if err != nil {
			return nil, err
		}
		return countingMachine{m.(*Machine), &ahead}, nil
	}
	b, err := drawing.NewBatcher(llm.BatcherOptions{Texts: 4, Rows: 20, Tokens: 6 * 64})
	require.NoError(t, err)
	host, err := plain.NewBatcher(llm.BatcherOptions{Texts: 4, Rows: 20, Tokens: 8 * 64})
	require.NoError(t, err)

	var texts sync.WaitGroup
	for i := range 6 {
		texts.Go(func() {
			assert.NoError(t, drawText(t, i, b, host, &all))
		})
	}
	texts.Wait()
	t.Logf("%d of %d tokens were drawn ahead", ahead.Load(), all.Load())
	require.Greater(t, ahead.Load(), all.Load()/8)
	require.NoError(t, b.Close())
	require.NoError(t, host.Close())
	requireNoLeaks(t, device)
}

// drawText extends and edits a text at random, and compares its tokens with the host's draws.
func drawText(t *testing.T, i int, b, host *llm.Batcher, all *atomic.Int64) error {
	r := rand.New(rand.NewPCG(uint64(i), 2))
	draw, err := b.Drawer()
	if err != nil {
		return err
	}
	tokens := []int{3, i, 4}
	for range 12 {
		switch r.IntN(4) {
		case 0:
			tokens = append(tokens[:max(1, len(tokens)-r.IntN(4))], r.IntN(19))
		case 1:
			tokens = tokens[:max(1, len(tokens)-r.IntN(9))]
		case 2:
			draw, err = b.Drawer()
			if err != nil {
				return err
			}
		}
		if len(tokens) > 35 {
			tokens = tokens[:10]
		}
		c := samplings[r.IntN(len(samplings))]
		s, err := sampler.New(c)
		if err != nil {
			return err
		}
		s.Observe(tokens...)
		n := 1 + r.IntN(20)
		want, err := hostTokens(t.Context(), host, c, tokens, n)
		if err != nil {
			return err
		}
		for k := range n {
			id, err := draw(t.Context(), tokens, s, k == n-1 && r.IntN(2) == 0)
			if err != nil {
				return err
			}
			if id != want[k] {
				return fmt.Errorf("token %d of text %d is %d, want %d", k, i, id, want[k])
			}
			tokens = append(tokens, id)
			all.Add(1)
		}
	}
	return nil
}

// TestUndrawable checks that a sampler that excludes all tokens fails with the same error as on the host,
// and that the text can continue with another sampler.
func TestUndrawable(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	drawing, plain, c := inferences(t, device)
	bias := map[int]float64{}
	for id := range c.Vocab {
		bias[id] = math.Inf(-1)
	}
	prompt := []int{3, 1, 4}
	check := func(draw llm.DrawFunc) {
		good, err := sampler.New(sampler.Config{})
		require.NoError(t, err)
		id, err := draw(t.Context(), prompt, good, false)
		require.NoError(t, err)
		none, err := sampler.New(sampler.Config{Bias: bias})
		require.NoError(t, err)
		tokens := append(slices.Clone(prompt), id)
		_, err = draw(t.Context(), tokens, none, false)
		require.ErrorContains(t, err, "none of 19 logits is more than -Inf")
		next, err := draw(t.Context(), tokens, good, false)
		require.NoError(t, err)
		require.Equal(t, onHost(t, plain, sampler.Config{}, prompt, 2), []int{id, next})
	}

	draw, err := drawing.Drawer()
	require.NoError(t, err)
	check(draw)
	b, err := drawing.NewBatcher(llm.BatcherOptions{Texts: 2, Rows: 20, Tokens: 2 * 64})
	require.NoError(t, err)
	draw, err = b.Drawer()
	require.NoError(t, err)
	check(draw)
	require.NoError(t, b.Close())
	require.NoError(t, plain.Close())
	requireNoLeaks(t, device)
}

// TestAdaptersInBatches continues texts with different adapters and with none in the same passes. It compares the
// logits, and the tokens that the device draws, with those of models that have one of the adapters.
func TestAdaptersInBatches(t *testing.T) {
	randtest.Concurrent(t)
	device, _ := openFake(t, fake.Config{})
	base, err := llm.NewModel(llm.Config{Vocab: 19, Dim: 16, Layers: 2, Heads: 4, KVHeads: 2, Seq: 60}.Default(),
		tensor.Float32, 1)
	require.NoError(t, err)

	models := []*llm.Model{base}
	var adapters []*llm.Adapter
	r := rand.New(rand.NewPCG(3, 4))
	for _, l := range []llm.LoRA{
		{Rank: 2, Alpha: 8, Targets: []string{"q_proj", "v_proj", "down_proj"}},
		{Rank: 3, Alpha: 6, Targets: []string{"q_proj", "k_proj", "o_proj", "gate_proj", "up_proj"}, Magnitude: true},
		{Rank: 9, Alpha: 9, Targets: []string{"layers.1.self_attn.q_proj", "layers.1.mlp.up_proj"}},
	} {
		l.Targets, err = base.Config.MatchLayers(l.Targets...)
		require.NoError(t, err)
		a, err := llm.NewAdapter(base.Config, l, tensor.Float32)
		require.NoError(t, err)
		for _, p := range a.Params {
			for i, x := 0, p.Value.Float32s(); i < len(x); i++ {
				x[i] = float32(0.5 + r.NormFloat64()*0.3)
			}
		}
		m, err := base.Attach(a)
		require.NoError(t, err)
		models, adapters = append(models, m), append(adapters, a)
	}
	for _, m := range seededModels(t, base) {
		a, err := m.SeedAdapter()
		require.NoError(t, err)
		models, adapters = append(models, m), append(adapters, a)
	}

	set, err := llm.NewAdapterSet(t.Context(), base.Config, adapters, modeltest.Weights{Model: base})
	require.NoError(t, err)
	g, err := llm.BuildGraph(llm.Outline(base.Config), llm.ForLogits, 1, llm.WithAdapterSet(set))
	require.NoError(t, err)
	read := func(n *gorgonia.Node, put func([]byte, Precision) error) error {
		float32s := func(part []byte, _ string) error { return put(part, Float32) }
		if ok, err := set.Read(n.Name(), float32s); ok {
			return err
		}
		return modeltest.Weights{Model: base}.Read(t.Context(), n.Name(), float32s)
	}
	owner, err := NewMachine(device, g.G, WithFrozen(read, g.Params...))
	require.NoError(t, err)
	i := llm.InferenceOf(base.Config, func(g *llm.Graph) (llm.Machine, error) {
		opts := []MachineOption{WithStrict(), WithParamsOf(owner), WithOutputs(g.Outputs()...)}
		if g.Draws {
			opts = append(opts, WithDraws(g.Logits, g.IDs))
		}
		return NewMachine(device, g.G, opts...)
	}, owner.Close)
	i.Adapters, i.DrawsOnDevice = set, true
	b, err := i.NewBatcher(llm.BatcherOptions{Texts: 5, Rows: 20, Tokens: 8 * 64})
	require.NoError(t, err)
	_, err = b.Adapted(6)
	require.ErrorContains(t, err, "no adapter 6 of 6")

	var texts sync.WaitGroup
	n := len(models)
	for k := range 3 * n {
		texts.Go(func() {
			g := b.Generator()
			if k%n > 0 {
				var err error
				if g, err = b.Adapted(k%n - 1); !assert.NoError(t, err) {
					return
				}
			}
			// Texts without log-probabilities are drawn on the device.
			for _, logProbs := range []bool{false, true} {
				c := sampler.Config{Temperature: 1, Seed: uint64(k), LogProbs: logProbs}
				got, err := generated(t.Context(), g, c, []int{3, k / n, 5}, 30)
				assert.NoError(t, err)
				alone, err := llm.NewGenerator(models[k%n])
				if !assert.NoError(t, err) {
					return
				}
				want, err := generated(t.Context(), alone, c, []int{3, k / n, 5}, 30)
				assert.NoError(t, err)
				assert.Equal(t, want, got, "text %d", k)
				assert.NoError(t, alone.Close())
			}
		})
	}
	texts.Wait()

	for k, m := range models {
		g := b.Generator()
		if k > 0 {
			g, err = b.Adapted(k - 1)
			require.NoError(t, err)
		}
		got, err := g.Embed(t.Context(), [][]int{{3, 1, 4}, {1, 5, 9, 2, 6}}, llm.MeanPooling)
		require.NoError(t, err)
		alone, err := llm.NewBatcher(m, llm.BatcherOptions{})
		require.NoError(t, err)
		want, err := alone.Generator().Embed(t.Context(), [][]int{{3, 1, 4}, {1, 5, 9, 2, 6}}, llm.MeanPooling)
		require.NoError(t, err)
		require.NoError(t, alone.Close())
		for i := range want {
			require.InDeltaSlice(t, want[i], got[i], 1e-4)
		}
	}
	require.NoError(t, b.Close())
	requireNoLeaks(t, device)
}

// seededModels returns models with seeds after the blocks of a model: LowRank seeds, ChunkMLP seeds, and both kinds in
// several chunks with different values of α.
func seededModels(t *testing.T, base *llm.Model) (all []*llm.Model) {
	for rank, kind := range []blueprints.Kind{blueprints.LowRank, blueprints.ChunkMLP} {
		m, err := llm.TuneSeeds(base, kind, 2+7*rank)
		require.NoError(t, err)
		all = append(all, m)
	}

	c := base.Config
	c.Kasmina, c.Seeds, c.SlotWidth = []int{1}, 4, 5*c.Dim
	m, err := llm.NewModelFrom(c.Default(), tensor.Float32, func(p llm.Param) error {
		if from := base.Param(p.Name); from != nil {
			return tensor.Copy(p.Value, from)
		}
		return nil
	}, state.WithoutGates())
	require.NoError(t, err)
	for seed, kind := range []blueprints.Kind{blueprints.LowRank, blueprints.ChunkMLP, blueprints.LowRank} {
		require.NoError(t, m.Kasmina.Do(
			state.Command{Action: state.Germinate, Seed: seed, Request: state.GerminationRequest{Slot: seed + 1, Kind: kind}},
			state.Command{Action: state.Move, Seed: seed, To: state.Training},
			state.Command{Action: state.Move, Seed: seed, To: state.Grafting},
			state.Command{Action: state.SetAlpha, Seed: seed, Alpha: 0.3 * float64(seed+1)}))
	}
	all = append(all, m)

	for k, m := range all {
		for _, p := range m.Params {
			if llm.IsSeedParam(p.Name) {
				for i, x := 0, p.Value.Float32s(); i < len(x); i++ {
					x[i] = float32(math.Sin(float64(1000*k + i)))
				}
			}
		}
	}
	return all
}

// TestPackedTexts continues texts with linear layers in float8 and NF4 on a device, one alone and several together. It
// compares the tokens with those of a model that has the rounded weights.
func TestPackedTexts(t *testing.T) {
	randtest.Concurrent(t)
	base, err := llm.NewModel(llm.Config{Vocab: 19, Dim: 64, Layers: 2, Heads: 4, KVHeads: 2, Seq: 60}.Default(),
		tensor.Float32, 1)
	require.NoError(t, err)
	for _, p := range base.Params { // large weights, so that rounding them changes tokens
		if len(p.Value.Shape()) == 2 {
			for i, x := 0, p.Value.Float32s(); i < len(x); i++ {
				x[i] *= 10
			}
		}
	}
	for _, typ := range []cpuops.WeightType{cpuops.Float8, cpuops.NF4} {
		t.Run(typ.String(), func(t *testing.T) {
			device, _ := openFake(t, fake.Config{})
			packed, err := llm.PackLayers(t.Context(), typ, base.Config, modeltest.Weights{Model: base})
			require.NoError(t, err)
			require.Len(t, packed.Names(), 7*2)

			rounded, err := llm.NewModelFrom(base.Config, tensor.Float32, func(p llm.Param) error {
				_, rows, _, ok := packed.Matrix(p.Name)
				if !ok {
					copy(p.Value.Float32s(), base.Param(p.Name).Float32s())
					return nil
				}
				return packed.Rows(p.Name, p.Value.Float32s(), 0, rows)
			})
			require.NoError(t, err)
			want, err := llm.NewGenerator(rounded)
			require.NoError(t, err)

			g, err := llm.BuildGraph(llm.Outline(base.Config), llm.ForLogits, 1)
			require.NoError(t, err)
			read := func(n *gorgonia.Node, put func([]byte, Precision) error) error {
				require.False(t, packed.Has(n.Name()), n.Name())
				return modeltest.Weights{Model: base}.Read(t.Context(), n.Name(), func(part []byte, _ string) error {
					return put(part, Float32)
				})
			}
			owner, err := NewMachine(device, g.G, WithFrozen(read, g.Params...), WithWeights(packed))
			require.NoError(t, err)
			i := llm.InferenceOf(base.Config, func(g *llm.Graph) (llm.Machine, error) {
				return NewMachine(device, g.G, WithStrict(), WithParamsOf(owner), WithWeights(packed),
					WithOutputs(g.Outputs()...))
			}, owner.Close)
			b, err := i.NewBatcher(llm.BatcherOptions{Texts: 3, Rows: 20, Tokens: 8 * 64})
			require.NoError(t, err)

			var texts sync.WaitGroup
			for k := range 5 {
				c := sampler.Config{Temperature: 1, Seed: uint64(k), LogProbs: true}
				tokens, err := generated(t.Context(), want, c, []int{3, k, 5}, 30)
				require.NoError(t, err)
				texts.Go(func() {
					got, err := generated(t.Context(), b.Generator(), c, []int{3, k, 5}, 30)
					assert.NoError(t, err)
					assert.Equal(t, tokens, got, "text %d", k)
				})
			}
			texts.Wait()
			require.NoError(t, b.Close())
			require.NoError(t, want.Close())
			requireNoLeaks(t, device)
		})
	}
}

// generated returns the tokens that a generator adds to a prompt.
func generated(ctx context.Context, g *llm.Generator, c sampler.Config, prompt []int, n int) (ids []int, err error) {
	s, err := sampler.New(c)
	if err != nil {
		return nil, err
	}
	for id, err := range g.Generate(ctx, prompt, n, s) {
		if err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, nil
}

// TestLookupInBatches checks that proposed tokens change no text on a device, with few pages and with texts that share
// their beginning, and that they save passes.
func TestLookupInBatches(t *testing.T) {
	randtest.Concurrent(t)
	device, _ := openFake(t, fake.Config{})
	first, plain, c := inferences(t, device)
	second, guessing, _ := inferences(t, device)
	require.NoError(t, errors.Join(first.Close(), second.Close()))
	passes := [2]atomic.Int64{}
	for i, in := range []*llm.Inference{plain, guessing} {
		newMachine := in.Make
		in.Make = func(g *llm.Graph) (llm.Machine, error) {
			m, err := newMachine(g)
			if err != nil {
				return nil, err
			}
			return passCounter{m.(*Machine), &passes[i]}, nil
		}
	}
	one, err := plain.NewBatcher(llm.BatcherOptions{Texts: 3, Rows: 40, Tokens: 6 * 64})
	require.NoError(t, err)
	other, err := guessing.NewBatcher(llm.BatcherOptions{Texts: 3, Rows: 40, Tokens: 6 * 64, Lookup: 6})
	require.NoError(t, err)

	var texts sync.WaitGroup
	for k := range 6 {
		texts.Go(func() {
			s := sampler.Config{Vocab: c.Vocab}
			if k%2 > 0 {
				s.Temperature, s.Seed = 0.3, uint64(k)
			}
			want, err := generated(t.Context(), one.Generator(), s, []int{3, 1, 4, k / 3}, 50)
			assert.NoError(t, err)
			got, err := generated(t.Context(), other.Generator(), s, []int{3, 1, 4, k / 3}, 50)
			assert.NoError(t, err)
			assert.Equal(t, want, got, "text %d", k)
		})
	}
	texts.Wait()

	// Only a text alone takes the same number of passes every time.
	for i, b := range []*llm.Batcher{one, other} {
		before := passes[i].Load()
		_, err := generated(t.Context(), b.Generator(), sampler.Config{Vocab: c.Vocab}, []int{3, 1, 4}, 50)
		require.NoError(t, err)
		passes[i].Store(passes[i].Load() - before)
	}
	t.Logf("%d passes without proposals, %d with them", passes[0].Load(), passes[1].Load())
	require.Less(t, passes[1].Load(), passes[0].Load()*3/4)
	require.NoError(t, one.Close())
	require.NoError(t, other.Close())
	requireNoLeaks(t, device)
}

// A passCounter counts the runs of machines.
type passCounter struct {
	*Machine
	runs *atomic.Int64
}

func (m passCounter) Run(ctx context.Context) error {
	m.runs.Add(1)
	return m.Machine.Run(ctx)
}
