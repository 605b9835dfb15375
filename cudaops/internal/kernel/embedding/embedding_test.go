package embedding

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
)

// TestEmbedding compares lookups and gradients with those of the CPU, and checks that gradients are deterministic.
func TestEmbedding(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, c := range []struct{ rows, vocab, d int }{{1, 1, 1}, {7, 5, 3}, {100, 50, 64},
		{513, 1000, 768}, {2000, 37, 260}, {64, 9, 2048},
		{700, 4099, 4}, {900, 50257, 12}, {40, 200003, 3}} {
		for _, types := range [][2]gpu.DType{{kerneltest.F32, kerneltest.F32},
			{kerneltest.Bf16, kerneltest.Bf16}, {kerneltest.Bf16, kerneltest.F32},
			{kerneltest.F16, kerneltest.F16}, {kerneltest.F16, kerneltest.F32}} {
			yt, tt := types[0], types[1]
			g.Scope(fmt.Sprintf("%+v/%v/%v", c, yt, tt), func(g *kerneltest.Rig) {
				ids := make([]int, c.rows)
				for i := range ids {
					// favor some IDs
					ids[i] = min(g.Rand.IntN(c.vocab), g.Rand.IntN(c.vocab))
				}
				dids := g.UploadInts(ids)
				table, tr := g.Normal(c.vocab*c.d, tt, i%2)
				y := g.Alloc(c.rows*c.d, yt, i%2)
				g.Must(g.Launch(g.Stream, Forward{Y: y.Ptr, IDs: dids, Table: table.Ptr,
					Rows: c.rows, Vocab: c.vocab, D: c.d,
					Type: yt, TableType: tt}))
				want := make([]float64, c.rows*c.d)
				layer.Embedding(want, ids, tr, c.d)
				g.Near("y", y, kerneltest.Decode(kerneltest.Encode(want, yt), yt), 0)

				dy, gr := g.Normal(c.rows*c.d, yt, i%2)
				grad := make([]float64, c.vocab*c.d)
				layer.EmbeddingBackward(grad, ids, gr, c.d)
				dt := g.Alloc(c.vocab*c.d, kerneltest.F32, i%2)
				work := g.Alloc(Backward{Rows: c.rows, Vocab: c.vocab,
					D: c.d}.WorkspaceBytes(g.Info)/4, kerneltest.F32, 0)
				a := Backward{DT: dt.Ptr, IDs: dids, G: dy.Ptr, Rows: c.rows, Vocab: c.vocab,
					D: c.d, Type: yt,
					Workspace: work.Ptr}
				g.Must(g.Launch(g.Stream, a))
				g.Near("gradient", dt, grad, kerneltest.Backward(kerneltest.F32))
				first := g.Read(dt)
				a.Accumulate = true
				g.Must(g.Launch(g.Stream, a))
				for i := range grad {
					grad[i] *= 2
				}
				g.Near("added gradient", dt, grad, kerneltest.Backward(kerneltest.F32))
				a.Accumulate = false
				g.Must(g.Launch(g.Stream, a))
				require.Zero(t, kerneltest.Distance(g.Read(dt), first))
			})
		}
	}
}

// TestEmbeddingUnknownIDs checks that IDs outside the table produce NaN and no gradients.
func TestEmbeddingUnknownIDs(t *testing.T) {
	g := kerneltest.NewRig(t)
	ids := g.UploadInts([]int{0, -1, 2, 1, 1 << 40})
	table, tr := g.Normal(2*3, kerneltest.F32, 0)
	y, dt, work := g.Alloc(5*3, kerneltest.F32, 0), g.Alloc(2*3, kerneltest.F32, 0),
		g.Alloc(Backward{Rows: 5, Vocab: 2, D: 3}.WorkspaceBytes(g.Info)/4, kerneltest.F32, 0)
	g.Must(g.Launch(g.Stream, Forward{Y: y.Ptr, IDs: ids, Table: table.Ptr, Rows: 5, Vocab: 2,
		D: 3}))
	nan := math.NaN()
	want := []float64{tr[0], tr[1], tr[2], nan, nan, nan, nan, nan, nan, tr[3],
		tr[4], tr[5], nan, nan, nan}
	g.Near("y", y, want, 0)
	dy, gr := g.Normal(5*3, kerneltest.F32, 0)
	g.Must(g.Launch(g.Stream, Backward{DT: dt.Ptr, IDs: ids, G: dy.Ptr, Rows: 5, Vocab: 2, D: 3,
		Workspace: work.Ptr}))
	g.Near("gradient", dt, []float64{gr[0], gr[1], gr[2], gr[9], gr[10], gr[11]}, 0)
}
