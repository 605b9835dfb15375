package control_test

import (
	"encoding/json"
	"math"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// grownAt returns the share of the budget at which a run of 200 epochs with the given loss starts
// to grow, or 1 if it never does.
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

// TestDepthWaitsForTheCost checks that a model grows later if a step then costs more, within the
// bounds of Begin and End, and that Flat overrides the cost.
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

// byCurve returns a controller that decides by the curve alone, for a model with the given cost of
// a step after growth.
func byCurve(cost float64) *control.Depth {
	d := control.NewDepth(blueprints.Stack, 2)
	d.Begin = 0
	d.Costs(func(blueprints.Kind, int) float64 { return cost })
	return d
}

// TestDepthByCurve checks that a model grows after the same number of tokens for any budget if its
// loss falls fast up to a knee and slowly afterwards. If the knee comes too late to grow, or never,
// the model must not grow.
func TestDepthByCurve(t *testing.T) {
	const knee = 10.0 // million tokens
	falls := func(fast, slow float64) func(tokens float64) float64 {
		return func(tokens float64) float64 {
			return 9 - fast*math.Log(min(tokens, knee)) - slow*math.Log(max(tokens, knee)/knee)
		}
	}
	grownAfter := func(budget float64, loss func(tokens float64) float64) float64 {
		d := byCurve(3)
		require.NoError(t, d.Check())
		return budget * grownAt(d, func(share float64) float64 { return loss(share * budget) })
	}
	for _, budget := range []float64{40, 80, 160} {
		// The trend covers the last third of the curve, so it is flat throughout from 1.5 times the
		// knee on, and must then stay flat until 1.5 times that.
		at := grownAfter(budget, falls(1, 0.1))
		require.Greater(t, at, 1.5*knee, "budget %v", budget)
		require.Less(t, at, 1.5*1.5*knee+0.02*budget, "budget %v", budget)
	}

	require.Equal(t, 20.0, grownAfter(20, falls(1, 0.1)), "the knee is too late")
	require.Equal(t, 80.0, grownAfter(80, falls(1, 0.5)), "a slope of half is steep when a step costs 3 times")

	// A flat stretch that ends before the delay is over is not a knee.
	lull := func(tokens float64) float64 {
		return 9 - math.Log(min(tokens, knee)) - math.Log(max(tokens, 1.3*knee)/(1.3*knee))
	}
	require.Equal(t, 80.0, grownAfter(80, lull))
}

// TestDepthByRecordedCurves replays training curves from docs/lab/growth.md. The budget counts the
// tokens that a run would see at its initial depth. The shares of the growths must lie in the
// ranges found good there, and decrease with a larger budget.
func TestDepthByRecordedCurves(t *testing.T) {
	var recorded []struct {
		Run   string
		Cost  float64
		Curve [][2]float64
	}
	text, err := os.ReadFile("testdata/curves.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &recorded))
	shares := map[string]float64{}
	for _, run := range recorded {
		d := byCurve(run.Cost)
		r := state.Report{Site: blueprints.Depth, Seeds: make([]state.SeedReport, 1)}
		for i, p := range run.Curve {
			r.Epoch = i + 1
			r.Curve = append(r.Curve, state.Point{Epoch: i + 1, Share: p[0], Loss: p[1]})
			if len(d.Decide([]state.Report{r})) > 0 {
				shares[run.Run] = p[0]
				break
			}
		}
	}

	for run, want := range map[string][2]float64{
		"flops-5-seed1-blocks=3,lr=0.002":                                        {0.2, 0.3},
		"flops-10-seed1-blocks=3-12,share=0.4,lr=0.002":                          {0.1, 0.2},
		"flops-5-seed1-blocks=6,lr=0.002":                                        {0.2, 0.4},
		"flops-10-seed1-blocks=6,lr=0.002":                                       {0.1, 0.25},
		"flops-20-seed1-blocks=6,lr=0.002":                                       {0.1, 0.2},
		"flops-5-seed1-blocks=6,lr=0.02,optimizer=muon,decay=late,outputs=zero":  {0.2, 0.4},
		"flops-10-seed1-blocks=6,lr=0.02,optimizer=muon,decay=late,outputs=zero": {0.1, 0.2},
	} {
		require.Contains(t, shares, run)
		require.GreaterOrEqual(t, shares[run], want[0], run)
		require.LessOrEqual(t, shares[run], want[1], run)
	}

	require.Less(t, 2*shares["flops-20-seed1-blocks=6,lr=0.002"], shares["flops-5-seed1-blocks=6,lr=0.002"])
}

func TestDepthDelay(t *testing.T) {
	for _, delay := range []float64{0.5, -1, math.NaN(), math.Inf(1)} {
		d := byCurve(2)
		d.Delay = delay
		require.ErrorContains(t, d.Check(), "Delay is")
	}
}
