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
func TestBatchAttention(t *testing.T) { testSpans(t, 70, false) }

// TestPagedAttention is the same test with few pages, which sequences share.
func TestPagedAttention(t *testing.T) { testSpans(t, 200, true) }

func testSpans(t *testing.T, tokens int, paged bool) {
	const heads, kvHeads, dim, rows = 4, 2, 6, 40
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
			pages, err := NewPages(14)
			require.NoError(t, err)
			var texts []*text
			for range 4 {
				q, k, v := normal(heads*dim), normal(kvHeads*dim), normal(kvHeads*dim)
				want, _ := whole(t, q, k, v, c)
				sequence := &Sequence{}
				if paged {
					sequence = pages.NewSequence()
				}
				texts = append(texts, &text{sequence, q, k, v, want, 0, 0, 0})
			}

			g := gorgonia.NewGraph()
			input := func(name string, columns int) *gorgonia.Node {
				return gorgonia.NewTensor(g, tensor.Float64, 2, gorgonia.WithShape(rows, columns),
					gorgonia.WithName(name))
			}
			q, k, v := input("q", heads*dim), input("k", kvHeads*dim), input("v", kvHeads*dim)
			var spans Spans
			table := gorgonia.NewTensor(g, tensor.Int, 2, gorgonia.WithShape(rows, 1+pagesFor(tokens)),
				gorgonia.WithName("table"))
			y, err := BatchAttention(q, k, v, &spans, 0, c)
			if paged {
				y, err = PagedAttention(q, k, v, table, pages, 0, c)
			}
			require.NoError(t, err)
			machine := gorgonia.NewTapeMachine(g)
			defer machine.Close()

			for range 60 {
				// Change one sequence: forget its last tokens, or replace it by another one's prefix.
				x, of := texts[r.IntN(len(texts))], texts[r.IntN(len(texts))]
				switch n := r.IntN(of.tokens + 1); r.IntN(4) {
				case 0:
					n = max(n, sharedTokens(x.sequence))
					x.tokens = min(n, x.tokens)
					x.sequence.Truncate(x.tokens)
				case 1:
					prefix := of.sequence.Prefix(n)
					x.sequence.Release()
					*x = text{prefix, of.q, of.k, of.v, of.want, prefix.Len(), 0, 0}
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
					if paged && x.sequence.Reserve(x.tokens+n) != nil {
						require.Less(t, pages.Free(), 1+n/PageTokens+1)
						continue
					}
					x.start, x.end = x.tokens, x.tokens+n
					all, in, left = append(all, Span{x.sequence, x.start, n}), append(in, x), left-n
				}

				require.NoError(t, spans.Set(all...))
				numbers := make([]int, table.Shape().TotalSize())
				if paged {
					numbers, err = spans.PageTable(rows, table.Shape()[1])
					require.NoError(t, err)
				}
				require.NoError(t, gorgonia.Let(table, tensor.New(tensor.WithShape(table.Shape()...),
					tensor.WithBacking(numbers))))
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

			for _, x := range texts {
				x.sequence.Release()
			}
			require.Equal(t, pages.Count(), pages.Free())
			require.NoError(t, pages.Close())
		})
	}
}

// sharedTokens returns the number of tokens of a sequence in pages that another sequence contains.
func sharedTokens(s *Sequence) (tokens int) {
	for i, page := range s.pages {
		if s.pool.uses[page] > 1 {
			tokens = (i + 1) * PageTokens
		}
	}
	return tokens
}

// TestPagesRefuse checks what pages and their attention reject.
func TestPagesRefuse(t *testing.T) {
	_, err := NewPages(0)
	require.ErrorContains(t, err, "0 pages")
	pages, err := NewPages(3)
	require.NoError(t, err)
	a, b := pages.NewSequence(), pages.NewSequence()
	require.NoError(t, a.Reserve(PageTokens+1))
	require.ErrorIs(t, b.Reserve(PageTokens+1), ErrNoPages)
	require.Equal(t, 1, pages.Free())

	var spans Spans
	require.NoError(t, spans.Set(Span{a, 0, PageTokens + 1}))
	_, err = spans.PageTable(PageTokens, 3)
	require.ErrorContains(t, err, "more rows than the graph")
	_, err = spans.PageTable(PageTokens+1, 2)
	require.ErrorContains(t, err, "do not fit in 2 pages and 2 columns")
	_, err = spans.PageTable(PageTokens+1, 3)
	require.NoError(t, err)
	spans.Finish()
	c := a.Prefix(PageTokens + 1)
	require.Equal(t, PageTokens, c.Len())
	require.NoError(t, spans.Set(Span{a, PageTokens - 1, 1}))
	_, err = spans.PageTable(1, 3)
	require.ErrorContains(t, err, "overwrite a shared page")
	a.Release()
	require.Equal(t, 2, pages.Free())
	c.Release()
	require.Equal(t, 3, pages.Free())

	g := gorgonia.NewGraph()
	x := gorgonia.NewTensor(g, tensor.Float32, 2, gorgonia.WithShape(2, 4))
	table := gorgonia.NewTensor(g, tensor.Int, 2, gorgonia.WithShape(2, 2))
	_, err = PagedAttention(x, x, x, table, nil, 0, Config{Heads: 1, KVHeads: 1, HeadDim: 4, Capacity: 3})
	require.ErrorContains(t, err, "the pages are nil")
	_, err = PagedAttention(x, x, x, table, pages, 0, Config{Heads: 1, KVHeads: 1, HeadDim: 4, Capacity: 65})
	require.ErrorContains(t, err, "want an int of shape [2, 1 + pages of 65 tokens]")
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
