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
	Attentions, HeadDim int
	Seq                 int     // positions, at most
	Scale               float64 // factor on the scores; 0 means 1/sqrt(HeadDim)
}

// Block is what a block's attention has of its own.
type Block struct {
	Heads, KVHeads int
	RoPE           *op.RoPEConfig // its Base and Scaling; nil for none
	Window         int            // as op.AttentionConfig has it
}

// angles are the cosines and sines of some positions, all that have been needed.
type angles struct{ cos, sin []float64 }

// rotation is what angles depend on.
type rotation struct {
	base    float64
	scaling op.RoPEScaling
}

// Cache is the keys, turned by their positions, and the values of the positions so far, in each
// block.
type Cache struct {
	Position int // of the row that a graph computes next

	config       Config
	tables       map[rotation]*angles
	keys, values []opbase.Aux // [positions, KVHeads·HeadDim]
	query        opbase.Aux   // the one that is turned
	blocks       int          // whose attentions are in the graph
}

// New returns an empty cache.
func New(c Config) *Cache {
	return &Cache{config: c, tables: map[rotation]*angles{}, keys: make([]opbase.Aux, c.Attentions),
		values: make([]opbase.Aux, c.Attentions)}
}

// angles returns cosine and sine of those by which features are turned at a position.
func (c *Cache) angles(r op.RoPEConfig, position int) (cos, sin []float64) {
	key := rotation{base: r.Base}
	if r.Scaling != nil {
		key.scaling = *r.Scaling
	}
	t, half := c.tables[key], c.config.HeadDim/2
	if t == nil || len(t.cos) < (position+1)*half {
		r.Seq, r.HeadDim = c.Room(position+1), c.config.HeadDim
		t = new(angles)
		t.cos, t.sin = r.Tables()
		c.tables[key] = t
	}
	return t.cos[position*half:][:half], t.sin[position*half:][:half]
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
	Block
}

// Attention adds that of the next block, of queries and keys that are not turned yet.
func (c *Cache) Attention(q, k, v *gorgonia.Node, b Block) (*gorgonia.Node, error) {
	o := &cachedAttentionOp{cache: c, block: c.blocks, Block: b}
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
	copy(values[p*len(v):], v)
	if o.RoPE == nil {
		copy(keys[p*len(k):], k)
	} else {
		q = turnCached(o, q, k, keys[p*len(k):][:len(k)])
	}
	scale := c.config.Scale
	if scale == 0 {
		scale = 1 / math.Sqrt(float64(c.config.HeadDim))
	}
	attention.At(y, q, keys, values, p, attention.Shape{Heads: o.Heads, KVHeads: o.KVHeads,
		HeadDim: c.config.HeadDim, Scale: scale, Window: o.Window})
	return nil
}

// turnCached turns the queries, which it returns, and the keys, which it writes.
func turnCached[T cpu.Float](o *cachedAttentionOp, q, k, keys []T) []T {
	c := o.cache
	turned, half := opbase.AuxSlice[T](&c.query, len(q)), c.config.HeadDim/2
	cos, sin := make([]T, half), make([]T, half)
	wideCos, wideSin := c.angles(*o.RoPE, c.Position)
	for i := range half {
		cos[i], sin[i] = T(wideCos[i]), T(wideSin[i])
	}
	layer.RoPE(turned, q, cos, sin, 1, o.Heads, c.config.HeadDim, false)
	layer.RoPE(keys, k, cos, sin, 1, o.KVHeads, c.config.HeadDim, false)
	return turned
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
