package llm

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
)

// decoding computes logits on the CPU for a sequence that grows by one token at a time. It keeps the keys and values of the
// tokens before, and so takes a pass over one row for another token. Where there are none to go on from, at first and when a
// token has left the window, which moves all others to other positions, it takes a pass over the whole window.
type decoding struct {
	window, step Runner
	cache        *keyValues
	tokens       []int // whose keys and values are in the cache
}

func newDecoding(m *Model) (*decoding, error) {
	window, err := m.Graph(ForLogits, 1)
	if err != nil {
		return nil, err
	}
	d := &decoding{cache: newKeyValues(m.Config)}
	step, err := m.Graph(ForLogits, 1, func(b *graphBuilder) { b.cache = d.cache })
	if err != nil {
		return nil, err
	}
	if d.window, err = onCPU(window, slices.Concat(window.keys, window.values)...); err != nil {
		return nil, err
	}
	if d.step, err = onCPU(step); err != nil {
		return nil, errors.Join(err, d.close())
	}
	return d, nil
}

func (d *decoding) close() (err error) {
	if d.step.Graph != nil {
		err = d.step.Machine.Close()
	}
	return errors.Join(err, d.window.Machine.Close())
}

// next returns the logits for what follows the tokens.
func (d *decoding) next(tokens []int) (any, error) {
	last := len(tokens) - 1
	if last > 0 && last < d.cache.config.Seq && slices.Equal(d.tokens, tokens[:last]) {
		d.cache.position = last
		if err := gorgonia.Let(d.step.IDs, ids(tokens[last:])); err != nil {
			return nil, err
		}
		logits, err := d.step.compute(d.step.Logits)
		if err == nil {
			d.tokens = append(d.tokens, tokens[last])
		}
		return logits, err
	}
	d.tokens = nil
	logits, err := d.window.Next(tokens)
	if err != nil || len(tokens) == d.cache.config.Seq { // the next token moves the window
		return logits, err
	}
	if err := d.cache.fill(d.window); err != nil {
		return nil, err
	}
	d.tokens = slices.Clone(tokens)
	return logits, nil
}

// keyValues is the keys, turned by their positions, and the values of the positions so far, in each block.
type keyValues struct {
	config       Config
	cos, sin     []float64
	keys, values []opbase.Aux // [Seq, KVHeads·HeadDim]
	query        opbase.Aux   // the one that is turned
	position     int          // of the row that a graph computes next
	blocks       int          // whose attentions are in the graph
}

func newKeyValues(c Config) *keyValues {
	v := &keyValues{config: c, keys: make([]opbase.Aux, c.Layers), values: make([]opbase.Aux, c.Layers)}
	v.cos, v.sin = op.RoPEConfig{Seq: c.Seq, HeadDim: c.HeadDim, Base: c.Base}.Tables()
	return v
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

// cachedAttentionOp is the attention of one row to itself and to those in the cache, which it joins.
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
	opbase.Init(&o.Base, o, "CachedAttention", fmt.Sprint("block=", o.block), in, q.Dtype(), q.Shape(), attendCached[float32],
		attendCached[float64])
	return gorgonia.ApplyOp(o, in...)
}

func attendCached[T cpu.Float](o *cachedAttentionOp, y []T, in opbase.Args) error {
	c, p := o.cache, o.cache.position
	q, k, v := opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), opbase.Slice[T](in, 2)
	keys, values := opbase.AuxSlice[T](&c.keys[o.block], c.config.Seq*len(k)), opbase.AuxSlice[T](&c.values[o.block], c.config.Seq*len(v))
	turned, half := opbase.AuxSlice[T](&c.query, len(q)), c.config.HeadDim/2
	cos, sin := make([]T, half), make([]T, half)
	for i := range half {
		cos[i], sin[i] = T(c.cos[p*half+i]), T(c.sin[p*half+i])
	}
	cpu.RoPE(turned, q, cos, sin, 1, c.config.Heads, c.config.HeadDim, false)
	cpu.RoPE(keys[p*len(k):][:len(k)], k, cos, sin, 1, c.config.KVHeads, c.config.HeadDim, false)
	copy(values[p*len(v):], v)
	cpu.AttentionAt(y, turned, keys, values, p, cpu.AttentionShape{Heads: c.config.Heads, KVHeads: c.config.KVHeads, HeadDim: c.config.HeadDim,
		Scale: 1 / math.Sqrt(float64(c.config.HeadDim))})
	return nil
}
