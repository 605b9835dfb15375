package chunks

import (
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/op/lowrank"
)

const rows, features, count = 9, 12, 3

// layersOf returns a layer with a seed of each kind of chunks, a layer without weights for some chunks, and nil.
func layersOf(t *testing.T) []*Layer {
	r := randtest.New(t)
	numbers := func(n int) []float64 {
		x := make([]float64, n)
		for i := range x {
			x[i] = r.NormFloat64()
		}
		return x
	}
	return []*Layer{
		{Chunks: count, Seeds: []Seed{{0, blueprints.LowRank, 1, 0.7, numbers(16)}, {1, blueprints.ChunkMLP, 0.3, 2, numbers(16)},
			{2, blueprints.Residual, 0.5, 1.5, numbers(4)}}},
		nil,
		{Chunks: count, Seeds: []Seed{{1, blueprints.ConvFilter, 1, 1, numbers(4)}}},
		{Chunks: 1, Seeds: []Seed{{0, blueprints.LowRank, 0.25, 1, numbers(2 * features)}}},
	}
}

// TestApply compares rows with different layers with the transforms that package blueprints applies to their chunks.
func TestApply(t *testing.T) {
	all := layersOf(t)
	r := randtest.New(t)
	x := make([]float64, rows*features)
	for i := range x {
		x[i] = r.NormFloat64()
	}
	s := &lowrank.Selection{}
	g := gorgonia.NewGraph()
	y, err := Apply(gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(rows, features), tensor.WithBacking(x)),
		gorgonia.WithName("x")), all, s)
	require.NoError(t, err)
	m := gorgonia.NewTapeMachine(g)
	defer m.Close()

	for _, selected := range [][]int{{}, {0, 0, 2, 2, 3, -1, 1, 0, 2}, {3, 3, 3, 3, 3, 3, 3, 3, 3}, {-1, 0}} {
		s.Set(selected)
		m.Reset()
		require.NoError(t, m.RunAll())
		have := y.Value().Data().([]float64)
		for row := range rows {
			want := append([]float64(nil), x[row*features:][:features]...)
			if row < len(selected) && selected[row] >= 0 && all[selected[row]] != nil {
				l := all[selected[row]]
				c := features / l.Chunks
				for _, seed := range l.Seeds {
					in, out := x[row*features+seed.Chunk*c:][:c], make([]float64, c)
					require.NoError(t, blueprints.Apply(seed.Kind, out, in, seed.Weights.([]float64), seed.Scale))
					for i := range out {
						want[seed.Chunk*c+i] = in[i] + float64(float32(seed.Alpha))*(out[i]-in[i])
					}
				}
			}
			require.InDeltaSlice(t, want, have[row*features:][:features], 1e-12, "row %d of %v", row, selected)
		}
	}

	s.Set([]int{4})
	m.Reset()
	require.ErrorContains(t, m.RunAll(), "row 0 has layer 4 of 4")
	_, err = y.Op().(*ApplyOp).SymDiff(nil, nil, nil)
	require.ErrorContains(t, err, "has no gradient")
}

// TestApplyRefused checks the errors for layers that do not fit.
func TestApplyRefused(t *testing.T) {
	x := gorgonia.NewMatrix(gorgonia.NewGraph(), tensor.Float32, gorgonia.WithShape(2, features), gorgonia.WithName("x"))
	for want, l := range map[string]*Layer{
		"5 chunks of 12 features": {Chunks: 5},
		"has 3 weights":           {Chunks: 3, Seeds: []Seed{{0, blueprints.Residual, 1, 1, make([]float32, 3)}}},
		"has -1 weights":          {Chunks: 3, Seeds: []Seed{{0, blueprints.Residual, 1, 1, make([]float64, 4)}}},
		"changes chunks":          {Chunks: 3, Seeds: []Seed{{0, blueprints.LoRA, 1, 1, make([]float32, 4)}}},
		"after one at 1":          {Chunks: 3, Seeds: []Seed{{1, blueprints.Residual, 1, 1, make([]float32, 4)}, {1, blueprints.Residual, 1, 1, make([]float32, 4)}}},
		"has α 2":                 {Chunks: 3, Seeds: []Seed{{1, blueprints.Residual, 2, 1, make([]float32, 4)}}},
	} {
		_, err := Apply(x, []*Layer{nil, l}, &lowrank.Selection{})
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "layer 1")
	}
	_, err := Apply(x, nil, nil)
	require.ErrorContains(t, err, "is nil")
}
