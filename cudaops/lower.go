package cudaops

import (
	"fmt"
	"reflect"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
)

// kernelSet is what lowering asks of the kernels.
type kernelSet interface {
	Unary(s driver.Stream, op kernels.UnaryOp, y, x driver.Ptr, p float64, n int, t driver.DType) error
	Binary(s driver.Stream, op kernels.BinaryOp, y driver.Ptr, a, b kernels.Operand, n int, t driver.DType) error
	Attention(s driver.Stream, a kernels.AttentionShape, y kernels.Rows, lse driver.Ptr, q, k, v kernels.Rows, t driver.DType) error
	AttentionBackward(s driver.Stream, a kernels.AttentionShape, dq, dk, dv kernels.Rows, stats driver.Ptr, g, q, k, v, y kernels.Rows,
		lse driver.Ptr, t driver.DType) error
	Close() error
}

func realKernels(ctx driver.Context) (kernelSet, error) { return kernels.New(ctx), nil }

// lowering turns a node, whose inputs are arrays already, into tasks, and returns its value.
type lowering func(c *compiler, n *gorgonia.Node, in []*array) (*array, error)

// lowerings holds the ops of this module by type. An op and its gradient stand here both or neither: what one leaves for
// the other is on the device.
var lowerings map[reflect.Type]lowering

func init() {
	lowerings = map[reflect.Type]lowering{
		reflect.TypeFor[*opbase.PartOp]():      lowerPart,
		reflect.TypeFor[*op.LinearOp]():        lowerLinear,
		reflect.TypeFor[*op.LinearGradOp]():    lowerLinearGrad,
		reflect.TypeFor[*op.AttentionOp]():     lowerAttention,
		reflect.TypeFor[*op.AttentionGradOp](): lowerAttentionGrad,
	}
}

// lower adds the tasks of a node.
func (c *compiler) lower(n *gorgonia.Node) error {
	if dt := n.Dtype(); dt != tensor.Float32 && dt != tensor.Int {
		return fmt.Errorf("it is of type %v; on the GPU a graph's floats are float32, and its integers int", dt)
	}
	nodes := children(n)
	if len(nodes) == 0 && n.Op() == nil || n.Value() != nil && isConstant(n) {
		return c.input(n)
	}
	in := make([]*array, len(nodes))
	for i, child := range nodes {
		in[i] = c.values[child]
	}
	f := lowerings[reflect.TypeOf(n.Op())]
	if f == nil {
		f = stock(n)
	}
	if f == nil {
		f = (*compiler).onHost
	}
	out, err := f(c, n, in)
	if err != nil {
		return err
	}
	c.values[n] = out
	return nil
}

// isConstant reports whether n is one of Gorgonia's constants, whose op holds the value.
func isConstant(n *gorgonia.Node) bool {
	t := reflect.TypeOf(n.Op())
	return t != nil && (t.String() == "gorgonia.constantScalar" || t.String() == "gorgonia.constantTensor")
}

// input gives a node whose value comes from the host a place on the device.
func (c *compiler) input(n *gorgonia.Node) error {
	a := c.newResident(elemOf(n.Dtype()), n.Shape()...)
	c.values[n] = a
	in := &input{node: n, array: a, constant: isConstant(n)}
	for _, p := range c.m.config.params {
		in.constant = in.constant || p == n
	}
	c.inputs = append(c.inputs, in)
	return nil
}

// lowerPart views a tensor of a packed result.
func lowerPart(_ *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	offset := n.Op().(*opbase.PartOp).Offset
	if len(in[0].parts) == 0 {
		return in[0].view(offset, n.Shape()...), nil
	}
	for _, p := range in[0].parts {
		if offset == 0 {
			return p, nil
		}
		offset -= p.len()
	}
	return nil, fmt.Errorf("no part of the packed result begins at element %d", n.Op().(*opbase.PartOp).Offset)
}

// packed is a result that consists of several arrays.
func packed(parts ...*array) *array { return &array{parts: parts} }

func lowerLinear(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	y := c.newArray(in[0].elem, n.Shape()...)
	return y, c.matmul(n, product{d: y, a: in[0], b: in[1], transB: true})
}

func lowerLinearGrad(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	x, w, g := in[0], in[1], in[2]
	dx, dw := c.newArray(x.elem, x.shape...), c.newArray(float32s, w.shape...)
	if err := c.matmul(n, product{d: dx, a: g, b: w}); err != nil {
		return nil, err
	}
	return packed(dx, dw), c.matmul(n, product{d: dw, a: g, b: x, transA: true})
}

func rowsOf(a *array) kernels.Rows { return kernels.Rows{Ptr: a.ptr(), Stride: a.shape[1]} }

func attentionShape(o *op.AttentionOp, rows int) kernels.AttentionShape {
	c := o.Config
	return kernels.AttentionShape{Batch: rows / c.Seq, Seq: c.Seq, Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim,
		Causal: c.Causal, Scale: c.Scale}
}

func lowerAttention(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	q, k, v := in[0], in[1], in[2]
	o := n.Op().(*op.AttentionOp)
	s := attentionShape(o, q.shape[0])
	y, lse := c.newArray(q.elem, q.shape...), c.newArray(float32s, s.Batch, s.Heads, s.Seq)
	c.saved[o] = lse
	m := c.m
	c.do(n, func() error {
		return m.k.Attention(m.stream, s, rowsOf(y), lse.ptr(), rowsOf(q), rowsOf(k), rowsOf(v), q.elem.dtype())
	}, y, lse, q, k, v)
	return y, nil
}

func lowerAttentionGrad(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	q, k, v, y, g := in[0], in[1], in[2], in[3], in[4]
	o := n.Op().(*op.AttentionGradOp).Forward
	s := attentionShape(o, q.shape[0])
	lse := c.saved[o].(*array)
	dq, dk, dv := c.newArray(q.elem, q.shape...), c.newArray(k.elem, k.shape...), c.newArray(v.elem, v.shape...)
	stats := c.newArray(float32s, kernels.AttentionStatsBytes(s)/4)
	m := c.m
	c.do(n, func() error {
		return m.k.AttentionBackward(m.stream, s, rowsOf(dq), rowsOf(dk), rowsOf(dv), stats.ptr(), rowsOf(g), rowsOf(q), rowsOf(k),
			rowsOf(v), rowsOf(y), lse.ptr(), q.elem.dtype())
	}, q, k, v, y, g, lse, dq, dk, dv, stats)
	return packed(dq, dk, dv), nil
}
