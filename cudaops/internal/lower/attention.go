package lower

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/attention"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/decode"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/op/kvcache"
)

func init() {
	register[*op.AttentionOp](lowerAttention, nil)
	register[*op.AttentionGradOp](lowerAttentionGrad, linearIn(-1))
	register[*kvcache.AttentionOp](lowerCachedAttention, nil)
	register[*kvcache.PagedAttentionOp](lowerPagedAttention, nil)
}

func attentionShape(o *op.AttentionOp, rows int) attention.Geometry {
	c := o.Config
	return attention.Geometry{Batch: rows / c.Seq, Seq: c.Seq, Heads: c.Heads, KVHeads: c.KVHeads,
		HeadDim: c.HeadDim, Causal: c.Causal, Scale: c.Scale}
}

func lowerAttention(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	q, k := c.asActivations(n, in[0], in[1])
	v := c.asActivation(n, in[2])
	o := n.Op().(*op.AttentionOp)
	s := attentionShape(o, q.Shape[0])
	documents := c.documentsOf(n, o, in)
	y, normalizers := c.Like(q), c.aux(s.Batch, s.Heads, s.Seq, 2)
	c.saved[o] = normalizers
	a := attention.Forward{Geometry: s, Type: q.Type}
	addCall(c, n, &a, program.Writes(&a.Y, y), program.Reads(&a.Q, q), program.Reads(&a.K, k),
		program.Reads(&a.V, v), program.Writes(&a.Normalizers, normalizers),
		untimed(&a.Documents, documents)).FLOPs = attentionFLOPs(s, o, 2)
	return y
}

// lowerCachedAttention lowers the attention of one token to cached keys and values.
func lowerCachedAttention(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	q, k := c.asActivations(n, in[0], in[1])
	v := c.asActivation(n, in[2])
	o := n.Op().(*kvcache.AttentionOp).Config
	g := decode.Geometry{Heads: o.Heads, KVHeads: o.KVHeads, HeadDim: o.HeadDim,
		Capacity: o.Capacity, Window: o.Window, Scale: o.Scale}
	cache := program.Cache{Keys: c.NewResident(k.Type, o.Capacity, k.Shape[1]),
		Values: c.NewResident(v.Type, o.Capacity, v.Shape[1])}
	c.Caches[n] = cache
	c.constrain(n, in[3], program.IDRange{Argument: "position", Vocab: o.Capacity})
	t := c.rotation(o.RoPE)
	y := c.NewArray(q.Type, n.Shape()...)
	// zero before and after every launch
	arrived := c.NewConstant(make([]float32, g.Counters()))
	a := decode.Attention{Geometry: g, Type: q.Type}
	addCall(c, n, &a, program.Writes(&a.Y, y), program.Reads(&a.Q, q), program.Reads(&a.K, k),
		program.Reads(&a.V, v), program.Updates(&a.Keys, cache.Keys),
		program.Updates(&a.Values, cache.Values), program.Reads(&a.Cos, t.cos),
		program.Reads(&a.Sin, t.sin), program.Reads(&a.Position, in[3]),
		program.Uses(&a.Parts, c.Workspace(g.PartsBytes(c.o.Device))),
		program.Updates(&a.Arrived, arrived))

	return y
}

// lowerPagedAttention lowers the attention of tokens of several sequences to keys and values in pages, which
// belong to the pages rather than to the program.
func lowerPagedAttention(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	q, k := c.asActivations(n, in[0], in[1])
	v := c.asActivation(n, in[2])
	o := n.Op().(*kvcache.PagedAttentionOp)
	g := decode.Geometry{Heads: o.Config.Heads, KVHeads: o.Config.KVHeads, HeadDim: o.Config.HeadDim,
		Capacity: o.Config.Capacity, Window: o.Config.Window, Scale: o.Config.Scale}
	a := decode.Paged{Geometry: g, Rows: q.Shape[0], Columns: in[3].Shape[1], Type: q.Type}
	a.Grouped = c.o.Decoding.Grouped && a.CanGroup()

	var pages [2]*program.Array
	for i := range pages {
		shape := []int{o.Pages.Count() * decode.PageTokens, k.Shape[1]}
		pages[i] = &program.Array{Buffer: &program.Buffer{Resident: true}, Type: k.Type, Shape: shape}
		pages[i].Bytes = pages[i].Extent()
		at, err := c.o.PageMemory(o.Pages, 2*o.Layer+i, pages[i].Bytes)
		c.fail(err)
		pages[i].Base = at
	}

	t := c.rotation(o.Config.RoPE)
	y := c.NewArray(q.Type, n.Shape()...)
	// zero before and after every launch, so that all layers can share it
	key := fmt.Sprint("paged ", a.Counters())
	if c.counters[key] == nil {
		c.counters[key] = c.NewConstant(make([]float32, a.Counters()))
	}
	addCall(c, n, &a, program.Writes(&a.Y, y), program.Reads(&a.Q, q), program.Reads(&a.K, k),
		program.Reads(&a.V, v), program.Updates(&a.Keys, pages[0]), program.Updates(&a.Values, pages[1]),
		program.Reads(&a.Cos, t.cos), program.Reads(&a.Sin, t.sin), program.Reads(&a.Table, in[3]),
		program.Uses(&a.Parts, c.Workspace(a.PartsBytes(c.o.Device))),
		program.Updates(&a.Arrived, c.counters[key]))

	return y
}

// untimed returns an operand that is read, except that it is null while variants are timed.
func untimed(field *gpu.Ptr, a *program.Array) program.Arg {
	arg := program.Reads(field, a)
	arg.Role = program.Untimed
	return arg
}

// documentKey identifies a table of document and window starts. starts is nil if there are no documents.
type documentKey struct {
	attention.Documents
	starts *program.Array
}

// documentsOf returns the table of document and window starts for an attention, shared by all
// attentions with the same documents and window. It returns nil if o uses neither.
func (c *compiler) documentsOf(n *gorgonia.Node, o *op.AttentionOp,
	in []*program.Array) *program.Array {
	seq := o.Config.Seq
	p := documentKey{Documents: attention.Documents{Batch: in[0].Shape[0] / seq, Seq: seq,
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
		c.constrain(n, p.starts, program.IDRange{Argument: "starts", Seq: seq})
	}

	table := c.Workspace(attention.DocumentsBytes(p.Batch, seq))
	d := p.Documents
	addCall(c, n, &d, program.Writes(&d.Table, table), program.Reads(&d.Starts, p.starts))
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

// attentionGrad adds the gradients of an attention. If turned is not nil, the queries and keys were
// rotated, and attentionGrad computes the gradients before rotation.
func (c *compiler) attentionGrad(n *gorgonia.Node, in []*program.Array, dq, dk,
	dv *program.Array, turned *op.RoPEConfig) {
	q, k := c.asActivations(n, in[0], in[1])
	v, y, g := c.asActivation(n, in[2]), c.asActivation(n, in[len(in)-2]), c.asActivation(n, in[len(in)-1])
	o := n.Op().(*op.AttentionGradOp).Forward
	documents, t := c.documentsOf(n, o, in), c.rotation(turned)
	s := attentionShape(o, q.Shape[0])
	normalizers := c.saved[o].(*program.Array)
	a := attention.Backward{Geometry: s, Type: q.Type}
	call := newCall(c, n, &a, program.Writes(&a.DQ, dq), program.Writes(&a.DK, dk),
		program.Writes(&a.DV, dv), program.Reads(&a.G, g), program.Reads(&a.Q, q),
		program.Reads(&a.K, k), program.Reads(&a.V, v), program.Reads(&a.Y, y),
		program.Reads(&a.Normalizers, normalizers), program.Reads(&a.Cos, t.cos),
		program.Reads(&a.Sin, t.sin), untimed(&a.Documents, documents))
	call.FLOPs = attentionFLOPs(s, o, 5)
	c.formStatistics(n, call, &a, g, y, normalizers)
	c.Add(call)
}

// formStatistics fuses the product that computes g, the gradient of an attention's result y, with the
// statistics that the attention's backward pass needs first. This saves one pass over g. It applies if a
// kernel supports the fusion, nothing else uses g earlier, and the chooser prefers the fused kernel.
func (c *compiler) formStatistics(n *gorgonia.Node, call *program.Call, back *attention.Backward,
	g, y, normalizers *program.Array) {
	at := slices.IndexFunc(c.Calls, func(p *program.Call) bool { return c.formsGradient(p, g) })
	if at < 0 || slices.ContainsFunc(c.Calls[at+1:], c.Calls[at].Conflicts) {
		return
	}

	product := c.Calls[at]
	one := gemm.StatisticsProduct{Geometry: back.Geometry, Type: back.Type}
	var operands []program.Arg
	switch m := product.Params.(type) {
	case *program.Matmul:
		one.D = m.Spec.K
		operands = []program.Arg{program.Reads(&one.X, product.Operand(&m.A).Array),
			program.Reads(&one.W, product.Operand(&m.B).Array)}
	case *gemm.ProductSum:
		one.D = m.D
		operands = append(term{x: product.Operand(&m.Term.X).Array, w: product.Operand(&m.Term.W).Array}.operands(&one.Term),
			program.Reads(&one.X, product.Operand(&m.X).Array), program.Reads(&one.W, product.Operand(&m.W).Array))
	}

	if len(c.o.Variants(one)) == 0 {
		return
	}

	c.fail(c.o.ChooseVariant(call))
	if back.Variant.Family != attention.Hopper {
		return
	}

	back.HasStatistics = true
	workspace := call.Operand(&back.Workspace)
	workspace.Role = program.Update
	c.Calls = slices.Delete(c.Calls, at, at+1)
	s := attention.Statistics{Geometry: back.Geometry, Type: back.Type}
	statistics := newCall(c, n, &s, program.Reads(&s.G, g), program.Reads(&s.Y, y),
		program.Reads(&s.Normalizers, normalizers), program.Writes(&s.Workspace, workspace.Array))
	c.addProduct([]*program.Call{product, statistics}, true, newCall(c, n, &one,
		append(operands, program.Writes(&one.G, g), program.Reads(&one.Y, y),
			program.Reads(&one.Normalizers, normalizers),
			program.Writes(&one.Workspace, workspace.Array))...))
}

// formsGradient reports whether a call computes g as a product that a StatisticsProduct can compute.
func (c *compiler) formsGradient(call *program.Call, g *program.Array) bool {
	var d *program.Arg
	switch m := call.Params.(type) {
	case *program.Matmul:
		if !m.Spec.TransA && !m.Spec.TransB && !m.Spec.Scaled() && m.Spec.Batch == 1 && m.Alpha == 1 &&
			m.Beta == 0 {
			d = call.Operand(&m.D)
		}
	case *gemm.ProductSum:
		if !m.TransW && call.Operand(&m.C) == nil {
			d = call.Operand(&m.Y)
		}
	}
	return d != nil && d.Buffer == g.Buffer && d.At == g.At && slices.Equal(d.Shape, g.Shape)
}

// attentionFLOPs returns the operations of the given number of products in an attention. A causal mask
// halves them, and a window of w out of n keys reduces them further to a share of w/n·(2 − w/n). With
// documents the result is 0, because the amount of work depends on their lengths.
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
