package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/quant"
)

// Frozen weights in float8 or NF4 are resident in this form. Before each product that reads such a weight, a
// kernel widens it to activations in memory that is free again after the product. The backward pass widens
// the weight once more, so no widened weight is in memory for longer than one layer.

// packedInput adds the resident arrays of an input that is held in float8 or NF4. It returns false for any
// other input.
func (c *compiler) packedInput(n *gorgonia.Node) bool {
	var p *program.Packed
	if c.o.Shared != nil {
		p = c.o.Shared.Packed[n.Name()]
	}
	if p == nil {
		if c.o.Packed == nil {
			return false
		}
		m := c.o.Packed(n)
		if m == nil {
			return false
		}
		p = c.newPacked(m)
	}

	if c.Packed == nil {
		c.Packed = map[string]*program.Packed{}
	}
	c.Packed[n.Name()] = p
	c.Values[n] = &program.Array{Type: gpu.Float8E4M3, Shape: n.Shape(), Packed: p}
	return true
}

// newPacked adds the arrays of a matrix.
func (c *compiler) newPacked(m *quant.Matrix) *program.Packed {
	bytes := func(b []byte) *program.Array {
		a := c.NewResident(gpu.Float8E4M3, len(b))
		a.Table = func() ([]byte, error) { return b, nil }
		return a
	}

	p := &program.Packed{Codes: bytes(m.Codes())}
	if m.Format == quant.Float8 {
		p.Scales = c.NewConstant(m.Scales())
		return p
	}

	nested, scales, offset := m.Nested()
	p.Nested, p.Scales, p.Offset = bytes(nested), c.NewConstant(scales), offset
	if c.codebook == nil {
		c.codebook = c.NewConstant(quant.Signed8.Values[:])
	}
	p.Table = c.codebook
	return p
}

// widen adds calls that widen or convert matrices to type t and stack them vertically.
func (c *compiler) widen(n *gorgonia.Node, t gpu.DType, shape []int, all []*program.Array) *program.Array {
	m, at := c.NewArray(t, shape...), 0
	for _, a := range all {
		to := m.View(at, a.Shape...)
		at += a.Len()
		p := a.Packed
		switch {
		case p == nil:
			c.Add(c.cast(n, to, a))
		case p.Nested == nil:
			l := quantize.WidenFloat8{Rows: a.Shape[0], D: a.Shape[1], Type: t}
			addCall(c, n, &l, program.Writes(&l.Y, to), program.Reads(&l.Codes, p.Codes),
				program.Reads(&l.Scales, p.Scales)).Op = widenOp
		default:
			l := quantize.WidenNF4{N: a.Len(), Offset: p.Offset, Type: t}
			addCall(c, n, &l, program.Writes(&l.Y, to), program.Reads(&l.Codes, p.Codes),
				program.Reads(&l.Nested, p.Nested), program.Reads(&l.Scales, p.Scales),
				program.Reads(&l.Table, p.Table)).Op = widenOp
		}
	}
	return m
}

// widenOp is the name of the widening of weights in profiles.
const widenOp = "Widen"

// anyPacked reports whether one of the arrays is packed.
func anyPacked(all []*program.Array) bool {
	for _, a := range all {
		if a.Packed != nil {
			return true
		}
	}
	return false
}

// weightsOf returns the stacked weights of a group for a call that is added next.
func (c *compiler) weightsOf(n *gorgonia.Node, g *frozenGroup) *program.Array {
	if !anyPacked(g.parts) {
		return g.weights
	}
	return c.stack(n, g.parts...)
}
