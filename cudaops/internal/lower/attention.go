package lower

import (
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/attention"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/decode"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/op/kvcache"
)

func init() {
	register[*op.AttentionOp](lowerAttention, nil)
	register[*op.AttentionGradOp](lowerAttentionGrad, inInput(-1))
	register[*kvcache.AttentionOp](lowerCachedAttention, nil)
}

func attentionShape(o *op.AttentionOp, rows int) attention.Geometry {
	c := o.Config
	return attention.Geometry{Batch: rows / c.Seq, Seq: c.Seq, Heads: c.Heads, KVHeads: c.KVHeads,
		HeadDim: c.HeadDim, Causal: c.Causal, Scale: c.Scale}
}

func lowerAttention(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	q, k := c.acts(n, in[0], in[1])
	v := c.act(n, in[2])
	o := n.Op().(*op.AttentionOp)
	s := attentionShape(o, q.Shape[0])
	documents := c.documentsOf(n, o, in)
	y, normalizers := c.Like(q), c.aux(s.Batch, s.Heads, s.Seq, 2)
	c.saved[o] = normalizers
	c.call(n, attention.Forward{Geometry: s, Type: q.Type}, program.Writes("Y", y),
		program.Reads("Q", q), program.Reads("K", k), program.Reads("V", v),
		program.Writes("Normalizers", normalizers),
		untimed("Documents", documents)).FLOPs = attentionFLOPs(s, o, 2)
	return y
}

// lowerCachedAttention is the attention of one token to keys and values that the program keeps.
func lowerCachedAttention(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	q, k := c.acts(n, in[0], in[1])
	v := c.act(n, in[2])
	o := n.Op().(*kvcache.AttentionOp).Config
	g := decode.Geometry{Heads: o.Heads, KVHeads: o.KVHeads, HeadDim: o.HeadDim,
		Capacity: o.Capacity, Window: o.Window, Scale: o.Scale}
	cache := program.Cache{Keys: c.NewResident(k.Type, o.Capacity, k.Shape[1]),
		Values: c.NewResident(v.Type, o.Capacity, v.Shape[1])}
	c.Caches[n] = cache
	c.bound(n, in[3], program.IDRange{Argument: "position", Vocab: o.Capacity})
	t := c.rotation(o.RoPE)
	y := c.NewArray(q.Type, n.Shape()...)
	// of zeros, which launches leave as they find them
	arrived := c.NewConstant(make([]float32, g.Counters()))
	c.call(n, decode.Attention{Geometry: g, Type: q.Type}, program.Writes("Y", y),
		program.Reads("Q", q), program.Reads("K", k), program.Reads("V", v),
		program.Updates("Keys", cache.Keys), program.Updates("Values", cache.Values),
		program.Reads("Cos", t.cos), program.Reads("Sin", t.sin), program.Reads("Position", in[3]),
		program.Uses("Parts", c.Workspace(g.PartsBytes(c.o.Device))),
		program.Updates("Arrived", arrived))
	return y
}

func untimed(field string, a *program.Array) program.Arg {
	return program.Arg{Field: field, Array: a, Role: program.Untimed}
}

// packing is a table of where documents and windows start. Without documents starts is nil.
type packing struct {
	attention.Documents
	starts *program.Array
}

// documentsOf returns the table of where documents and windows start, which all attentions to the
// same share, nil if o knows of neither.
func (c *compiler) documentsOf(n *gorgonia.Node, o *op.AttentionOp,
	in []*program.Array) *program.Array {
	seq := o.Config.Seq
	p := packing{Documents: attention.Documents{Batch: in[0].Shape[0] / seq, Seq: seq,
		Window: o.Config.Window}}
	if o.Documents() {
		p.starts = in[3]
	} else if p.Window == 0 {
		return nil
	}
	if table := c.documents[p]; table != nil {
		return table
	}
	if p.starts != nil {
		c.bound(n, p.starts, program.IDRange{Argument: "starts", Seq: seq})
	}
	table := c.Workspace(attention.DocumentsBytes(p.Batch, seq))
	c.call(n, p.Documents, program.Writes("Table", table), program.Reads("Starts", p.starts))
	c.documents[p] = table
	return table
}

func lowerAttentionGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	if c.fuseProjectionsGrad(n, in) {
		return c.Values[n]
	}
	q, k, v, t := in[0], in[1], in[2], c.o.Activation
	dq, dk, dv := c.NewArray(t, q.Shape...), c.NewArray(t, k.Shape...), c.NewArray(t, v.Shape...)
	c.attentionGrad(n, in, dq, dk, dv, nil)
	return packed(dq, dk, dv)
}

// attentionGrad adds the gradients of an attention. Where queries and keys have been turned, those
// of what they were before.
func (c *compiler) attentionGrad(n *gorgonia.Node, in []*program.Array, dq, dk,
	dv *program.Array, turned *op.RoPEConfig) {
	q, k := c.acts(n, in[0], in[1])
	v, y, g := c.act(n, in[2]), c.act(n, in[len(in)-2]), c.act(n, in[len(in)-1])
	o := n.Op().(*op.AttentionGradOp).Forward
	documents, t := c.documentsOf(n, o, in), c.rotation(turned)
	s := attentionShape(o, q.Shape[0])
	normalizers := c.saved[o].(*program.Array)
	call := c.newCall(n, attention.Backward{Geometry: s, Type: q.Type}, program.Writes("DQ", dq),
		program.Writes("DK", dk), program.Writes("DV", dv),
		program.Reads("G", g), program.Reads("Q", q), program.Reads("K", k), program.Reads("V", v),
		program.Reads("Y", y), program.Reads("Normalizers", normalizers),
		program.Reads("Cos", t.cos), program.Reads("Sin", t.sin),
		untimed("Documents", documents))
	call.FLOPs = attentionFLOPs(s, o, 5)
	c.formStatistics(n, call, g, y, normalizers)
	c.Add(call)
}

// formStatistics has the product g, the gradient of an attention's result y, also form what the
// backward pass of the attention begins with. That is where one kernel can, where it is faster than
// two, and where nothing needs g earlier. It saves to read g once more.
func (c *compiler) formStatistics(n *gorgonia.Node, call *program.Call, g, y,
	normalizers *program.Array) {
	at := slices.IndexFunc(c.Calls, func(p *program.Call) bool {
		m, ok := p.Params.(program.Matmul)
		if !ok {
			return false
		}
		d := p.Operand("D")
		return d.Buffer == g.Buffer && d.At == g.At && slices.Equal(d.Shape, g.Shape) &&
			!m.Spec.TransA && !m.Spec.TransB && !m.Spec.Scaled() && m.Spec.Batch == 1 &&
			m.Alpha == 1 && m.Beta == 0
	})
	if at < 0 || slices.ContainsFunc(c.Calls[at+1:], c.Calls[at].Bound) {
		return
	}
	back, product := call.Params.(attention.Backward), c.Calls[at]
	one := gemm.StatisticsProduct{Geometry: back.Geometry, D: product.Params.(program.Matmul).Spec.K,
		Type: back.Type}
	if len(c.o.Ways(one)) == 0 {
		return
	}
	c.fail(c.o.ChooseWay(call))
	if back = call.Params.(attention.Backward); back.Way.Family != attention.Hopper {
		return
	}
	back.HasStatistics = true
	call.Params = back
	workspace := call.Operand("Workspace")
	workspace.Role = program.Update
	c.Calls = slices.Delete(c.Calls, at, at+1)
	form := program.Writes("Workspace", workspace.Array)
	c.either(n, []*program.Call{product, c.newCall(n, attention.Statistics{Geometry: back.Geometry,
		Type: back.Type}, program.Reads("G", g), program.Reads("Y", y),
		program.Reads("Normalizers", normalizers), form)}, true, one, program.Writes("G", g), program.Reads("X", product.Operand("A").Array),
		program.Reads("W", product.Operand("B").Array), program.Reads("Y", y),
		program.Reads("Normalizers", normalizers), form)
}

// attentionFLOPs is the operations of so many products of an attention, of which a causal mask
// leaves half. A window of w of n keys leaves w/n·(2 − w/n) of that. With documents it is 0: their
// lengths decide how much there is to compute.
func attentionFLOPs(s attention.Geometry, o *op.AttentionOp, products int) float64 {
	if o.Documents() {
		return 0
	}
	n := 2 * float64(products) * float64(s.Batch*s.Heads) * float64(s.Seq) *
		float64(s.Seq) * float64(s.HeadDim)
	if s.Causal {
		n /= 2
	}
	if window := o.Config.Window; window > 0 {
		share := float64(window) / float64(s.Seq)
		n *= share * (2 - share)
	}
	return n
}
