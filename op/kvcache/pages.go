package kvcache

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/attention"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// PageTokens is the number of tokens in a page.
const PageTokens = 64

// Pages is a cache with a fixed size for the keys and values of many sequences. Each page stores the keys
// and values of PageTokens consecutive tokens of a sequence, for all attention layers of a model (Kwon et
// al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023).
// Sequences with a common beginning can share pages.
//
// A Pages and its sequences must not be used concurrently.
type Pages struct {
	// Memory belongs to the machine that computes the attention. Close closes it if it is an [io.Closer].
	Memory any

	free []int
	uses []int // sequences that contain each page
}

// ErrNoPages is returned by [Sequence.Reserve] if there are not enough free pages.
var ErrNoPages = errors.New("kvcache: all pages are in use")

// NewPages returns a cache with the given number of pages.
func NewPages(count int) (*Pages, error) {
	if count < 1 {
		return nil, fmt.Errorf("kvcache: %d pages, want at least 1", count)
	}
	p := &Pages{uses: make([]int, count)}
	for i := range count {
		p.free = append(p.free, count-1-i)
	}
	return p, nil
}

// Count returns the number of pages, and Free the number of pages that are not in use.
func (p *Pages) Count() int { return len(p.uses) }
func (p *Pages) Free() int  { return len(p.free) }

// Close frees the memory. No machine may use it afterwards. It does nothing if p is nil.
func (p *Pages) Close() error {
	if p == nil {
		return nil
	}

	memory, ok := p.Memory.(io.Closer)
	p.Memory = nil
	if !ok {
		return nil
	}
	return memory.Close()
}

// NewSequence returns an empty sequence that stores its keys and values in p.
func (p *Pages) NewSequence() *Sequence { return &Sequence{pool: p} }

// Reserve ensures that a sequence created by [Pages.NewSequence] has pages for the given number of
// tokens. If there are not enough free pages, it changes nothing and returns [ErrNoPages].
func (s *Sequence) Reserve(tokens int) error {
	missing := pagesFor(tokens) - len(s.pages)
	if missing > len(s.pool.free) {
		return ErrNoPages
	}
	for range missing {
		last := len(s.pool.free) - 1
		page := s.pool.free[last]
		s.pool.free = s.pool.free[:last]
		s.pool.uses[page] = 1
		s.pages = append(s.pages, page)
	}
	return nil
}

// Release gives up the pages of a sequence. A page becomes free when no sequence uses it.
func (s *Sequence) Release() {
	for _, page := range s.pages {
		if s.pool.uses[page]--; s.pool.uses[page] == 0 {
			s.pool.free = append(s.pool.free, page)
		}
	}
	s.pages, s.tokens = nil, 0
}

// Rewind forgets all tokens but the first n, so that others can follow them. It returns false and changes nothing if
// other sequences share the pages of the tokens to forget.
func (s *Sequence) Rewind(n int) bool {
	for _, page := range s.pages[min(n/PageTokens, len(s.pages)):] {
		if s.pool.uses[page] > 1 {
			return false
		}
	}
	s.Truncate(n)
	return true
}

func pagesFor(tokens int) int { return (tokens + PageTokens - 1) / PageTokens }

// sharedPages returns a new sequence that shares the pages filled by the first n tokens of s. Neither
// sequence may write to the shared pages.
func (s *Sequence) sharedPages(n int) *Sequence {
	whole := min(n, s.tokens) / PageTokens
	p := &Sequence{pool: s.pool, pages: slices.Clone(s.pages[:whole]), tokens: whole * PageTokens}
	for _, page := range p.pages {
		s.pool.uses[page]++
	}
	return p
}

// PageTable returns the table that [PagedAttention] takes for the current spans. Each row contains the
// position of its token, followed by the pages of its sequence. The unused columns, and the rows after
// the last span, are filled with -1.
func (s *Spans) PageTable(rows, columns int) ([]int, error) {
	table := make([]int, rows*columns)
	for i := range table {
		table[i] = -1
	}

	row := 0
	for _, a := range s.all {
		end := a.Start + a.Rows
		switch pages := a.Sequence.pages; {
		case row+a.Rows > rows:
			return nil, fmt.Errorf("kvcache: the spans have more rows than the graph, %d", rows)
		case pagesFor(end) > min(len(pages), columns-1):
			return nil, fmt.Errorf("kvcache: %d tokens do not fit in %d pages and %d columns", end, len(pages),
				columns)
		default:
			// Pages shared with another sequence must not change.
			for _, page := range pages[a.Start/PageTokens : pagesFor(end)] {
				if a.Sequence.pool.uses[page] > 1 {
					return nil, errors.New("kvcache: a span would overwrite a shared page")
				}
			}
			for i := range a.Rows {
				to := table[(row+i)*columns:][:columns]
				to[0] = a.Start + i
				copy(to[1:], pages[:min(len(pages), columns-1)])
			}
		}
		row += a.Rows
	}

	return table, nil
}

// PagedAttentionOp is the op that [PagedAttention] applies.
type PagedAttentionOp struct {
	opbase.Base
	Config Config // with defaults filled in
	Layer  int
	Pages  *Pages

	query opbase.Aux // the rotated queries
}

// PagedAttention is [BatchAttention] for sequences of a [Pages]. The input table, an int [rows, 1 + n]
// from [Spans.PageTable], contains the position and the pages of each row. Rows with a negative position
// produce zeros.
//
// The CPU implementation is only a reference: it copies all keys and values for every row.
func PagedAttention(q, k, v, table *gorgonia.Node, pages *Pages, layer int, c Config) (*gorgonia.Node,
	error) {
	in, rows := gorgonia.Nodes{q, k, v, table}, 0
	if q != nil && q.Dims() == 2 {
		rows = q.Shape()[0]
	}

	c = c.complete()
	err := c.check(rows, in)
	switch {
	case err != nil:
	case pages == nil || layer < 0:
		err = fmt.Errorf("the pages are nil, or the layer is negative: %d", layer)
	case table.Dtype() != tensor.Int || table.Dims() != 2 || table.Shape()[0] != rows ||
		table.Shape()[1] < 2 || (table.Shape()[1]-1)*PageTokens < c.Capacity:
		err = fmt.Errorf("the table is a %v of shape %v, want an int of shape [%d, 1 + pages of %d tokens]",
			table.Dtype(), table.Shape(), rows, c.Capacity)
	}
	if err != nil {
		return nil, fmt.Errorf("kvcache.PagedAttention: %w", err)
	}

	o := &PagedAttentionOp{Config: c, Layer: layer, Pages: pages}
	opbase.Init(&o.Base, o, "PagedAttention", fmt.Sprintf("%+v %d %p", c, layer, pages), in, q.Dtype(),
		q.Shape(), attendPaged[float32], attendPaged[float64])
	return gorgonia.ApplyOp(o, in...)
}

// DiffWRT reports that the op is not differentiable.
func (o *PagedAttentionOp) DiffWRT(inputs int) []bool { return make([]bool, max(inputs, 0)) }

// SymDiff returns an error, because the op has no gradient.
func (o *PagedAttentionOp) SymDiff(gorgonia.Nodes, *gorgonia.Node, *gorgonia.Node) (gorgonia.Nodes, error) {
	return nil, errors.New("kvcache.PagedAttention has no gradient: train with op.Attention")
}

// hostPages is the memory of a Pages on a CPU: the keys and values of each layer.
type hostPages[T cpu.Float] [][2][]T

// layer returns the keys and values of a layer, allocating them with the given number of rows and width
// if necessary.
func (h *hostPages[T]) layer(n, tokens, width int) (keys, values []T) {
	for len(*h) <= n {
		*h = append(*h, [2][]T{make([]T, tokens*width), make([]T, tokens*width)})
	}
	return (*h)[n][0], (*h)[n][1]
}

func attendPaged[T cpu.Float](o *PagedAttentionOp, y []T, in opbase.Args) error {
	q, k, v := opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), opbase.Slice[T](in, 2)
	c, table := o.Config, opbase.Slice[int](in, 3)
	qd, kd := c.Heads*c.HeadDim, c.KVHeads*c.HeadDim
	columns := len(table) / (len(q) / qd)
	clear(y)

	held, ok := o.Pages.Memory.(*hostPages[T])
	if !ok {
		held = &hostPages[T]{}
		o.Pages.Memory = held
	}
	allKeys, allValues := held.layer(o.Layer, o.Pages.Count()*PageTokens, kd)

	for row := range len(table) / columns {
		position, pages := table[row*columns], table[row*columns+1:][:columns-1]
		if position < 0 {
			continue
		}
		if position >= c.Capacity {
			return fmt.Errorf("position is %d, want 0 to %d", position, c.Capacity-1)
		}

		query, to := q[row*qd:][:qd], pages[position/PageTokens]*PageTokens+position%PageTokens
		key := allKeys[to*kd:][:kd]
		copy(allValues[to*kd:], v[row*kd:][:kd])
		if c.RoPE == nil {
			copy(key, k[row*kd:])
		} else {
			turned := opbase.AuxSlice[T](&o.query, len(query))
			turn(c, turned, query, key, k[row*kd:][:kd], position, 1)
			query = turned
		}

		var keys, values []T
		for i := range pagesFor(position + 1) {
			from := pages[i] * PageTokens * kd
			keys = append(keys, allKeys[from:][:PageTokens*kd]...)
			values = append(values, allValues[from:][:PageTokens*kd]...)
		}
		attention.At(y[row*qd:][:qd], query, keys, values, position, 1, c.shape())
	}

	return nil
}
