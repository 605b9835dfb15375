package state

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
)

func depthLattice(t *testing.T, seeds int) *Lattice {
	t.Helper()
	l, err := NewLattice(seeds, seeds, At(blueprints.Depth))
	require.NoError(t, err)
	return l
}

// TestDepthSeed wants a seed in depth to live the life of any other, one at a time.
func TestDepthSeed(t *testing.T) {
	l := depthLattice(t, 2)
	stack := GerminationRequest{Kind: blueprints.Stack, Size: 4}
	for _, bad := range []GerminationRequest{
		{Kind: blueprints.Stack}, {Kind: blueprints.Stack, Size: -1},
		{Kind: blueprints.LowRank, Size: 1},
		{Kind: blueprints.Stack, Size: 4, Slot: 1}, {Kind: 255, Size: 1},
	} {
		require.ErrorIs(t, l.RequestGermination(0, bad), ErrArgument, "%+v", bad)
	}
	require.NoError(t, l.RequestGermination(0, stack))
	require.NoError(t,
		l.RequestGermination(1, GerminationRequest{Kind: blueprints.NewBlocks, Size: 1}))
	for _, to := range []Stage{Training, Grafting} {
		require.NoError(t, l.Transition(0, to))
	}
	require.NoError(t, l.Transition(1, Training))
	require.ErrorIs(t, l.Transition(1, Grafting), ErrTransition)
	for _, to := range []Stage{Stabilization, Evaluating} {
		require.NoError(t, l.Transition(0, to))
	}
	require.ErrorIs(t, l.Transition(0, FineTuning), ErrGate)
	score := SeedMetrics{Seed: 0, TrainingError: 0, Performance: -2, Without: -2.1,
		Compared: true, Stability: 1}
	_, err := l.StepEpoch(Metrics{Loss: 2, Share: 0.5, Seeds: []SeedMetrics{score}})
	require.NoError(t, err)
	require.NoError(t, l.Transition(0, FineTuning))
	_, err = l.StepEpoch(Metrics{Loss: 1.9, Share: 0.6, Seeds: []SeedMetrics{score}})
	require.NoError(t, err)
	require.NoError(t, l.Transition(0, Fossilized))
	require.NoError(t, l.Transition(1, Grafting))

	r := l.Report()
	require.Equal(t, 4, r.Seeds[0].Size)
	require.Equal(t, []Point{{1, 0.5, 2}, {2, 0.6, 1.9}}, r.Curve)
	data, err := l.MarshalBinary()
	require.NoError(t, err)
	again := depthLattice(t, 2)
	require.NoError(t, again.UnmarshalBinary(data))
	require.Equal(t, r.Curve, again.Report().Curve)
	require.Equal(t, r.Seeds[0], again.Report().Seeds[0])
	chunks, err := NewLattice(2, 2)
	require.NoError(t, err)
	require.ErrorIs(t, chunks.UnmarshalBinary(data), ErrShape)
	require.ErrorIs(t, chunks.RequestGermination(0, stack), ErrArgument)
}

// TestCurveStaysSmall wants a curve to keep the whole run in bounded memory.
func TestCurveStaysSmall(t *testing.T) {
	var curve []Point
	for epoch := 1; epoch <= 10*maxPoints; epoch++ {
		curve = addPoint(curve, Point{epoch, 0, 1})
		require.NoError(t, checkCurve(curve, uint32(epoch)))
	}
	require.GreaterOrEqual(t, len(curve), maxPoints/2)
	require.Equal(t, 10*maxPoints, curve[len(curve)-1].Epoch)
	for _, bad := range [][]Point{{{0, 0, 1}}, {{2, 0, 1}, {2, 0, 1}}, {{1, 2, 1}}, {{99, 0, 1}}} {
		require.Error(t, checkCurve(bad, 10))
	}
}
