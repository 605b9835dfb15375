package op

import (
	"fmt"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// AttentionConfig describes the layout of [Attention]'s inputs.
type AttentionConfig struct {
	Seq     int     // positions in a sequence; rows are sequences one behind the other
	Heads   int     // query heads
	KVHeads int     // key-value heads, a divisor of Heads; 0 means Heads
	HeadDim int     // features of a head
	Causal  bool    // a position sees itself and those before it
	Scale   float64 // factor on the scores; 0 means 1/sqrt(HeadDim)
}

// AttentionOp is the op behind [Attention].
type AttentionOp struct {
	opbase.Base
	Config AttentionConfig // with the defaults filled in

	lse opbase.Aux // log-sum-exp of the scores of every query and head, which the backward op reuses
}

// Attention is scaled dot-product attention, for every sequence b and head h on its own:
//
//	y = softmax(Scale · q·kᵀ)·v
//
// q and y are [B·Seq, Heads·HeadDim], k and v are [B·Seq, KVHeads·HeadDim]; all float32 or all float64. Query head h reads
// key-value head h/(Heads/KVHeads) (grouped-query attention; Ainslie et al., "GQA", 2023). Scores are formed a tile at a
// time with an online softmax, so that memory grows with Seq, not with its square (Dao et al., "FlashAttention", 2022).
func Attention(q, k, v *gorgonia.Node, c AttentionConfig) (*gorgonia.Node, error) {
	const name = "Attention"
	aq, ak, av := arg{"q", q}, arg{"k", k}, arg{"v", v}
	if err := checkFloats(name, aq, ak, av); err != nil {
		return nil, err
	}
	if c.KVHeads == 0 {
		c.KVHeads = c.Heads
	}
	if c.Scale == 0 {
		c.Scale = 1 / math.Sqrt(float64(c.HeadDim))
	}
	if err := c.check(); err != nil {
		return nil, fmt.Errorf("op.%s: %w", name, err)
	}
	for _, a := range []arg{aq, ak, av} {
		if err := checkDims(name, a, 2, "[rows, heads·HeadDim]"); err != nil {
			return nil, err
		}
	}
	if err := checkHeads(name, aq, c.Seq, "Heads", c.Heads, c.HeadDim); err != nil {
		return nil, err
	}
	kvWidth := c.KVHeads * c.HeadDim
	because := fmt.Sprintf("the rows of q %v by KVHeads %d × HeadDim %d", q.Shape(), c.KVHeads, c.HeadDim)
	for _, a := range []arg{ak, av} {
		if err := checkShape(name, a, because, q.Shape()[0], kvWidth); err != nil {
			return nil, err
		}
	}
	o := &AttentionOp{Config: c}
	o.Owns(&o.lse)
	in := gorgonia.Nodes{q, k, v}
	opbase.Init(&o.Base, o, name, fmt.Sprintf("%+v", c), in, q.Dtype(), q.Shape(), attention[float32], attention[float64])
	return gorgonia.ApplyOp(o, in...)
}

func (c AttentionConfig) check() error {
	switch {
	case c.Seq < 1 || c.Heads < 1 || c.KVHeads < 1 || c.HeadDim < 1:
		return fmt.Errorf("config: Seq %d, Heads %d, KVHeads %d and HeadDim %d must all be positive", c.Seq, c.Heads, c.KVHeads, c.HeadDim)
	case c.Heads%c.KVHeads != 0:
		return fmt.Errorf("config: Heads is %d, want a multiple of KVHeads %d", c.Heads, c.KVHeads)
	case math.IsNaN(c.Scale) || math.IsInf(c.Scale, 0):
		return fmt.Errorf("config: Scale is %v, want a finite number", c.Scale)
	}
	return nil
}

func (o *AttentionOp) shape() cpu.AttentionShape {
	c := o.Config
	return cpu.AttentionShape{Batch: o.InputShape(0)[0] / c.Seq, Seq: c.Seq, Heads: c.Heads, KVHeads: c.KVHeads,
		HeadDim: c.HeadDim, Causal: c.Causal, Scale: c.Scale}
}

func (o *AttentionOp) lseLen() int { return o.InputShape(0)[0] * o.Config.Heads }

func attention[T cpu.Float](o *AttentionOp, y []T, in opbase.Args) error {
	lse := opbase.AuxSlice[T](&o.lse, o.lseLen())
	cpu.Attention(y, lse, opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), opbase.Slice[T](in, 2), o.shape())
	return nil
}

// DiffWRT reports that the op is differentiable in q, k and v.
func (o *AttentionOp) DiffWRT(int) []bool { return []bool{true, true, true} }

// SymDiff returns the gradients of q, k and v.
func (o *AttentionOp) SymDiff(in gorgonia.Nodes, output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	b := &AttentionGradOp{Forward: o}
	return backward(&b.Base, b, "AttentionGrad", o, gorgonia.Nodes{in[0], in[1], in[2], output, grad}, 3,
		attentionGrad[float32], attentionGrad[float64])
}

// AttentionGradOp computes [dq | dk | dv], packed, from q, k, v, the forward output and its gradient.
type AttentionGradOp struct {
	opbase.Base
	Forward *AttentionOp
}

func attentionGrad[T cpu.Float](o *AttentionGradOp, out []T, in opbase.Args) error {
	q, k, v := opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), opbase.Slice[T](in, 2)
	y, g := opbase.Slice[T](in, 3), opbase.Slice[T](in, 4)
	lse := opbase.AuxSlice[T](&o.Forward.lse, o.Forward.lseLen())
	dq, dk, dv := out[:len(q)], out[len(q):len(q)+len(k)], out[len(q)+len(k):]
	cpu.AttentionBackward(dq, dk, dv, g, q, k, v, y, lse, o.Forward.shape())
	return nil
}
