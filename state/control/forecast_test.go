package control_test

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

func TestX(t *testing.T) {
	var recorded []struct {
		Run   string
		Cost  float64
		Curve [][2]float64
	}
	text, err := os.ReadFile("testdata/curves.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &recorded))
	for _, run := range recorded {
		blocks, tokens := 6, map[byte]float64{'5': 84.5e6, '1': 169e6, '2': 338e6}[run.Run[6]]
		if run.Cost > 2 {
			blocks, tokens = 3, tokens*135.5/84.5
		}
		cost := func(b float64) float64 { return (b*1.065 + 2.1) / (float64(blocks)*1.065 + 2.1) }
		f := control.NewForecast(blueprints.Stack, 12/blocks)
		f.Costs(func(k blueprints.Kind, size int) float64 { return cost(float64(size * blocks)) })
		f.Plan(func() state.RunPlan {
			return state.RunPlan{Blocks: blocks, Parameters: float64(blocks) * 803e3, EpochTokens: tokens / float64(len(run.Curve))}
		})
		t.Log(run.Run, len(run.Curve), run.Cost, cost(12))
		r := state.Report{Site: blueprints.Depth, Seeds: make([]state.SeedReport, 1)}
		for i, p := range run.Curve {
			r.Epoch = i + 1
			r.Curve = append(r.Curve, state.Point{Epoch: i + 1, Share: p[0], Loss: p[1]})
			for _, n := range f.Notes([]state.Report{r}) {
				t.Logf("%.3f %v", p[0], n)
			}
			if c := f.Decide([]state.Report{r}); len(c) > 0 {
				t.Log(p[0], p[1], c[0].Why)
				break
			}
		}
	}
}
