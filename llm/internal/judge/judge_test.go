package judge

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/state"
)

// A model is a network of seeds with losses that depend on the stages in a forward pass.
type model struct {
	seeds   *state.Network
	lattice *state.Lattice
	batches int // computed so far
	loss    func(batch int, stages []state.Stage) float64
}

// newModel returns a model with one seed in each of the given stages.
func newModel(t *testing.T, stages ...state.Stage) *model {
	lattice, err := state.NewLattice(len(stages), 8, state.WithoutGates())
	require.NoError(t, err)
	seeds, err := state.NewNetwork(nil, state.Layer{Name: "chunks", Lattice: lattice})
	require.NoError(t, err)
	for seed, stage := range stages {
		require.NoError(t, seeds.Do(state.Command{Action: state.Germinate, Seed: seed,
			Request: state.GerminationRequest{Kind: blueprints.Residual, Slot: seed + 1}}))
		for s := state.Training; s <= stage; s++ {
			require.NoError(t, seeds.Do(state.Command{Action: state.Move, Seed: seed, To: s}))
		}
	}
	return &model{seeds: seeds, lattice: lattice}
}

// judge returns a judge of the model on a text of two batches.
func (m *model) judge(t *testing.T) Judge {
	text, err := data.NewEvaluation(texttest.Words(1, 40), tokenizer.Bytes{}, 2, 8)
	require.NoError(t, err)
	n := 0
	for range text.Batches() {
		n++
	}
	return Judge{Seeds: m.seeds, Text: text, Loss: func(data.Batch) (float64, error) {
		var pass state.Pass
		m.lattice.Begin(&pass, false)
		loss := m.loss(m.batches%n, pass.Stage)
		m.batches++
		return loss, nil
	}}
}

// TestAdd checks the metrics of two seeds: one in Training, which is tested at full strength, and one
// under evaluation, which is muted. Both must be restored afterwards.
func TestAdd(t *testing.T) {
	m := newModel(t, state.Training, state.Evaluating)
	m.loss = func(batch int, stages []state.Stage) float64 {
		loss := 3.0
		if stages[0] == state.FineTuning {
			loss += 0.25 // harmful at full strength
		}
		if stages[1] == state.Dormant {
			loss += 1 - 0.5*float64(min(batch, 1)) // helps with all batches, with the first one most
		}
		return loss
	}
	metrics := make([]state.Metrics, 1)
	j := m.judge(t)
	verdict, err := j.Add(metrics)
	require.NoError(t, err)
	require.Nil(t, verdict, "no seed is on trial")

	all := metrics[0].Seeds
	require.Len(t, all, 2)
	require.InDelta(t, 0.25, all[0].TrainingError, 1e-12)
	require.True(t, all[0].Unscored)
	require.True(t, all[1].Compared)
	require.InDelta(t, -3, all[1].Performance, 1e-12)
	require.Less(t, all[1].Without, -3.5)
	require.Equal(t, 1.0, all[1].Stability)

	var pass state.Pass
	m.lattice.Begin(&pass, false)
	require.Equal(t, []state.Stage{state.Training, state.Evaluating}, pass.Stage)
	mean, err := j.Mean()
	require.NoError(t, err)
	require.InDelta(t, 3, mean, 1e-12)
}

// TestTrial checks that a seed on trial is compared with the losses of the twin, and the verdict on a twin
// that has diverged.
func TestTrial(t *testing.T) {
	m := newModel(t, state.Grafting)
	m.loss = func(int, []state.Stage) float64 { return 2 }
	j := m.judge(t)
	j.Trial = []state.Address{{}}

	with, err := j.Losses()
	require.NoError(t, err)
	for range with {
		j.Without = append(j.Without, 1.5)
	}
	metrics := make([]state.Metrics, 1)
	verdict, err := j.Add(metrics)
	require.NoError(t, err)
	require.Equal(t, &Verdict{Harm: 0.5, Agree: 1}, verdict)

	j.Without = []float64{math.Inf(1)}
	verdict, err = j.Add(metrics)
	require.NoError(t, err)
	require.Negative(t, verdict.Harm)
	require.Equal(t, 1.0, verdict.Agree)
}

// TestNotFinite checks that a loss that is not finite counts as an error of the seed, and that a model
// without finite losses has the worst performance.
func TestNotFinite(t *testing.T) {
	m := newModel(t, state.FineTuning)
	m.loss = func(_ int, stages []state.Stage) float64 {
		if stages[0] == state.Dormant {
			return 2
		}
		return math.NaN()
	}
	metrics := make([]state.Metrics, 1)
	j := m.judge(t)
	_, err := j.Add(metrics)
	require.NoError(t, err)
	seed := metrics[0].Seeds[0]
	require.Equal(t, float64(-worstLoss), seed.Performance)
	require.Positive(t, seed.Errors)
	mean, err := j.Mean()
	require.NoError(t, err)
	require.Equal(t, float64(worstLoss), mean)
}

// TestDepth checks that a growth in depth is compared with the curve from before it.
func TestDepth(t *testing.T) {
	past := []state.Transition{{To: state.Evaluating, Epoch: 42}, {To: state.Grafting, Epoch: 40}}
	law := func(share float64) float64 { return 2 + math.Pow(share, -0.5) }
	var points []state.Point
	for epoch := 1; epoch <= 44; epoch++ {
		p := state.Point{Epoch: epoch, Share: float64(epoch) / 100}
		if p.Loss = law(p.Share); epoch > 40 {
			p.Loss -= 0.1 // the gain from the growth
		}
		points = append(points, p)
	}

	m, ok := Depth(points, past, 3)
	require.True(t, ok)
	require.Equal(t, 3, m.Seed)
	require.InDelta(t, 0.1, m.Performance-m.Without, 0.01)

	_, ok = Depth(points, past[1:], 3)
	require.False(t, ok, "the seed has not reached Evaluating")
	_, ok = Depth(points[:42], past, 3)
	require.False(t, ok, "there is no point after Evaluating")
	_, ok = Depth(points[40:], past, 3)
	require.False(t, ok, "there is no curve from before the growth")

	points[43].Loss = math.NaN()
	m, ok = Depth(points, past, 3)
	require.True(t, ok)
	require.Equal(t, float64(-worstLoss), m.Performance)
	require.Equal(t, 1, m.Errors)
}
