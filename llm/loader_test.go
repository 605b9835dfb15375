package llm

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/optim"
)

var _ MaskedLoader = (*chatdata.Loader)(nil)

// masked returns sequences of up to 12 tokens with masks of different lengths.
func masked(n int) (all []chatdata.Sequence) {
	r := rand.New(rand.NewPCG(1, 2))
	for i := range n {
		s := chatdata.Sequence{File: "test.jsonl", Line: i + 1}
		length := 3 + r.IntN(10)
		for j := range length {
			s.IDs = append(s.IDs, r.IntN(16))
			s.Learn = append(s.Learn, j >= length-1-i%3*3 && j > 0)
		}
		all = append(all, s)
	}
	return all
}

// maskedConfig returns a model that keeps attention inside documents.
func maskedConfig() Config {
	return Config{Vocab: 256, Dim: 16, Layers: 2, Heads: 2, KVHeads: 1, Seq: 16, Documents: true}.Default()
}

// newMaskedTrainer returns a trainer on packed sequences. The loader goes through wrap first.
func newMaskedTrainer(t *testing.T, batch, accumulate int, wrap func(Loader) Loader) *Trainer {
	t.Helper()
	m, err := NewModel(maskedConfig(), tensor.Float32, 7)
	require.NoError(t, err)
	loader, err := chatdata.NewLoader(masked(40), data.LoaderConfig{Batch: batch, Seq: 16, Seed: 5})
	require.NoError(t, err)

	var l Loader = loader
	if wrap != nil {
		l = wrap(l)
	}

	o, err := adamW()
	require.NoError(t, err)
	tr, err := NewTrainer(m, l, o, TrainConfig{Steps: 12, Batch: batch, Accumulate: accumulate,
		Schedule: optim.Constant(o.LR()), Clip: 1})
	require.NoError(t, err)
	t.Cleanup(func() { tr.Close() })
	return tr
}

// lossesOf runs a trainer and returns the loss of every step.
func lossesOf(t *testing.T, tr *Trainer) (losses []float64) {
	t.Helper()
	tr.On(func(e Event) error {
		if e.Kind == StepEnd {
			losses = append(losses, e.Loss)
		}
		return nil
	})
	require.NoError(t, tr.Run(context.Background()))
	return losses
}

// far returns the largest difference between two lists of losses.
func far(a, b []float64) (most float64) {
	if len(a) != len(b) {
		return math.Inf(1)
	}
	for i := range a {
		most = max(most, math.Abs(a[i]-b[i]))
	}
	return most
}

// TestMaskedSteps checks that the losses of steps do not depend on how the rows of a step are divided
// into batches, although the batches have different numbers of targets.
func TestMaskedSteps(t *testing.T) {
	whole := lossesOf(t, newMaskedTrainer(t, 4, 1, nil))
	require.Len(t, whole, 12)
	for _, batch := range []int{1, 2} {
		t.Run(fmt.Sprintf("%d × %d", batch, 4/batch), func(t *testing.T) {
			if d := far(whole, lossesOf(t, newMaskedTrainer(t, batch, 4/batch, nil))); d > 1e-6 {
				t.Errorf("losses differ by %.2g", d)
			}
		})
	}

	// Without CountTargets, every batch is weighted equally, which gives a different loss.
	plain := func(l Loader) Loader { return struct{ Loader }{l} }
	if d := far(whole, lossesOf(t, newMaskedTrainer(t, 1, 4, plain))); d < 1e-3 {
		t.Errorf("equal shares of batches change the losses by only %.2g: the batches of the test are too similar", d)
	}
}

// TestMaskedResume checks that a run on packed sequences resumes bit for bit, even in the middle of
// an epoch.
func TestMaskedResume(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run.safetensors")
	whole := newMaskedTrainer(t, 2, 2, nil)
	whole.On(func(e Event) error {
		if e.Kind == StepEnd && e.Step == 5 {
			return whole.Save(path)
		}
		return nil
	})
	want := lossesOf(t, whole)

	resumed := newMaskedTrainer(t, 2, 2, nil)
	require.NoError(t, resumed.Resume(t.Context(), path))
	require.Equal(t, want[5:], lossesOf(t, resumed))
	for i, p := range whole.Model.Params {
		require.Equal(t, p.Value.Data(), resumed.Model.Params[i].Value.Data(), p.Name)
	}
}

// TestPackedLosses checks that packing sequences does not change the loss of any of them.
func TestPackedLosses(t *testing.T) {
	learned := maskedConfig()
	learned.Positions, learned.Blocks = 16, []Block{{NoRoPE: true}}
	for name, c := range map[string]Config{"rotary positions": maskedConfig(), "learned positions": learned} {
		t.Run(name, func(t *testing.T) {
			m, err := NewModel(c, tensor.Float32, 7)
			require.NoError(t, err)
			for _, p := range m.Params { // attention with fresh weights hardly depends on positions
				for i, x := range p.Value.Float32s() {
					p.Value.Float32s()[i] = 5 * x
				}
			}

			sequences := masked(40)
			inference := &Inference{Model: m}
			defer inference.Close()
			var want float64
			for i := range sequences {
				l, err := chatdata.NewLoader(sequences[i:i+1], data.LoaderConfig{Batch: 1, Seq: 16})
				require.NoError(t, err)
				sum, _ := sumLosses(t, inference, l, 1)
				want += sum
			}

			l, err := chatdata.NewLoader(sequences, data.LoaderConfig{Batch: 1, Seq: 16})
			require.NoError(t, err)
			require.Less(t, l.Rows(), 30, "nothing is packed")
			have, targets := sumLosses(t, inference, l, l.Rows())
			if d := math.Abs(have-want) / float64(targets); d > 1e-6 {
				t.Errorf("the mean loss is %v packed and %v one by one", have/float64(targets),
					want/float64(targets))
			}
		})
	}
}

// sumLosses returns the sum of the losses of all targets in the next batches, and their number.
func sumLosses(t *testing.T, inference *Inference, l Loader, batches int) (sum float64, targets int) {
	t.Helper()
	for range batches {
		b, err := l.Next()
		require.NoError(t, err)
		loss, err := inference.Loss(b)
		require.NoError(t, err)
		sum, targets = sum+loss*float64(b.Count), targets+b.Count
	}
	return sum, targets
}
