package kvcache

import (
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/attention"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// A Sequence holds the keys and values of a text's tokens for all attention layers of a model. The
// zero value is a text without tokens. Only one graph at a time may compute rows of a sequence.
type Sequence struct {
	layers []any // a *cache[float32] or *cache[float64] for each layer
	tokens int
	pool   *Pages // holds the keys and values instead of the layers; may be nil
	pages  []int  // indices of its pages in the pool
}

// Len returns the number of tokens with cached keys and values.
func (s *Sequence) Len() int { return s.tokens }

// Truncate forgets all tokens but the first n.
func (s *Sequence) Truncate(n int) { s.tokens = min(s.tokens, n) }

// Prefix returns a sequence with the first n tokens of s. The two share memory, and each may grow
// independently of the other. A sequence of a [Pages] can only share whole pages, so that its prefix may be
// shorter.
func (s *Sequence) Prefix(n int) *Sequence {
	if s.pool != nil {
		return s.sharedPages(n)
	}

	p := &Sequence{tokens: min(n, s.tokens), layers: make([]any, len(s.layers))}
	for i, held := range s.layers {
		switch c := held.(type) {
		case *cache[float32]:
			p.layers[i] = c.prefix(p.tokens)
		case *cache[float64]:
			p.layers[i] = c.prefix(p.tokens)
		}
	}
	return p
}

// A cache holds the rotated keys and the values of a sequence for one layer. Rows after the sequence's
// tokens are undefined.
type cache[T cpu.Float] struct {
	keys, values []T // [positions, KVHeads·HeadDim]
	width        int
	shared       int // the rows at the start that are shared with another sequence
}

// prefix returns a cache with the first rows of c, which both then share.
func (c *cache[T]) prefix(rows int) *cache[T] {
	c.shared = max(c.shared, rows)
	n := min(rows*c.width, len(c.keys))
	return &cache[T]{c.keys[:n:n], c.values[:n:n], c.width, rows}
}

// reserve makes room for the given number of rows. Afterwards, no row from the given one on is
// shared.
func (c *cache[T]) reserve(from, rows, most int) {
	if len(c.keys) >= rows*c.width && from >= c.shared {
		return
	}

	keep := min(len(c.keys), from*c.width)
	room := Room(rows, most) * c.width
	c.keys = append(make([]T, 0, room), c.keys[:keep]...)[:room]
	c.values = append(make([]T, 0, room), c.values[:keep]...)[:room]
	c.shared = 0
}

// cacheOf returns a sequence's cache for a layer.
func cacheOf[T cpu.Float](s *Sequence, layer, width int) *cache[T] {
	for len(s.layers) <= layer {
		s.layers = append(s.layers, nil)
	}
	c, ok := s.layers[layer].(*cache[T])
	if !ok {
		c = &cache[T]{width: width}
		s.layers[layer] = c
	}
	return c
}

// A Span is a run of consecutive tokens of a sequence, one per row of a batch. The first is at
// position Start, which is at most the number of tokens in the sequence.
type Span struct {
	Sequence    *Sequence
	Start, Rows int
}

// Spans assigns the rows of a graph to tokens of sequences. All attention ops of a graph share one Spans,
// which [Spans.Set] changes before each run. Rows after the last span belong to no sequence, and their
// attention is zero.
type Spans struct{ all []Span }

// Set sets the spans of the next run, in row order. There may be only one span per sequence, whose
// tokens at and after the span's positions are dropped.
func (s *Spans) Set(spans ...Span) error {
	for i, a := range spans {
		switch {
		case a.Sequence == nil:
			return errors.New("kvcache: a span has no sequence")
		case a.Rows < 1 || a.Start < 0 || a.Start > a.Sequence.tokens:
			return fmt.Errorf("kvcache: a span of %d rows from position %d of a sequence with %d tokens",
				a.Rows, a.Start, a.Sequence.tokens)
		case slices.ContainsFunc(spans[:i], func(b Span) bool { return b.Sequence == a.Sequence }):
			return errors.New("kvcache: a sequence has two spans")
		}
	}
	for _, a := range spans {
		a.Sequence.Truncate(a.Start)
	}
	s.all = slices.Clone(spans)
	return nil
}

// Finish adds the spans' tokens to their sequences. It must be called after each successful run.
func (s *Spans) Finish() {
	for _, a := range s.all {
		a.Sequence.tokens = a.Start + a.Rows
	}
}

// Positions returns the position of each of the given number of rows; it is 0 after the last span.
func (s *Spans) Positions(rows int) []int {
	all := make([]int, 0, rows)
	for _, a := range s.all {
		for i := range a.Rows {
			all = append(all, a.Start+i)
		}
	}
	return append(all, make([]int, rows-len(all))...)
}

// BatchAttentionOp is the op that [BatchAttention] applies. It runs on CPUs only.
type BatchAttentionOp struct {
	opbase.Base
	Config Config // with defaults filled in

	layer int
	spans *Spans
	query opbase.Aux // the rotated queries
}

// BatchAttention computes the attention of each row's token to itself and to earlier tokens of its
// sequence, and caches its key and value, as [Attention] does for a single token. The spans assign
// the rows to sequences and positions. Layer is the index of the attention layer in the model.
//
// q and y are [rows, Heads·HeadDim], and k and v are [rows, KVHeads·HeadDim]. All are float32 or all are
// float64. The op has no gradient.
func BatchAttention(q, k, v *gorgonia.Node, spans *Spans, layer int, c Config) (*gorgonia.Node, error) {
	in, rows := gorgonia.Nodes{q, k, v}, 0
	if q != nil && q.Dims() == 2 {
		rows = q.Shape()[0]
	}

	c = c.complete()
	err := c.check(rows, in)
	switch {
	case err == nil && spans == nil:
		err = errors.New("the spans are nil")
	case err == nil && layer < 0:
		err = fmt.Errorf("the layer is %d", layer)
	}
	if err != nil {
		return nil, fmt.Errorf("kvcache.BatchAttention: %w", err)
	}

	o := &BatchAttentionOp{Config: c, layer: layer, spans: spans}
	opbase.Init(&o.Base, o, "BatchAttention", fmt.Sprintf("%+v %p", c, o), in, q.Dtype(), q.Shape(),
		attendBatch[float32], attendBatch[float64])
	return gorgonia.ApplyOp(o, in...)
}

// DiffWRT reports that the op is not differentiable.
func (o *BatchAttentionOp) DiffWRT(inputs int) []bool { return make([]bool, max(inputs, 0)) }

// SymDiff returns an error, because the op has no gradient.
func (o *BatchAttentionOp) SymDiff(gorgonia.Nodes, *gorgonia.Node, *gorgonia.Node) (gorgonia.Nodes,
	error) {
	return nil, errors.New("kvcache.BatchAttention has no gradient: train with op.Attention")
}

func attendBatch[T cpu.Float](o *BatchAttentionOp, y []T, in opbase.Args) error {
	q, k, v := opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), opbase.Slice[T](in, 2)
	c := o.Config
	qd, kd := c.Heads*c.HeadDim, c.KVHeads*c.HeadDim
	clear(y)

	row := 0
	for _, s := range o.spans.all {
		end := s.Start + s.Rows
		switch {
		case end > c.Capacity:
			return fmt.Errorf("position is %d, want 0 to %d", end-1, c.Capacity-1)
		case (row+s.Rows)*qd > len(q):
			return fmt.Errorf("the spans have more rows than the graph, %d", len(q)/qd)
		}

		held := cacheOf[T](s.Sequence, o.layer, kd)
		held.reserve(s.Start, end, c.Capacity)
		keys, values := held.keys[s.Start*kd:end*kd], held.values[s.Start*kd:end*kd]
		copy(values, v[row*kd:][:s.Rows*kd])
		queries := q[row*qd:][:s.Rows*qd]
		if c.RoPE == nil {
			copy(keys, k[row*kd:])
		} else {
			turned := opbase.AuxSlice[T](&o.query, len(q))[:len(queries)]
			turn(c, turned, queries, keys, k[row*kd:][:s.Rows*kd], s.Start, s.Rows)
			queries = turned
		}

		attention.At(y[row*qd:][:s.Rows*qd], queries, held.keys, held.values, s.Start, s.Rows, c.shape())
		row += s.Rows
	}

	return nil
}

// turn rotates the rows of q and k. Position is the position of the first row.
func turn[T cpu.Float](c Config, turnedQ, q, turnedK, k []T, position, rows int) {
	wideCos, wideSin := c.RoPE.Angles(position, rows)
	cos, sin := make([]T, len(wideCos)), make([]T, len(wideSin))
	for i := range cos {
		cos[i], sin[i] = T(wideCos[i]), T(wideSin[i])
	}
	layer.RoPE(turnedQ, q, cos, sin, rows, c.Heads, c.HeadDim, false)
	layer.RoPE(turnedK, k, cos, sin, rows, c.KVHeads, c.HeadDim, false)
}
