// The parts of Attention and DocumentAttention:
//   - shapes and gradients: this file
//   - CPU: internal/cpu/attention
//   - GPU: cudaops/internal/lower/attention.go,
//     cudaops/internal/lower/project.go,
//     cudaops/internal/kernel/attention
//   - test cases and benchmark: internal/opcase/attention.go

package op

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	cpuattention "github.com/kasmina-go/kasmina/internal/cpu/attention"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// AttentionConfig describes the layout of the inputs of [Attention].
type AttentionConfig struct {
	Seq     int     // positions in a sequence; sequences follow one another in the rows
	Heads   int     // query heads
	KVHeads int     // key-value heads, a divisor of Heads; 0 means Heads
	HeadDim int     // features of a head
	Causal  bool    // a position attends only to itself and earlier positions
	Scale   float64 // factor on the scores; 0 means 1/sqrt(HeadDim)
	// Window is the number of positions that a query of a causal attention attends to, including its
	// own; 0 means all. Tiles of keys that lie completely outside the window are skipped. (Beltagy et
	// al., "Longformer: The Long-Document Transformer", 2020.)
	Window int
}

// AttentionOp is the op that [Attention] and [DocumentAttention] apply.
type AttentionOp struct {
	opbase.Base
	Config AttentionConfig // with defaults filled in

	// two numbers per query and head, reused by the backward op
	normalizers opbase.Aux
}

// Attention computes scaled dot-product attention, separately for every sequence b and head h:
//
//	y = softmax(Scale · q·kᵀ)·v
//
// q and y are [B·Seq, Heads·HeadDim], and k and v are [B·Seq, KVHeads·HeadDim]. All are float32 or
// all are float64. Query head h uses key-value head h/(Heads/KVHeads) (grouped-query attention;
// Ainslie et al., "GQA", 2023). Scores are computed one tile at a time with an online softmax, so
// memory grows with Seq rather than with its square (Dao et al., "FlashAttention", 2022).
func Attention(q, k, v *gorgonia.Node, c AttentionConfig) (*gorgonia.Node, error) {
	return attend("Attention", gorgonia.Nodes{q, k, v}, c)
}

// DocumentAttention is a causal [Attention] for sequences of several consecutive documents that do
// not attend to each other. The query at position i of a sequence attends to the keys at positions
// starts[i] ≤ j ≤ i, where starts[i] is the position of the first token of token i's document.
//
// starts is [B·Seq] of type int, with one entry per row of q. Positions count from 0 in each
// sequence. Within a sequence, starts must not decrease and must satisfy 0 ≤ starts[i] ≤ i; otherwise
// the run returns an error. starts has no gradient. Tiles of keys that lie completely before the
// documents of their queries are skipped. A preceding [RoPE] may count positions through the whole
// sequence, because scores depend only on the distance between query and key.
func DocumentAttention(q, k, v, starts *gorgonia.Node, c AttentionConfig) (*gorgonia.Node, error) {
	return attend("DocumentAttention", gorgonia.Nodes{q, k, v, starts}, c)
}

// attend applies the op to queries, keys, values and, for documents, their start positions.
func attend(name string, in gorgonia.Nodes, c AttentionConfig) (*gorgonia.Node, error) {
	q := in[0]
	aq, ak, av := arg{"q", q}, arg{"k", in[1]}, arg{"v", in[2]}
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

	if c.Window >= c.Seq {
		c.Window = 0
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
	because := fmt.Sprintf("the rows of q %v by KVHeads %d × HeadDim %d",
		q.Shape(), c.KVHeads, c.HeadDim)
	for _, a := range []arg{ak, av} {
		if err := checkShape(name, a, because, q.Shape()[0], kvWidth); err != nil {
			return nil, err
		}
	}

	if len(in) > 3 {
		if err := checkStarts(name, aq, arg{"starts", in[3]}, c); err != nil {
			return nil, err
		}
	}

	o := &AttentionOp{Config: c}
	o.Owns(&o.normalizers)
	opbase.Init(&o.Base, o, name, fmt.Sprintf("%+v", c), in, q.Dtype(), q.Shape(),
		attention[float32], attention[float64])
	return gorgonia.ApplyOp(o, in...)
}

func checkStarts(op string, q, starts arg, c AttentionConfig) error {
	if err := checkGraph(op, q, starts); err != nil {
		return err
	}
	if !c.Causal {
		return fmt.Errorf(
			"op.%s: config: Causal is false, want true: starts does not say where documents end",
			op)
	}
	return checkInts(op, starts, q.node.Shape()[0],
		fmt.Sprintf("one start for each row of q %v", q.node.Shape()))
}

func (c AttentionConfig) check() error {
	switch {
	case c.Seq < 1 || c.Heads < 1 || c.KVHeads < 1 || c.HeadDim < 1:
		return fmt.Errorf(
			"config: Seq %d, Heads %d, KVHeads %d and HeadDim %d must all be positive",
			c.Seq, c.Heads, c.KVHeads, c.HeadDim)
	case c.Heads%c.KVHeads != 0:
		return fmt.Errorf("config: Heads is %d, want a multiple of KVHeads %d", c.Heads, c.KVHeads)
	case c.Window < 0:
		return fmt.Errorf("config: Window is %d, want at least 1, or 0 for all positions", c.Window)
	case c.Window > 0 && !c.Causal:
		return fmt.Errorf("config: Window is %d and Causal is false, want a causal attention",
			c.Window)
	case math.IsNaN(c.Scale) || math.IsInf(c.Scale, 0):
		return fmt.Errorf("config: Scale is %v, want a finite number", c.Scale)
	}

	return nil
}

// Documents reports whether the op was created by [DocumentAttention], in which case its fourth input
// holds the start positions of the documents.
func (o *AttentionOp) Documents() bool { return o.Arity() > 3 }

// shape returns the geometry of the attention, including the starts of documents if they are an
// input.
func (o *AttentionOp) shape(in opbase.Args) (cpuattention.Shape, error) {
	c := o.Config
	s := cpuattention.Shape{Batch: o.InputShape(0)[0] / c.Seq, Seq: c.Seq,
		Heads: c.Heads, KVHeads: c.KVHeads,
		HeadDim: c.HeadDim, Causal: c.Causal, Scale: c.Scale, Window: c.Window}
	if !o.Documents() {
		return s, nil
	}
	s.Starts = opbase.Slice[int](in, 3)
	return s, opbase.CheckStarts(s.Starts, c.Seq)
}

func (o *AttentionOp) normalizersLen() int { return 2 * o.InputShape(0)[0] * o.Config.Heads }

func attention[T cpu.Float](o *AttentionOp, y []T, in opbase.Args) error {
	s, err := o.shape(in)
	if err != nil {
		return err
	}
	normalizers := opbase.AuxSlice[T](&o.normalizers, o.normalizersLen())
	s.Stop = o.Stop()
	cpuattention.Forward(y, normalizers, opbase.Slice[T](in, 0), opbase.Slice[T](in, 1),
		opbase.Slice[T](in, 2), s)
	return nil
}

// DiffWRT reports that the op is differentiable in q, k and v.
func (o *AttentionOp) DiffWRT(int) []bool { return []bool{true, true, true, false}[:o.Arity()] }

// SymDiff returns the gradients of q, k and v.
func (o *AttentionOp) SymDiff(in gorgonia.Nodes,
	output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, in, output, grad); err != nil {
		return nil, err
	}

	b := &AttentionGradOp{Forward: o}
	grads, err := backward(&b.Base, b, "AttentionGrad", o, append(slices.Clone(in), output, grad),
		3,
		attentionGrad[float32], attentionGrad[float64])
	if err != nil {
		return nil, err
	}

	return append(grads, nil)[:o.Arity()], nil
}

// AttentionGradOp computes the packed gradients [dq | dk | dv] from the inputs of the forward op,
// its output and the output's gradient.
type AttentionGradOp struct {
	opbase.Base
	Forward *AttentionOp
}

func attentionGrad[T cpu.Float](o *AttentionGradOp, out []T, in opbase.Args) error {
	s, err := o.Forward.shape(in)
	if err != nil {
		return err
	}
	q, k, v := opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), opbase.Slice[T](in, 2)
	y, g := opbase.Slice[T](in, len(in)-2), opbase.Slice[T](in, len(in)-1)
	normalizers := opbase.AuxSlice[T](&o.Forward.normalizers, o.Forward.normalizersLen())
	dq, dk, dv := out[:len(q)], out[len(q):len(q)+len(k)], out[len(q)+len(k):]
	cpuattention.Backward(dq, dk, dv, g, q, k, v, y, normalizers, s)
	return nil
}
