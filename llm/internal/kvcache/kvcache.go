// Package kvcache keeps what attention has computed of earlier tokens, so that another one takes a
// pass over a single row.
package kvcache

import (
	"fmt"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/attention"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
)

// Config is what a cache needs to know of a model.
type Config struct {
	Layers, Heads, KVHeads, HeadDim int
	Base                            float64 // of the rotary angles
	Seq                             int     // positions, at most
}

// Cache is the keys, turned by their positions, and the values of the positions so far, in each
// block.
type Cache struct {
	Position int // of the row that a graph computes next

	config       Config
	cos, sin     []float64    // of some positions, all that have been needed
	keys, values []opbase.Aux // [positions, KVHeads·HeadDim]
	query        opbase.Aux   // the one that is turned
	blocks       int          // whose attentions are in the graph
}

// New returns an empty cache.
func New(c Config) *Cache {
	return &Cache{config: c, keys: make([]opbase.Aux, c.Layers),
		values: make([]opbase.Aux, c.Layers)}
}

// angles returns cosine and sine of those by which features are turned at a position.
func (c *Cache) angles(position int) (cos, sin []float64) {
	half := c.config.HeadDim / 2
	if len(c.cos) < (position+1)*half {
		rows := c.Room(position + 1)
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

// Fill takes over the keys, turned by their positions, and the values of all blocks in a run over a
// window, where value finds those of nodes.
func (c *Cache) Fill(value func(*gorgonia.Node) (gorgonia.Value, error), keys,
	values gorgonia.Nodes) error {
	for _, side := range []struct {
		nodes gorgonia.Nodes
		to    []opbase.Aux
	}{{keys, c.keys}, {values, c.values}} {
		for i, n := range side.nodes {
			v, err := value(n)
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
	cache *Cache
	block int
}

// Attention adds that of the next block, of its normalised input h and its values.
func (c *Cache) Attention(h, wq, wk, v *gorgonia.Node) (*gorgonia.Node, error) {
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
	c, p := o.cache, o.cache.Position
	q, k, v := opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), opbase.Slice[T](in, 2)
	room := c.Room(p + 1)
	keys := extended[T](&c.keys[o.block], (p+1)*len(k), room*len(k))
	values := extended[T](&c.values[o.block], (p+1)*len(v), room*len(v))
	turned, half := opbase.AuxSlice[T](&c.query, len(q)), c.config.HeadDim/2
	cos, sin := make([]T, half), make([]T, half)
	wideCos, wideSin := c.angles(p)
	for i := range half {
		cos[i], sin[i] = T(wideCos[i]), T(wideSin[i])
	}
	layer.RoPE(turned, q, cos, sin, 1, c.config.Heads, c.config.HeadDim, false)
	layer.RoPE(keys[p*len(k):][:len(k)], k, cos, sin, 1, c.config.KVHeads, c.config.HeadDim, false)
	copy(values[p*len(v):], v)
	attention.At(y, turned, keys, values, p, attention.Shape{Heads: c.config.Heads,
		KVHeads: c.config.KVHeads, HeadDim: c.config.HeadDim,
		Scale: 1 / math.Sqrt(float64(c.config.HeadDim))})
	return nil
}

// minRows is how many rows there are at least: for fewer, a pass takes hardly less time.
const minRows = 16

// Room is the number of rows for so many tokens: a power of two, so that few windows are built as
// texts get longer.
func (c *Cache) Room(tokens int) int {
	rows := minRows
	for rows < tokens {
		rows *= 2
	}
	return min(rows, c.config.Seq)
}
