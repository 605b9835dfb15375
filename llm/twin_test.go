package llm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
	"github.com/kasmina-go/kasmina/state/graft"
)

// badFilter is a controller that plants a ConvFilter in one seed and spoils its weights at the start of
// grafting. Everything else is up to a Heuristic that plants nothing.
type badFilter struct {
	*control.Heuristic
	Layer, Seed, At int
	Weights         []float64
}

func (b badFilter) Decide(reports []state.Report) []state.Command {
	commands := b.Heuristic.Decide(reports)
	s := reports[b.Layer].Seeds[b.Seed]
	switch {
	case reports[0].Epoch == b.At:
		commands = append(commands, state.Command{Action: state.Germinate, Layer: b.Layer,
			Seed: b.Seed, Request: state.GerminationRequest{Slot: 1, Kind: blueprints.ConvFilter,
				Strategy: graft.FixedRamp{Epochs: 2, Target: 1}}})
	case s.Stage == state.Grafting && s.EpochsInStage == 0 || s.Stage == state.Training:
		spoil := state.Command{Action: state.Load, Layer: b.Layer, Seed: b.Seed,
			Kind: blueprints.ConvFilter, Params: state.SlotParams{Weights: b.Weights, Scale: 1}}
		commands = slices.Insert(commands, 0, spoil)
	}

	return commands
}

// withBadFilter returns the trainer of a small model with a badFilter, and its stage changes. The filter
// is never planted if plantedAt is noEpoch.
func withBadFilter(t *testing.T, random uint64, plantedAt int,
	clip float64) (*Trainer, *[]state.Event) {
	t.Helper()
	c := Config{Vocab: 256, Dim: 32, Layers: 2, Heads: 2, Seq: 32, Kasmina: []int{0}, Seeds: 4}
	c = c.Default()
	thresholds := state.DefaultThresholds()
	thresholds.MinEpochs = [len(thresholds.MinEpochs)]int{state.Training: 2, state.Grafting: 2,
		state.Stabilization: 1, state.Evaluating: 2, state.FineTuning: 2}
	thresholds.TrainingError = 1e3 // lets every blueprint through
	tr := newTrainer(t, trainerOptions{config: c, steps: 180, clip: &clip})
	m, err := NewModel(c, tensor.Float32, random, state.WithThresholds(thresholds))
	require.NoError(t, err)
	require.NoError(t, tr.Close())
	tr, err = NewTrainer(m, tr.Loader, tr.Optimizer, tr.Config)
	require.NoError(t, err)
	text, err := data.NewEvaluation(texttest.Words(9, 600), tokenizer.Bytes{}, 2, c.Seq)
	require.NoError(t, err)
	h := control.NewHeuristic(0, 0) // plants nothing
	h.Patience, h.RampEpochs = 20, 2
	b := badFilter{Heuristic: h, Layer: 0, Seed: int(random % 4), At: plantedAt,
		Weights: make([]float64, 8)}
	for i := range b.Weights {
		b.Weights[i] = 9 * math.Sin(float64(random)+2*float64(i))
	}

	require.NoError(t, tr.Grow(Growth{Controller: b, Validation: text}))
	var events []state.Event
	_, err = tr.Model.Kasmina.Listen(func(e state.Event) {
		if e.Kind == state.StageChanged {
			events = append(events, e)
		}
	})
	require.NoError(t, err)
	return tr, &events
}

const noEpoch = 1 << 20

// TestBadFilter checks that a deliberately bad blueprint is rolled back for every random seed, with
// clipping and without, and that the final loss is within 1% of a run without the blueprint.
func TestBadFilter(t *testing.T) {
	randoms := uint64(2)
	if testing.Short() {
		randoms = 1
	} else if randtest.Long() {
		randoms = 10
	}
	for random := range randoms {
		clip := float64(random % 2) // alternately without and with clipping
		t.Run(fmt.Sprint("clip ", clip, " ", random), func(t *testing.T) {
			meetBadFilter(t, random, clip)
		})
	}
}

func meetBadFilter(t *testing.T, random uint64, clip float64) {
	met, events := withBadFilter(t, random, 10, clip)
	require.NoError(t, met.Run(t.Context()))
	plain, _ := withBadFilter(t, random, noEpoch, clip)
	clipped := 0
	plain.On(func(e Event) error {
		if e.Kind == StepEnd && e.GradNorm > 1 {
			clipped++
		}
		return nil
	})

	require.NoError(t, plain.Run(t.Context()))
	require.Greater(t, clipped, 20) // number of clipped steps
	at := slices.IndexFunc(*events, func(e state.Event) bool {
		return e.To == state.RolledBack
	})
	require.Positive(t, at, *events)
	last := (*events)[at]
	require.True(t, last.From.Grafted())
	require.NotEmpty(t, last.Reason)
	met.growth.twin, plain.growth.twin = nil, nil
	a, err := met.growth.judge().Mean()
	require.NoError(t, err)
	b, err := plain.growth.judge().Mean()
	require.NoError(t, err)
	t.Logf("%.4f, and %.4f without; rolled back from %v: %s", a, b, last.From, last.Reason)
	require.InEpsilon(t, b, a, 0.01)
}

// TestTrialResumes checks that a run interrupted at any step of a trial and resumed reproduces an
// uninterrupted run bit for bit.
func TestTrialResumes(t *testing.T) {
	straight, events := withBadFilter(t, 3, 10, 1)
	straight.growth.options.Every = 2
	require.NoError(t, straight.Run(t.Context()))
	var from, to int
	for _, e := range *events {
		if e.To == state.Grafting {
			from = e.Epoch * straight.Config.Epoch
		} else if e.To == state.RolledBack {
			to = e.Epoch * straight.Config.Epoch
		}
	}

	require.Less(t, from, to)
	path := filepath.Join(t.TempDir(), "run.safetensors")
	step := 7 // the start is random in each run of the test
	if randtest.Long() {
		step = 2
	}

	for until := from - 1 + rand.IntN(step); until <= to+1; until += step {
		broken, _ := withBadFilter(t, 3, 10, 1)
		broken.growth.options.Every = 2
		broken.On(Checkpoint(broken, path, 0))
		ctx, cancel := context.WithCancel(t.Context())
		broken.On(func(e Event) error {
			if e.Kind == StepEnd && e.Step == until {
				cancel()
			}
			return nil
		})
		require.True(t, errors.Is(broken.Run(ctx), context.Canceled))
		again, _ := withBadFilter(t, 3, 10, 1)
		again.growth.options.Every = 2
		require.NoError(t, again.Resume(t.Context(), path))
		require.NoError(t, again.Run(t.Context()))
		checkSame(t, straight, again)
	}
}

// sitesGrow returns the trainer of a run that grows at weights and in the stream.
func sitesGrow(t *testing.T, g Growth) *Trainer {
	t.Helper()
	c := tiny()
	c.Weights, c.Streams, c.Kasmina = c.WeightSites("q", "up", "down"), []int{0, 1}, nil
	base := newTrainer(t, trainerOptions{config: c, steps: 90})
	thresholds := state.DefaultThresholds()
	thresholds.MinEpochs = [len(thresholds.MinEpochs)]int{state.Training: 2, state.Grafting: 2,
		state.Stabilization: 1, state.Evaluating: 2, state.FineTuning: 2}
	m, err := NewModel(c, tensor.Float32, 7, state.WithThresholds(thresholds))
	require.NoError(t, err)
	require.NoError(t, base.Close())
	tr, err := NewTrainer(m, base.Loader, base.Optimizer, base.Config)
	require.NoError(t, err)
	t.Cleanup(func() { tr.Close() })
	g.Validation, err = data.NewEvaluation(texttest.Words(9, 300), tokenizer.Bytes{}, 2, c.Seq)
	require.NoError(t, err)
	require.NoError(t, tr.Grow(g))
	return tr
}

// TestHeuristicGrowsSites checks that a Heuristic plants where the gradients at weights and in the stream
// are largest, and that its record repeats the run bit for bit.
func TestHeuristicGrowsSites(t *testing.T) {
	h := control.NewHeuristic(3, 4000)
	h.Rank, h.Features, h.Patience, h.RampEpochs, h.PerEpoch = 2, 8, 12, 2, 3
	var record bytes.Buffer
	tr := sitesGrow(t, Growth{Controller: h, Record: &record})
	require.NoError(t, tr.Run(t.Context()))
	require.Contains(t, record.String(), `"kind":"LoRA","size":2`)
	require.Contains(t, record.String(), `"kind":"Perceptron","size":8`)
	require.Contains(t, record.String(), `"to":"Grafting"`)
	r, err := ReadRecord(&record)
	require.NoError(t, err)
	again := sitesGrow(t, Growth{Replay: r})
	require.NoError(t, again.Run(t.Context()))
	checkSame(t, tr, again)
	now, err := tr.driver.now()
	require.NoError(t, err)
	needs := needsOf(tr.Model.Config, blueprints.Weight, now.Moments, tr.Optimizer)
	require.Len(t, needs, 6)
	for _, n := range needs {
		require.Positive(t, n)
	}
}
