package llm

import (
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// TestTuneSeeds checks that new seeds change nothing at first, that only they learn, and that a resumed run is
// bit-identical.
func TestTuneSeeds(t *testing.T) {
	for _, kind := range []blueprints.Kind{blueprints.LowRank, blueprints.ChunkMLP} {
		t.Run(kind.String(), func(t *testing.T) {
			base, err := NewModel(maskedConfig(), tensor.Float32, 7)
			require.NoError(t, err)
			enlarge(base.Param(embedName), 10)
			base.KasminaOptions.GradClip = 1e6
			seeded := func() *Trainer {
				m, err := TuneSeeds(base, kind, 4)
				require.NoError(t, err)
				return newTuningTrainer(t, m, false, SeedPatterns()...)
			}

			tr := seeded()
			require.Equal(t, base.KasminaOptions, tr.Model.KasminaOptions)
			require.InDelta(t, lossOf(t, base), lossOf(t, tr.Model), 1e-6)
			path := filepath.Join(t.TempDir(), "run.safetensors")
			tr.On(func(e Event) error {
				if e.Kind == StepEnd && e.Step == 7 {
					return tr.Save(path)
				}
				return nil
			})
			before, dim := copies(tr.Model), base.Config.Dim
			losses := lossesOf(t, tr)
			require.Less(t, losses[len(losses)-1], losses[0]-0.1, "%v", losses)
			for i, p := range tr.Model.Params {
				require.NotEqual(t, IsSeedParam(p.Name), slices.Equal(before[i], p.Value.Float32s()), p.Name)
			}

			require.Equal(t, base.Config.Layers*(2*4*dim+1), tr.Last().Params)

			resumed := seeded()
			require.NoError(t, resumed.Resume(t.Context(), path))
			require.Equal(t, losses[7:], lossesOf(t, resumed))
		})
	}
}

// TestSeedAdapterErrors checks that models and adapters that do not fit are refused.
func TestSeedAdapterErrors(t *testing.T) {
	base, err := NewModel(maskedConfig(), tensor.Float32, 7)
	require.NoError(t, err)
	_, err = base.SeedAdapter()
	require.ErrorContains(t, err, "no seed at a chunk or a weight changes the model's output")
	_, err = TuneSeeds(base, blueprints.Residual, 4)
	require.ErrorContains(t, err, "want LowRank or ChunkMLP")
	_, err = TuneSeeds(base, blueprints.LowRank, 0)
	require.ErrorContains(t, err, "the rank is 0")

	m, err := TuneSeeds(base, blueprints.LowRank, 4)
	require.NoError(t, err)
	_, err = TuneSeeds(m, blueprints.LowRank, 4)
	require.ErrorContains(t, err, "want a plain one")
	a, err := m.SeedAdapter()
	require.NoError(t, err)
	_, err = base.Attach(a)
	require.ErrorContains(t, err, "only texts of a Batcher can choose")

	refused := func(want string, change func(a *Adapter)) {
		t.Helper()
		other := &Adapter{Seeds: slices.Clone(a.Seeds)}
		other.Seeds[0].Seeds = slices.Clone(a.Seeds[0].Seeds)
		change(other)
		_, err := NewBatcher(base, BatcherOptions{Adapters: []*Adapter{other}})
		require.ErrorContains(t, err, want)
	}
	refused("seeds after block 9", func(a *Adapter) { a.Seeds[1].Block = 9 })
	refused("seeds after block 0 after those of block 0", func(a *Adapter) { a.Seeds[1].Block = 0 })
	refused("unknown blueprint kind", func(a *Adapter) { a.Seeds[0].Seeds[0].Kind = "Other" })
	refused("5 chunks of", func(a *Adapter) { a.Seeds[0].Chunks = 5 })
	refused("has no weights", func(a *Adapter) { a.Seeds[0].Seeds[0].Weights = nil })
	refused("neither low-rank adapters nor seeds", func(a *Adapter) { a.Seeds = nil })

	m.KasminaOptions.Stability = op.Strict
	_, err = m.SeedAdapter()
	require.ErrorContains(t, err, "the mode Strict")
	m.KasminaOptions.Stability = op.Adaptive
	require.NoError(t, m.Kasmina.Do(state.Command{Action: state.Move, Layer: 0, Seed: 0, To: state.Culled}))
	a, err = m.SeedAdapter()
	require.NoError(t, err)
	require.Len(t, a.Seeds, 1)
}

// TestWeightSeedAdapter compares texts that choose an adapter with seeds at weights and at chunks with those of the model
// that has the seeds. Two seeds are at the same weight.
func TestWeightSeedAdapter(t *testing.T) {
	c := tiny()
	c.Weights = append(c.WeightSites("q", "down"), WeightSite{Block: 1, Layer: "q"}, WeightSite{Layer: "head"})
	c.Streams, c.LoRAAlpha = []int{0}, 4
	tr := newTrainer(t, trainerOptions{config: c, dt: tensor.Float64, steps: 6})
	grafted := func(seed int) map[int][]state.Command {
		return map[int][]state.Command{
			1: {germinate(seed, blueprints.LoRA, 2+seed), move(seed, state.Training)},
			2: {move(seed, state.Grafting), {Action: state.SetAlpha, Seed: seed, Alpha: 0.2 * float64(seed)}}}
	}
	tr.On(together(blueprints.Weight, grafted(1), grafted(2), grafted(4)).give(tr))
	require.NoError(t, tr.Run(t.Context()))
	m := tr.Model
	require.Len(t, m.Planted, 3)
	a, err := m.SeedAdapter()
	require.NoError(t, err)
	require.Len(t, a.LoRA.Targets, 2)
	require.NotEmpty(t, a.Seeds) // newTrainer grafts some

	plain := c.Plain()
	base, err := NewModelFrom(plain, tensor.Float64, func(p Param) error { return tensor.Copy(p.Value, m.Param(p.Name)) })
	require.NoError(t, err)
	b := newBatcher(t, base, BatcherOptions{Adapters: []*Adapter{a}})
	g, err := b.Adapted(0)
	require.NoError(t, err)
	whole := &Inference{Model: m}
	defer whole.Close()
	next, err := g.decoder()
	require.NoError(t, err)
	want, err := whole.Decoder()
	require.NoError(t, err)
	none, err := b.Decoder()
	require.NoError(t, err)
	for text := []int{1, 2, 3}; len(text) < c.Seq; text = append(text, 5*len(text)) {
		x, err := next(t.Context(), text)
		require.NoError(t, err)
		y, err := want(t.Context(), text)
		require.NoError(t, err)
		z, err := none(t.Context(), text)
		require.NoError(t, err)
		require.Less(t, apartBy(t, x, y), 1e-12)
		require.Greater(t, apartBy(t, y, z), 1e-6)
	}
}
