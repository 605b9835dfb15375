package control_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// grownAt returns the share of its budget at which a run of 200 epochs begins to grow; 1 for never.
// Its loss falls as the given function says.
func grownAt(d *control.Depth, loss func(share float64) float64) float64 {
	r := state.Report{Site: blueprints.Depth, Seeds: make([]state.SeedReport, 1)}
	for epoch := 1; epoch <= 200; epoch++ {
		share := float64(epoch) / 200
		r.Epoch = epoch
		r.Curve = append(r.Curve, state.Point{Epoch: epoch, Share: share, Loss: loss(share)})
		if len(d.Decide([]state.Report{r})) > 0 {
			return share
		}
	}
	return 1
}

// TestDepthWaitsForTheCost wants a model to grow the later the more a step costs then, within the
// bounds, and by Flat where that is given.
func TestDepthWaitsForTheCost(t *testing.T) {
	slowing := func(share float64) float64 { return 2 + math.Pow(share, -1) }
	last := 0.0
	for _, cost := range []float64{1, 4, 8, 1000} {
		d := control.NewDepth(blueprints.Stack, 2)
		d.Begin, d.End = 0.05, 0.9
		asked := 0
		d.Costs(func(kind blueprints.Kind, size int) float64 {
			require.Equal(t, blueprints.Stack, kind)
			require.Equal(t, 2, size)
			asked++
			return cost
		})
		at := grownAt(d, slowing)
		require.Positive(t, asked)
		require.GreaterOrEqual(t, at, last, "cost %v", cost)
		require.LessOrEqual(t, at, d.End)
		if cost == 1 {
			require.InDelta(t, 0.05, at, 0.01)
		} else {
			require.Greater(t, at, last)
		}
		last = at
		d.Flat = 1
		require.InDelta(t, 0.05, grownAt(d, slowing), 0.01)
	}
	d := control.NewDepth(blueprints.Stack, 2)
	require.Equal(t, d.End, grownAt(d, func(share float64) float64 { return 9 - share }))
}
