// Package kvcache provides attention ops that cache the keys and values of earlier tokens, so that
// generating another token takes a pass over a single row.
//
// [Attention] handles one sequence, and [AttentionOp.Fill] stores the keys and values of a prompt in
// it. [BatchAttention] handles the rows of several sequences, each represented by a [Sequence].
// [PagedAttention] does the same for sequences whose keys and values are in a [Pages].
package kvcache

import (
	"errors"
	"fmt"
	"math"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/attention"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
)

// Config describes an attention over cached keys and values.
type Config struct {
	Heads, KVHeads, HeadDim int
	Capacity                int            // maximum number of positions
	RoPE                    *op.RoPEConfig // its Base and Scaling are used; nil for no rotation
	Window                  int            // as in op.AttentionConfig
	Scale                   float64        // factor on the scores; 0 means 1/sqrt(HeadDim)
}

// AttentionOp is the op that [Attention] applies. On a CPU, it holds the rotated keys and the values
// of the positions so far, and its memory grows with their number. On a GPU, the machine holds them.
type AttentionOp struct {
	opbase.Base
	Config Config // with defaults filled in

	keys, values opbase.Aux // [positions, KVHeads·HeadDim]
	query        opbase.Aux // the rotated query
}

// Attention computes the attention of the token at position p to itself and all earlier tokens, and
// caches its key and value:
//
//	keys[p] = turned(k),  values[p] = v,  y = softmax(Scale·turned(q)·keysᵀ)·values
//
// turned is the rotation performed by op.RoPE for position p. q and y are [1, Heads·HeadDim], and k
// and v are [1, KVHeads·HeadDim]. All are float32 or all are float64. position is an int [1] below
// Capacity. Keys and values of earlier positions are taken from earlier runs or from
// [AttentionOp.Fill]. The op has no gradient.
func Attention(q, k, v, position *gorgonia.Node, c Config) (*gorgonia.Node, error) {
	in := gorgonia.Nodes{q, k, v, position}
	c = c.complete()
	err := c.check(1, in)
	if err == nil && (position.Dtype() != tensor.Int || !position.Shape().Eq(tensor.Shape{1})) {
		err = fmt.Errorf("position is a %v of shape %v, want an int of shape [1]", position.Dtype(),
			position.Shape())
	}
	if err != nil {
		return nil, fmt.Errorf("kvcache.Attention: %w", err)
	}

	o := &AttentionOp{Config: c}

	// The address in the description distinguishes ops with the same inputs, since each holds its own
	// keys and values.
	opbase.Init(&o.Base, o, "CachedAttention", fmt.Sprintf("%+v %p", c, o), in, q.Dtype(),
		q.Shape(), attend[float32], attend[float64])
	return gorgonia.ApplyOp(o, in...)
}

// complete returns c with defaults filled in.
func (c Config) complete() Config {
	if c.Scale == 0 {
		c.Scale = 1 / math.Sqrt(float64(c.HeadDim))
	}
	if c.RoPE != nil {
		r := *c.RoPE
		r.Seq, r.HeadDim = c.Capacity, c.HeadDim
		c.RoPE = &r
	}
	return c
}

func (c Config) shape() attention.Shape {
	return attention.Shape{Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim, Scale: c.Scale,
		Window: c.Window}
}

// check returns an error unless q, k and v are floats of the given number of rows.
func (c Config) check(rows int, in gorgonia.Nodes) error {
	for _, n := range in {
		if n == nil {
			return errors.New("an input is nil")
		}
	}

	if c.Heads < 1 || c.KVHeads < 1 || c.HeadDim < 1 || c.Capacity < 1 || c.Window < 0 ||
		c.Heads%c.KVHeads != 0 {
		return fmt.Errorf("%d heads, %d heads of keys, %d features, a capacity of %d and a window of "+
			"%d do not fit", c.Heads, c.KVHeads, c.HeadDim, c.Capacity, c.Window)
	}

	for i, heads := range []int{c.Heads, c.KVHeads, c.KVHeads} { // other inputs are checked by the caller
		n := in[i]
		if want := (tensor.Shape{rows, heads * c.HeadDim}); !n.Shape().Eq(want) ||
			n.Dtype() != in[0].Dtype() || n.Dtype() != tensor.Float32 && n.Dtype() != tensor.Float64 {
			return fmt.Errorf("input %d is a %v of shape %v, want floats of one type and shape %v",
				i, n.Dtype(), n.Shape(), want)
		}
	}

	return nil
}

// DiffWRT reports that the op is not differentiable.
func (o *AttentionOp) DiffWRT(inputs int) []bool { return make([]bool, max(inputs, 0)) }

// SymDiff returns an error, because the op has no gradient.
func (o *AttentionOp) SymDiff(gorgonia.Nodes, *gorgonia.Node, *gorgonia.Node) (gorgonia.Nodes,
	error) {
	return nil, errors.New("kvcache.Attention has no gradient: train with op.Attention")
}

// Fill stores the rotated keys and the values of the first positions in the op. They must be
// []float32 or []float64 like the op's inputs. The op uses the slices without copying them.
func (o *AttentionOp) Fill(keys, values any) {
	o.keys.Lend(keys)
	o.values.Lend(values)
}

// Take moves another op's keys and values to o. The other op must not run again.
func (o *AttentionOp) Take(from *AttentionOp) {
	if from != nil {
		o.keys, o.values = from.keys, from.values
	}
}

// extended returns the memory of a with at least the given number of elements. If a is too short,
// extended copies its contents to new memory of room elements.
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

func attend[T cpu.Float](o *AttentionOp, y []T, in opbase.Args) error {
	q, k, v := opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), opbase.Slice[T](in, 2)
	c, p := o.Config, opbase.Slice[int](in, 3)[0]
	if p < 0 || p >= c.Capacity {
		return fmt.Errorf("position is %d, want 0 to %d", p, c.Capacity-1)
	}

	room := Room(p+1, c.Capacity)
	keys := extended[T](&o.keys, (p+1)*len(k), room*len(k))
	values := extended[T](&o.values, (p+1)*len(v), room*len(v))
	copy(values[p*len(v):], v)
	if c.RoPE == nil {
		copy(keys[p*len(k):], k)
	} else {
		turned := opbase.AuxSlice[T](&o.query, len(q))
		turn(c, turned, q, keys[p*len(k):][:len(k)], k, p, 1)
		q = turned
	}

	attention.At(y, q, keys, values, p, 1, c.shape())
	return nil
}

// least is the smallest number of rows. A pass over fewer rows takes about the same time.
const least = 16

// Room returns the number of rows to reserve for the given number of tokens, limited to most. Below
// that limit it is a power of two of at least 16, so that few graphs are built while texts grow.
func Room(tokens, most int) int {
	rows := least
	for rows < tokens {
		rows *= 2
	}
	return min(rows, most)
}
