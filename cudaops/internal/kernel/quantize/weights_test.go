package quantize_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
)

// TestQuantizeWeights checks that rounding several matrices in one launch gives the same rows and
// columns as rounding each separately, on repeated runs.
func TestQuantizeWeights(t *testing.T) {
	g := kerneltest.NewRig(t)
	var weights []quantize.Weight
	var checks []func()
	for i, shape := range [][2]int{{16, 16}, {144, 80}, {128, 64}, {272, 336}, {48, 784},
		{784, 48}, {2064, 1040}} {
		rows, d := shape[0], shape[1]
		x, xr := uploadRows(g, oddRows(g, rows, d, kerneltest.Bf16), d, kerneltest.Bf16, 0)
		y, scale := rows8Alloc(g, rows, d, 0)
		w := quantize.Weight{X: x.Ptr, Y: y.Ptr, Scale: scale.Ptr, Rows: int32(rows),
			D: int32(d)}
		name := fmt.Sprintf("%dx%d", rows, d)
		checks = append(checks, func() { rows8(g, name, y, scale, xr) })
		if i != 2 {
			turned, turnedScale := rows8Alloc(g, d, rows, 0)
			w.Turned, w.TurnedScale = turned.Ptr, turnedScale.Ptr
			columns := make([][]float64, d)
			for _, row := range xr {
				for c, v := range row {
					columns[c] = append(columns[c], v)
				}
			}
			checks = append(checks, func() {
				rows8(g, name+" turned", turned, turnedScale, columns)
			})
		}
		weights = append(weights, w)
	}

	table, err := quantize.NewTable(g.Ctx, func(bytes int) (gpu.Ptr, error) {
		return g.Alloc(bytes/4, kerneltest.F32, 0).Ptr, g.Ctx.SyncStream(g.Stream)
	}, weights)
	g.Must(err)
	for range 2 {
		g.Must(g.Launch(g.Stream, quantize.Weights{Table: table}))
		for _, check := range checks {
			check()
		}
	}
}

// TestWeightStrips checks that every strip is listed twice, once to search it for its largest elements and once to
// round it, and that a weight is rounded only after all of its strips have been searched.
func TestWeightStrips(t *testing.T) {
	weights := []quantize.Weight{{Rows: 16, D: 16}, {Rows: 5120, D: 3072}, {Rows: 144, D: 80},
		{Rows: 128, D: 64}, {Rows: 11264, D: 2048}}
	looked := map[quantize.WeightStrip]bool{}
	rounded := map[quantize.WeightStrip]bool{}
	strips := func(w quantize.Weight) int {
		return kernel.CeilDiv(int(w.Rows), quantize.WeightRows) *
			kernel.CeilDiv(int(w.D), quantize.WeightColumns)
	}
	left := make([]int, len(weights))
	for i, w := range weights {
		left[i] = strips(w)
	}

	for at, strip := range quantize.WeightStrips(weights) {
		of, seen := strip, looked
		if of.Weight &^= quantize.WeightRounds; of != strip {
			seen = rounded
			require.Zero(t, left[of.Weight], at)
		} else {
			left[of.Weight]--
		}
		if w := weights[of.Weight]; seen[of] || int(of.Row)*quantize.WeightRows >= int(w.Rows) ||
			int(of.Column)*quantize.WeightColumns >= int(w.D) {
			t.Fatalf("strip %d, %+v, is repeated or outside of %dx%d", at, strip, w.Rows, w.D)
		}
		seen[of] = true
	}

	want := 0
	for _, w := range weights {
		want += strips(w)
	}

	require.Len(t, looked, want)
	require.Len(t, rounded, want)
}
