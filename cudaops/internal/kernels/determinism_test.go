package kernels

import (
	"slices"
	"testing"
)

// TestSameBits runs what adds up many numbers several times over the same inputs.
func TestSameBits(t *testing.T) {
	g := newRig(t)
	const rows, d = 3001, 768
	n := rows * d
	x, _ := g.normal(n, bf16, 0)
	dy, _ := g.normal(n, bf16, 0)
	w, _ := g.normal(d, f32, 0)
	rstd, _ := g.normal(rows, f32, 0)
	dx, dw, work := g.alloc(n, bf16, 0), g.alloc(d, f32, 0), g.alloc(g.RMSNormWorkspace(d, bf16)/4, f32, 0)
	sum := Reduce{Op: Sum, X: x.Ptr, Outer: 1, N: n, Inner: 1, XType: bf16}
	columns := Reduce{Op: Sum, X: x.Ptr, Outer: 1, N: rows, Inner: d, XType: bf16}
	parts := g.alloc(max(g.ReduceWorkspace(sum), g.ReduceWorkspace(columns))/4, f32, 0)
	one, many := g.alloc(1, f32, 0), g.alloc(d, f32, 0)
	sum.Y, sum.Workspace, columns.Y, columns.Workspace = one.Ptr, parts.Ptr, many.Ptr, parts.Ptr
	targets := Ints{Ptr: g.uploadInts(g.classes(rows, d), 4)}
	losses, scale, mean := g.alloc(rows, f32, 0), g.alloc(1, f32, 0), g.alloc(1, f32, 0)

	norm := RMSNormBackward{DX: dx.Ptr, DW: dw.Ptr, G: dy.Ptr, X: x.Ptr, W: w.Ptr, Rstd: rstd.Ptr, Rows: rows, D: d, Type: bf16,
		Workspace: work.Ptr}
	ways, err := g.RMSNormBackwardWays(norm)
	g.must(err)

	run := func() (results [][]float64) {
		for _, norm.Way = range ways {
			g.must(g.RMSNormBackward(g.stream, norm))
			results = append(results, g.read(dx), g.read(dw))
		}
		g.must(g.Reduce(g.stream, sum))
		g.must(g.Reduce(g.stream, columns))
		g.must(g.CrossEntropyScale(g.stream, scale.Ptr, targets, rows))
		g.must(g.CrossEntropy(g.stream, CrossEntropy{Logits: x.Ptr, Losses: losses.Ptr, Targets: targets, Rows: rows, V: d, Type: bf16}))
		g.must(g.CrossEntropyMean(g.stream, mean.Ptr, losses.Ptr, scale.Ptr, rows))
		return append(results, g.read(one), g.read(many), g.read(losses), g.read(mean))
	}
	first := run()
	for range 5 {
		for i, again := range run() {
			if !slices.Equal(first[i], again) {
				t.Errorf("result %d differs from run to run", i)
			}
		}
	}
}
