package op_test

import (
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/op"
)

// TestDocumentsAlone wants documents in one sequence to have the outputs and gradients that each has alone, although RoPE
// counts their positions from the first of them.
func TestDocumentsAlone(t *testing.T) {
	r := random(t)
	lengths := []int{1 + r.IntN(90), 1 + r.IntN(5), 64, 1 + r.IntN(130), 1}
	const heads, kvHeads, headDim = 4, 2, 6
	rows := 0
	for _, n := range lengths {
		rows += n
	}
	q, k, v := normal(r, rows*heads*headDim), normal(r, rows*kvHeads*headDim), normal(r, rows*kvHeads*headDim)
	g := normal(r, rows*heads*headDim)
	// attend returns the output and the gradients of some of the rows, which make a sequence.
	attend := func(dt tensor.Dtype, from, n int, starts []int) [][]float64 {
		graph := gorgonia.NewGraph()
		leaf := func(name string, x []float64, width int) *gorgonia.Node {
			return gorgonia.NodeFromAny(graph, dense(dt, x[from*width:][:n*width], n, width), gorgonia.WithName(name))
		}
		wrt := gorgonia.Nodes{leaf("q", q, heads*headDim), leaf("k", k, kvHeads*headDim), leaf("v", v, kvHeads*headDim)}
		turned := func(x *gorgonia.Node, heads int) *gorgonia.Node {
			return must(t)(op.RoPE(x, op.RoPEConfig{Seq: n, Heads: heads, HeadDim: headDim, Base: 100}))
		}
		c := op.AttentionConfig{Seq: n, Heads: heads, KVHeads: kvHeads, HeadDim: headDim, Causal: true}
		in := gorgonia.Nodes{turned(wrt[0], heads), turned(wrt[1], kvHeads), wrt[2]}
		var y *gorgonia.Node
		if starts == nil {
			y = must(t)(op.Attention(in[0], in[1], in[2], c))
		} else {
			y = must(t)(op.DocumentAttention(in[0], in[1], in[2], gorgonia.NodeFromAny(graph, ints(starts), gorgonia.WithName("starts")), c))
		}
		cost := must(t)(gorgonia.Sum(must(t)(gorgonia.HadamardProd(y, leaf("g", g, heads*headDim)))))
		grads, err := gorgonia.Grad(cost, wrt...)
		if err != nil {
			t.Fatal(err)
		}
		values := make([]gorgonia.Value, 4)
		for i, n := range append(gorgonia.Nodes{y}, grads...) {
			gorgonia.Read(n, &values[i])
		}
		run(t, graph)
		var out [][]float64
		for _, v := range values {
			out = append(out, floats(t, v))
		}
		return out
	}
	var starts []int
	for _, n := range lengths {
		start := len(starts)
		for range n {
			starts = append(starts, start)
		}
	}
	for dt, tolerance := range map[tensor.Dtype]float64{tensor.Float64: 1e-12, tensor.Float32: 2e-5} {
		together := attend(dt, 0, rows, starts)
		at := 0
		for _, n := range lengths {
			for i, want := range attend(dt, at, n, nil) {
				name := []string{"y", "dq", "dk", "dv"}[i]
				width := len(together[i]) / rows
				got := together[i][at*width:][:n*width]
				if n == 1 && (i == 1 || i == 2) { // what one key alone makes of a softmax is no gradient: rounding is left
					continue
				}
				if d := distance(got, want); !(d <= tolerance) {
					t.Errorf("%v: %s of the document of %d tokens at %d differs by %.3g, want at most %g", dt, name, n, at, d, tolerance)
				}
			}
			at += n
		}
	}
}
