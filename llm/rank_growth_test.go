package llm

import (
	"math"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/llm/internal/block"
)

// growingTrainer returns a trainer for a model with growing adapters, limited to as many parameters as
// adapters of rank 4 have.
func growingTrainer(t *testing.T, old bool) (*Trainer, *RankGrowth) {
	t.Helper()
	base, err := NewModel(maskedConfig(), tensor.Float32, 7)
	require.NoError(t, err)
	a := adapters(t, base.Config)["LoRA"]
	a.Growing = true
	m, err := Adapt(base, a, 3)
	require.NoError(t, err)
	tr := newTuningTrainer(t, m, false)
	c := RankGrowthConfig{Batches: 3}
	if old {
		c.Old = oldText(t, m.Config)
	}
	r, err := NewRankGrowth(c)
	require.NoError(t, err)
	require.NoError(t, tr.Use(r))
	return tr, r
}

// TestRankGrowth checks that growth changes neither the function of the model nor the values and moments
// of existing ranks, that ranks differ between layers within the budget, that the model learns, and that
// a run resumed from various steps continues bit for bit.
func TestRankGrowth(t *testing.T) {
	for _, old := range []bool{false, true} {
		tr, growth := growingTrainer(t, old)
		budget := tr.Last().Params
		text := oldText(t, tr.Model.Config)
		before, _, err := tr.Evaluate(text)
		require.NoError(t, err)

		var texts, paths []string
		var losses []float64
		grew := 0
		tr.On(func(e Event) error {
			switch e.Kind {
			case RunStart:
				now, _, err := tr.Evaluate(text)
				require.NoError(t, err)
				require.InDelta(t, before, now, 1e-6)
				require.Equal(t, 1, growth.done)
			case Reshaped:
				texts = append(texts, e.Text)
			case StepEnd:
				losses = append(losses, e.Loss)
				paths = append(paths, filepath.Join(t.TempDir(), "run.safetensors"))
				require.NoError(t, tr.Save(paths[len(paths)-1]))
				require.LessOrEqual(t, e.Params, budget)

				// Growth between two steps must not change the function of the model.
				if growth.done < 3 {
					a, _, err := tr.Evaluate(text)
					require.NoError(t, err)
					done := takeToChange(tr.Model)
					kept := growth.done
					snapshot := momentsByRank(t, tr)
					require.NoError(t, growth.PrepareStep(Turn{tr, t.Context()}))
					if growth.done > kept {
						grew++
						checkKept(t, snapshot, momentsByRank(t, tr))
					}
					done()
					b, _, err := tr.Evaluate(text)
					require.NoError(t, err)
					if n := len(tr.growth.reshaped); n == 0 || strings.HasPrefix(tr.growth.reshaped[n-1].Text, "0 ranks") {
						require.InDelta(t, a, b, 1e-5)
					}
				}
			}
			return nil
		})
		require.NoError(t, tr.Run(t.Context()))
		require.Equal(t, 3, growth.done)
		require.Equal(t, 2, grew)
		require.GreaterOrEqual(t, len(texts), 3)
		require.Contains(t, texts[0], "ranks pruned and")
		require.Less(t, losses[len(losses)-1], losses[0])

		a := tr.Model.Config.Adapter
		different := map[int]bool{}
		for _, target := range a.Targets {
			different[a.RankOf(target)] = true
			require.InDelta(t, 2.0, a.ScaleOf(target), 1e-12)
		}
		require.Greater(t, len(different), 1, "all ranks are equal")
		require.Greater(t, tr.Last().Params, budget*3/4)

		for _, at := range []int{0, 3, 6, 12} {
			resumed, _ := growingTrainer(t, old)
			require.NoError(t, resumed.Resume(t.Context(), paths[at]))
			require.NoError(t, resumed.Run(t.Context()))
			require.Equal(t, tr.Model.Config, resumed.Model.Config)
			require.Equal(t, copies(tr.Model), copies(resumed.Model))
		}

		other, _ := growingTrainer(t, !old)
		require.ErrorIs(t, other.Resume(t.Context(), paths[5]), ErrSettings)
	}
}

// momentsByRank returns the values and moments of each rank, keyed by layer and the first number in the
// rank's row of a.
func momentsByRank(t *testing.T, tr *Trainer) map[string][]float32 {
	t.Helper()
	state := map[string][]float32{}
	for _, s := range tr.Optimizer.State() {
		if x, ok := s.Data.([]float32); ok {
			state[s.Name] = x
		}
	}

	all := map[string][]float32{}
	for _, target := range tr.Model.Config.Adapter.Targets {
		a, b := tr.Model.Param(target+block.EndingA), tr.Model.Param(target+block.EndingB)
		rank, in, out := a.Shape()[0], a.Shape()[1], b.Shape()[0]
		for k := range rank {
			key := target + string(rune(math.Float32bits(a.Float32s()[k*in])%100000))
			var column []float32
			for _, suffix := range []string{"", ".exp_avg", ".exp_avg_sq"} {
				x, y := a.Float32s(), b.Float32s()
				if suffix != "" {
					x, y = state[target+block.EndingA+suffix], state[target+block.EndingB+suffix]
				}
				if x == nil {
					continue
				}
				column = append(column, x[k*in:][:in]...)
				for o := range out {
					column = append(column, y[o*rank+k])
				}
			}
			all[key] = column
		}
	}
	return all
}

// checkKept checks that the remaining ranks have kept their values and moments.
func checkKept(t *testing.T, before, after map[string][]float32) {
	t.Helper()
	kept := 0
	for key, x := range before {
		if y, ok := after[key]; ok {
			require.Equal(t, x, y, strings.ToValidUTF8(key, "?"))
			kept++
		}
	}
	require.Positive(t, kept)
}

// TestRankDirections checks the directions of new ranks against a computation with whole matrices. They
// must maximize ‖g·a‖²/(aᵀ·(c + ε)·a), and must be orthogonal to existing ranks if no old text is given.
func TestRankDirections(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	normal := func(n int) []float32 {
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(r.NormFloat64())
		}
		return x
	}
	const in, k = 20, 16
	target := &rankTarget{out: 30, in: in, m: normal(k * in)}
	for range 3 {
		z := normal(k * in)
		for i := range z { // the old text hardly uses the later inputs
			z[i] /= float32(1 + i%in)
		}
		target.z = append(target.z, z)
	}

	// value returns the quotient for a direction.
	ridge := 0.0
	for _, z := range target.z {
		for _, v := range z {
			ridge += probeDamping * float64(v) * float64(v) / in / 3
		}
	}
	m := append([]float32(nil), target.m...)
	value := func(a []float32) float64 {
		gain, cost := 0.0, 0.0
		for i := range k {
			along := 0.0
			for f := range in {
				along += float64(m[i*in+f]) * float64(a[f])
			}
			gain += along * along
		}
		for _, z := range target.z {
			for i := range k {
				along := 0.0
				for f := range in {
					along += float64(z[i*in+f]) * float64(a[f])
				}
				cost += along * along / 3
			}
		}
		for _, v := range a {
			cost += ridge * float64(v) * float64(v)
		}
		return gain / cost
	}

	target.findDirections()
	require.Len(t, target.directions, k)
	for i, d := range target.directions {
		require.InEpsilon(t, target.values[i], value(d), 1e-3)
	}
	for range 200 {
		require.Less(t, value(normal(in)), target.values[0])
	}

	target = &rankTarget{out: 30, in: in, m: m, rank: 2, a: normal(2 * in)}
	target.findDirections()
	for _, d := range target.directions[:k-2] {
		for j := range 2 {
			along := 0.0
			for f := range in {
				along += float64(d[f]) * float64(target.a[j*in+f])
			}
			require.InDelta(t, 0, along, 1e-4)
		}
	}
}

// TestRankGrowthPrunes checks that ranks without effect on the new text, or with a larger effect on the old text,
// are pruned.
func TestRankGrowthPrunes(t *testing.T) {
	target := &rankTarget{out: 1, in: 2, rank: 4, a: []float32{1, 1, 2, 2, 3, 3, 4, 4}, b: []float32{1, 2, 3, 4},
		kept: []int{0, 1, 2, 3}, effect: []float64{1, 1e-4, 1, 2}, cost: []float64{0, 0, 3, 1}}
	require.Equal(t, 2, prune([]*rankTarget{target}))
	require.Equal(t, []int{0, 3}, target.kept)
	require.Equal(t, []float32{1, 1, 4, 4}, target.a)
	require.Equal(t, []float32{1, 4}, target.b)
}

// TestRankGrowthWithRetention checks that nothing grows after a rollback, and that a resumed run continues bit
// for bit.
func TestRankGrowthWithRetention(t *testing.T) {
	start := func() *Trainer {
		tr, _ := growingTrainer(t, true)
		useRetention(t, tr, 0.02)
		return tr
	}
	tr := start()
	var paths []string
	var ranks [][]string
	tr.On(func(e Event) error {
		if e.Kind == StepEnd {
			if e.Retention.Rollbacks > 0 {
				ranks = append(ranks, tr.Model.Config.Adapter.Targets)
			}
			paths = append(paths, filepath.Join(t.TempDir(), "run.safetensors"))
			return tr.Save(paths[len(paths)-1])
		}
		return nil
	})
	require.NoError(t, tr.Run(t.Context()))
	f := tr.Last().Retention
	require.Positive(t, f.Rollbacks)
	require.LessOrEqual(t, f.Rise(), 0.02)
	for _, targets := range ranks {
		require.Equal(t, ranks[0], targets)
	}

	for _, at := range []int{1, len(paths) - len(ranks)} {
		resumed := start()
		require.NoError(t, resumed.Resume(t.Context(), paths[at]))
		require.NoError(t, resumed.Run(t.Context()))
		require.Equal(t, tr.Model.Config, resumed.Model.Config)
		require.Equal(t, copies(tr.Model), copies(resumed.Model))
	}
}

// TestRankGrowthErrors checks the errors for adapters that cannot grow and for invalid configurations.
func TestRankGrowthErrors(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*LoRA)
		want   string
	}{
		"not growing": {func(a *LoRA) { a.Growing = false }, "set LoRA.Growing"},
		"magnitude":   {func(a *LoRA) { a.Magnitude = true }, "leave out LoRA.Magnitude"},
		"embedding":   {func(a *LoRA) { a.Targets = append([]string{EmbeddingLayer}, a.Targets...) }, "leave out the target"},
	} {
		t.Run(name, func(t *testing.T) {
			a := adapters(t, maskedConfig())["LoRA"]
			a.Growing = true
			c.change(&a)
			_, m := adapted(t, tensor.Float32, a)
			tr := newTuningTrainer(t, m, false)
			r, err := NewRankGrowth(RankGrowthConfig{})
			require.NoError(t, err)
			require.NoError(t, tr.Use(r))
			require.ErrorContains(t, tr.Run(t.Context()), c.want)
			require.Zero(t, tr.Step())
		})
	}

	for _, c := range []RankGrowthConfig{{Times: -1}, {Batches: -1}, {Parameters: -1}} {
		_, err := NewRankGrowth(c)
		require.ErrorContains(t, err, "llm: NewRankGrowth: RankGrowthConfig.")
	}
}
