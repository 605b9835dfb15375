package llm

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/safetensors"
)

// omitting returns functions that make trainers with the option OmitBase.
func omitting(t *testing.T) map[string]func(seed uint64) *Trainer {
	c := maskedConfig()
	tuned, err := c.LastBlocks(1)
	require.NoError(t, err)
	base := func(seed uint64) *Model {
		m, err := NewModel(c, tensor.Float32, seed)
		require.NoError(t, err)
		return m
	}
	trainer := func(m *Model, tuned ...string) *Trainer {
		tr := newTuningTrainer(t, m, false, tuned...)
		tr.Config.OmitBase = true
		return tr
	}
	return map[string]func(uint64) *Trainer{
		"adapters": func(seed uint64) *Trainer {
			m, err := Adapt(base(seed), adapters(t, c)["DoRA with dropout"], 3)
			require.NoError(t, err)
			return trainer(m)
		},
		"last block": func(seed uint64) *Trainer { return trainer(base(seed), tuned...) },
	}
}

// TestOmitBase checks that a checkpoint contains only the trained parameters, that a run continues from it bit
// for bit, and that it is rejected with another model.
func TestOmitBase(t *testing.T) {
	for name, make := range omitting(t) {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "run.safetensors")
			whole := make(7)
			whole.On(func(e Event) error {
				switch {
				case e.Kind != StepEnd || e.Step != 7:
					return nil
				case name == "adapters":
					return whole.SaveApart(path)
				}
				return whole.Save(path)
			})
			want := lossesOf(t, whole)

			f, err := safetensors.Open(path)
			require.NoError(t, err)
			for _, p := range whole.Model.Params {
				_, _, err := f.Info(p.Name)
				require.Equal(t, whole.Config.Learns(p.Name), err == nil, p.Name)
			}
			require.NoError(t, f.Close())

			resumed := make(7)
			require.NoError(t, resumed.Resume(t.Context(), path))
			require.Equal(t, want[7:], lossesOf(t, resumed))
			require.Equal(t, copies(whole.Model), copies(resumed.Model))

			other := make(8)
			before := copies(other.Model)
			err = other.Resume(t.Context(), path)
			require.ErrorIs(t, err, ErrArchitecture)
			require.ErrorContains(t, err, "the run tuned a model with other weights")
			require.Equal(t, before, copies(other.Model))
			_, err = LoadModel(t.Context(), path)
			require.ErrorContains(t, err, "resume the run, or load its result")

			// A complete checkpoint is larger, and continues a run that would omit its base.
			complete := make(7)
			complete.Config.OmitBase = false
			full := filepath.Join(t.TempDir(), "full.safetensors")
			require.NoError(t, complete.Save(full))
			partial := filepath.Join(t.TempDir(), "partial.safetensors")
			require.NoError(t, make(7).Save(partial))
			small, err := os.Stat(partial)
			require.NoError(t, err)
			large, err := os.Stat(full)
			require.NoError(t, err)
			require.Greater(t, large.Size(), small.Size())
			require.NoError(t, make(8).Resume(t.Context(), full))
		})
	}
}

// TestTuningFLOPs compares the operations of tuning with a count by hand.
func TestTuningFLOPs(t *testing.T) {
	c := maskedConfig()
	matrices := func(in string) (n float64) {
		for p := range c.Specs() {
			if len(p.Shape) == 2 && strings.HasPrefix(p.Name, in) {
				n += float64(p.Shape[0] * p.Shape[1])
			}
		}
		return n
	}
	attention := float64(c.Heads*c.HeadDim) * c.seen(0)
	embed, block := matrices(embedName), matrices(blockPrefix(0))
	all := 6 * (embed + 2*block + 2*attention)
	require.InEpsilon(t, all, c.FLOPs(), 1e-12)
	require.InEpsilon(t, all, c.tuningFLOPs(learning{}), 1e-12)

	// Adapters of rank 2 on the queries of both blocks, and of the last block alone.
	for first, want := range []float64{4*(embed+2*block) + 6*2*attention,
		2*(block+attention) + 4*(embed+block) + 6*attention} {
		a := LoRA{Rank: 2, Alpha: 1}
		for i := first; i < c.Layers; i++ {
			a.Targets = append(a.Targets, blockPrefix(i)+"self_attn.q_proj")
			want += 6 * float64(2*(c.Dim+c.Heads*c.HeadDim))
		}
		adapted := c
		adapted.Adapter = a
		require.InEpsilon(t, want, adapted.FLOPs(), 1e-12)
	}

	// In the last block alone. The embedding, which is the output layer too, does not learn.
	tuned, err := c.LastBlocks(1)
	require.NoError(t, err)
	want := 2*(block+attention) + 6*(block+attention) + 4*embed
	require.InEpsilon(t, want, c.tuningFLOPs(learning{tuned: tuned}), 1e-12)

	tr := omitting(t)["last block"](7)
	lossesOf(t, tr)
	require.InEpsilon(t, float64(tr.Last().RunTokens)*want, tr.Last().RunFLOPs, 1e-12)
}
