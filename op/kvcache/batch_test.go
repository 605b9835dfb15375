package kvcache

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/op"
)

// A text is a sequence under test with the inputs of all its tokens and the outputs that they must have.
type text struct {
	sequence   *Sequence
	q, k, v    *tensor.Dense
	want       []float64
	tokens     int
	start, end int // of its span
}

// TestBatchAttention feeds random spans of several sequences, cuts sequences off and splits them, and
// compares all rows with op.Attention over whole sequences.
func TestBatchAttention(t *testing.T) {
	const tokens, heads, kvHeads, dim, rows = 70, 4, 2, 6, 40
	rope := op.RoPEConfig{Seq: tokens, HeadDim: dim, Base: 100}
	for name, c := range map[string]Config{
		"plain": {}, "turned": {RoPE: &rope}, "window": {RoPE: &rope, Window: 5, Scale: 0.7},
	} {
		t.Run(name, func(t *testing.T) {
			r := randtest.New(t)
			c.Heads, c.KVHeads, c.HeadDim, c.Capacity = heads, kvHeads, dim, tokens
			normal := func(columns int) *tensor.Dense {
				x := make([]float64, tokens*columns)
				for i := range x {
					x[i] = r.NormFloat64()
				}
				return tensor.New(tensor.WithShape(tokens, columns), tensor.WithBacking(x))
			}
			var texts []*text
			for range 4 {
				q, k, v := normal(heads*dim), normal(kvHeads*dim), normal(kvHeads*dim)
				want, _ := whole(t, q, k, v, c)
				texts = append(texts, &text{&Sequence{}, q, k, v, want, 0, 0, 0})
			}

			g := gorgonia.NewGraph()
			input := func(name string, columns int) *gorgonia.Node {
				return gorgonia.NewTensor(g, tensor.Float64, 2, gorgonia.WithShape(rows, columns),
					gorgonia.WithName(name))
			}
			q, k, v := input("q", heads*dim), input("k", kvHeads*dim), input("v", kvHeads*dim)
			var spans Spans
			y, err := BatchAttention(q, k, v, &spans, 0, c)
			require.NoError(t, err)
			machine := gorgonia.NewTapeMachine(g)
			defer machine.Close()

			for range 60 {
				// Change one sequence: forget its last tokens, or replace it by another one's prefix.
				x, of := texts[r.IntN(len(texts))], texts[r.IntN(len(texts))]
				switch n := r.IntN(of.tokens + 1); r.IntN(4) {
				case 0:
					x.tokens = min(n, x.tokens)
					x.sequence.Truncate(x.tokens)
				case 1:
					*x = text{of.sequence.Prefix(n), of.q, of.k, of.v, of.want, n, 0, 0}
				}

				var all []Span
				var in []*text
				left := rows
				for _, i := range r.Perm(len(texts)) {
					x := texts[i]
					n := min(left, tokens-x.tokens, 1+r.IntN(25))
					if n == 0 || r.IntN(3) == 0 {
						continue
					}
					x.start, x.end = x.tokens, x.tokens+n
					all, in, left = append(all, Span{x.sequence, x.start, n}), append(in, x), left-n
				}

				require.NoError(t, spans.Set(all...))
				let := func(node *gorgonia.Node, of func(*text) *tensor.Dense) {
					data := make([]float64, 0, rows*node.Shape()[1])
					for _, x := range in {
						n := node.Shape()[1]
						data = append(data, of(x).Float64s()[x.start*n:x.end*n]...)
					}
					for len(data) < cap(data) {
						data = append(data, math.NaN()) // rows that belong to no sequence
					}
					require.NoError(t, gorgonia.Let(node, tensor.New(tensor.WithShape(node.Shape()...),
						tensor.WithBacking(data))))
				}
				let(q, func(x *text) *tensor.Dense { return x.q })
				let(k, func(x *text) *tensor.Dense { return x.k })
				let(v, func(x *text) *tensor.Dense { return x.v })
				require.NoError(t, machine.RunAll())
				got := y.Value().Data().([]float64)
				machine.Reset()
				if r.IntN(5) == 0 {
					continue // as after a failed run: the next run replaces these tokens
				}

				spans.Finish()
				for _, x := range in {
					n := (x.end - x.start) * heads * dim
					require.InDeltaSlice(t, x.want[x.start*heads*dim:][:n], got[:n], 1e-12)
					got = got[n:]
					x.tokens = x.end
					require.Equal(t, x.tokens, x.sequence.Len())
				}
				for _, left := range got {
					require.Zero(t, left)
				}
			}
		})
	}
}

// TestSpansRefuse checks what Set and the op reject.
func TestSpansRefuse(t *testing.T) {
	var spans Spans
	a := new(Sequence)
	require.ErrorContains(t, spans.Set(Span{nil, 0, 1}), "no sequence")
	require.ErrorContains(t, spans.Set(Span{a, 1, 2}), "2 rows from position 1 of a sequence with 0")
	require.ErrorContains(t, spans.Set(Span{a, 0, 0}), "a span of 0 rows")
	require.ErrorContains(t, spans.Set(Span{a, 0, 1}, Span{a, 0, 1}), "two spans")

	g := gorgonia.NewGraph()
	zeros := func(columns int) *gorgonia.Node {
		return gorgonia.NewTensor(g, tensor.Float32, 2, gorgonia.WithShape(2, columns),
			gorgonia.WithInit(gorgonia.Zeroes()))
	}
	c := Config{Heads: 2, KVHeads: 1, HeadDim: 4, Capacity: 3}
	q, k, v := zeros(8), zeros(4), zeros(4)
	_, err := BatchAttention(q, nil, v, &spans, 0, c)
	require.ErrorContains(t, err, "an input is nil")
	_, err = BatchAttention(q, k, v, nil, 0, c)
	require.ErrorContains(t, err, "the spans are nil")
	_, err = BatchAttention(q, q, v, &spans, 0, c)
	require.ErrorContains(t, err, "input 1 is a float32 of shape (2, 8)")

	y, err := BatchAttention(q, k, v, &spans, 0, c)
	require.NoError(t, err)
	run := func(s ...Span) error {
		require.NoError(t, spans.Set(s...))
		_, err := y.Op().Do(q.Value(), k.Value(), v.Value())
		return err
	}
	require.ErrorContains(t, run(Span{a, 0, 3}), "the spans have more rows than the graph, 2")
	require.NoError(t, run(Span{a, 0, 2}))
	spans.Finish()
	require.ErrorContains(t, run(Span{a, 2, 2}), "position is 3, want 0 to 2")
	require.Equal(t, []int{2, 3, 0}, spans.Positions(3))
	_, err = y.Op().(*BatchAttentionOp).SymDiff(nil, nil, nil)
	require.ErrorContains(t, err, "no gradient")
}
