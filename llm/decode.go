package llm

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
)

// decoding computes logits on the CPU for a sequence that grows by one token at a time. It keeps
// the keys and values of the tokens before, and so takes a pass over one row for another token.
// Where there are none to go on from, at first and when a token has left the window, which moves
// all others to other positions, it takes a pass over a window that holds the tokens. Time and
// memory are those of the tokens that there are: Config.Seq may be much larger.
type decoding struct {
	model        *Model
	window, step Runner
	rows         int // of the window, 0 before there is one
	cache        *keyValues
	tokens       []int // whose keys and values are in the cache
}

func newDecoding(m *Model) (*decoding, error) {
	d := &decoding{model: m, cache: newKeyValues(m.Config)}
	step, err := m.Graph(ForLogits, 1, func(b *graphBuilder) { b.cache = d.cache })
	if err != nil {
		return nil, err
	}
	d.step, err = onCPU(step)
	return d, err
}

func (d *decoding) close() (err error) {
	if d.rows > 0 {
		err = d.window.Machine.Close()
	}
	return errors.Join(err, d.step.Machine.Close())
}

// minRows is how many rows there are at least: for fewer, a pass takes hardly less time.
const minRows = 16

// roomFor is the number of rows for so many tokens: a power of two, so that few windows are built
// as texts get longer.
func (c Config) roomFor(tokens int) int {
	rows := minRows
	for rows < tokens {
		rows *= 2
	}
	return min(rows, c.Seq)
}

// reserve makes the window one for so many tokens.
func (d *decoding) reserve(tokens int) error {
	rows := d.model.Config.roomFor(tokens)
	if rows == d.rows {
		return nil
	}
	g, err := d.model.Graph(ForLogits, 1, func(b *graphBuilder) { b.seq = rows })
	if err != nil {
		return err
	}
	w, err := onCPU(g, slices.Concat(g.keys, g.values)...)
	if err != nil {
		return err
	}
	if d.rows > 0 {
		err = d.window.Machine.Close()
	}
	d.window, d.rows = w, rows
	return err
}

// next returns the logits for what follows the tokens.
func (d *decoding) next(ctx context.Context, tokens []int) (any, error) {
	seq, last := d.model.Config.Seq, len(tokens)-1
	if last > 0 && last < seq && slices.Equal(d.tokens, tokens[:last]) {
		d.cache.position = last
		if err := gorgonia.Let(d.step.IDs, ids(tokens[last:])); err != nil {
			return nil, err
		}
		logits, err := d.step.compute(ctx, d.step.Logits)
		if err == nil {
			d.tokens = append(d.tokens, tokens[last])
		}
		return logits, err
	}
	d.tokens = nil
	if err := d.reserve(len(tokens)); err != nil {
		return nil, err
	}
	logits, err := d.window.Next(ctx, tokens)
	if err != nil || len(tokens) == seq { // the next token moves the window
		return logits, err
	}
	if err := d.cache.fill(d.window); err != nil {
		return nil, err
	}
	d.tokens = slices.Clone(tokens)
	return logits, nil
}

// keyValues is the keys, turned by their positions, and the values of the positions so far, in each
// block.
type keyValues struct {
	config       Config
	cos, sin     []float64    // of some positions, all that have been needed
	keys, values []opbase.Aux // [positions, KVHeads·HeadDim]
	query        opbase.Aux   // the one that is turned
	position     int          // of the row that a graph computes next
	blocks       int          // whose attentions are in the graph
}

func newKeyValues(c Config) *keyValues {
	return &keyValues{config: c, keys: make([]opbase.Aux, c.Layers), values: make([]opbase.Aux,
		c.Layers)}
}

// angles returns cosine and sine of those by which features are turned at a position.
func (c *keyValues) angles(position int) (cos, sin []float64) {
	half := c.config.HeadDim / 2
	if len(c.cos) < (position+1)*half {
		rows := c.config.roomFor(position + 1)
		c.cos, c.sin = op.RoPEConfig{Seq: rows, HeadDim: c.config.HeadDim,
			Base: c.config.Base}.Tables()
	}
	return c.cos[position*half:][:half], c.sin[position*half:][:half]
}

// extended returns the memory of a with room for so many elements, the first of which are what it
// held.
func extended[T cpu.Float](a *opbase.Aux, elements, room int) []T {
	_, n := a.Len()
	held := opbase.AuxSlice[T](a, n)
	if n >= elements {
		return held
	}
	more := make([]T, room)
	copy(more, held)
	a.Lend(more)
	return more
}

// fill takes over the keys and values of a run over a window.
func (c *keyValues) fill(r Runner) error {
	for _, side := range []struct {
		nodes gorgonia.Nodes
		to    []opbase.Aux
	}{{r.keys, c.keys}, {r.values, c.values}} {
		for i, n := range side.nodes {
			v, err := r.Machine.Value(n)
			if err != nil {
				return err
			}
			side.to[i].Lend(v.Data())
		}
	}
	return nil
}

// cachedAttentionOp is the attention of one row to itself and to those in the cache, which it
// joins.
type cachedAttentionOp struct {
	opbase.Base
	cache *keyValues
	block int
}

// attention adds that of the next block, of its normalised input h and its values.
func (c *keyValues) attention(h, wq, wk, v *gorgonia.Node) (*gorgonia.Node, error) {
	q, err := op.Linear(h, wq)
	if err != nil {
		return nil, err
	}
	k, err := op.Linear(h, wk)
	if err != nil {
		return nil, err
	}
	o := &cachedAttentionOp{cache: c, block: c.blocks}
	c.blocks++
	in := gorgonia.Nodes{q, k, v}
	opbase.Init(&o.Base, o, "CachedAttention", fmt.Sprint("block=", o.block), in, q.Dtype(),
		q.Shape(), attendCached[float32], attendCached[float64])
	return gorgonia.ApplyOp(o, in...)
}

func attendCached[T cpu.Float](o *cachedAttentionOp, y []T, in opbase.Args) error {
	c, p := o.cache, o.cache.position
	q, k, v := opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), opbase.Slice[T](in, 2)
	room := c.config.roomFor(p + 1)
	keys := extended[T](&c.keys[o.block], (p+1)*len(k), room*len(k))
	values := extended[T](&c.values[o.block], (p+1)*len(v), room*len(v))
	turned, half := opbase.AuxSlice[T](&c.query, len(q)), c.config.HeadDim/2
	cos, sin := make([]T, half), make([]T, half)
	wideCos, wideSin := c.angles(p)
	for i := range half {
		cos[i], sin[i] = T(wideCos[i]), T(wideSin[i])
	}
	cpu.RoPE(turned, q, cos, sin, 1, c.config.Heads, c.config.HeadDim, false)
	cpu.RoPE(keys[p*len(k):][:len(k)], k, cos, sin, 1, c.config.KVHeads, c.config.HeadDim, false)
	copy(values[p*len(v):], v)
	cpu.AttentionAt(y, turned, keys, values, p, cpu.AttentionShape{Heads: c.config.Heads,
		KVHeads: c.config.KVHeads, HeadDim: c.config.HeadDim,
		Scale: 1 / math.Sqrt(float64(c.config.HeadDim))})
	return nil
}
