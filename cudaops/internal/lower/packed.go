package lower

import (
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/internal/quant"
)

// Frozen weights in float8 or NF4 are resident in this form. Before each product that reads such a weight, a
// kernel widens it to activations in memory that is free again after the product. The backward pass widens
// the weight once more, so no widened weight is in memory for longer than one layer.
//
// Products in float8 need no widened weights. The codes of a weight in float8 are directly an operand of the
// product. Weights in NF4, and transposed weights for the gradient of x, are rounded to float8 just before the
// product.
//
// Products of a few rows in graphs that continue texts read the packed weights directly: see packProducts.

// packedInput sets the value of an input that is held in float8 or NF4. It returns false for any other input.
func (c *compiler) packedInput(n *gorgonia.Node) bool {
	var p *program.Packed
	if c.o.Shared != nil {
		p = c.o.Shared.Packed[n.Name()]
	}
	if p != nil && p.Codes == nil { // the other program does not hold the matrix
		p = &program.Packed{Matrix: p.Matrix}
	}
	if p == nil {
		if c.o.Packed == nil {
			return false
		}
		m := c.o.Packed(n)
		if m == nil {
			return false
		}
		p = &program.Packed{Matrix: m}
	}

	if c.Packed == nil {
		c.Packed = map[string]*program.Packed{}
	}
	c.Packed[n.Name()] = p
	c.Values[n] = &program.Array{Type: gpu.Float8E4M3, Shape: n.Shape(), Packed: p}
	return true
}

// hold adds the resident arrays of packed matrices, unless they exist. Matrices in float8 that are added
// together are adjacent in memory.
func (c *compiler) hold(all []*program.Array) {
	if all = slices.DeleteFunc(slices.Clone(all), func(a *program.Array) bool { return a.Packed.Codes != nil }); len(all) == 0 {
		return
	}

	if !slices.ContainsFunc(all, func(a *program.Array) bool { return a.Packed.Matrix.Format != quant.Float8 }) {
		c.holdFloat8(all)
		return
	}

	for _, a := range all {
		p := a.Packed
		if p.Matrix.Format == quant.Float8 {
			c.holdFloat8([]*program.Array{a})
			continue
		}

		nested, scales, _ := p.Matrix.Nested()
		p.Codes, p.Nested, p.Scales = c.residentBytes(p.Matrix.Codes()), c.residentBytes(nested), c.NewConstant(scales)
		if c.codebook == nil {
			c.codebook = c.NewConstant(quant.Signed8.Values[:])
		}
		p.Table = c.codebook
	}
}

// holdFloat8 adds the resident arrays of matrices in float8, which share a buffer for codes and one for scales.
func (c *compiler) holdFloat8(all []*program.Array) {
	var parts [][]byte
	var scales []float32
	for _, a := range all {
		parts, scales = append(parts, a.Packed.Matrix.Codes()), append(scales, a.Packed.Matrix.Scales()...)
	}

	codes, factors, row, at := c.residentBytes(parts...), c.NewConstant(scales), 0, 0
	for _, a := range all {
		a.Packed.Codes, a.Packed.Scales = codes.View(at, a.Shape...), factors.View(row, a.Shape[0])
		row, at = row+a.Shape[0], at+a.Len()
	}
}

// residentBytes returns a resident array with the given contents.
func (c *compiler) residentBytes(parts ...[]byte) *program.Array {
	n := 0
	for _, b := range parts {
		n += len(b)
	}
	a := c.NewResident(gpu.Float8E4M3, n)
	a.Table = func() ([]byte, error) {
		if len(parts) == 1 {
			return parts[0], nil
		}
		return slices.Concat(parts...), nil
	}
	return a
}

// stackFrozen returns frozen weights stacked vertically. If any is packed, so is the result.
// weighted then decides on its form in memory for each product.
func (c *compiler) stackFrozen(n *gorgonia.Node, all ...*program.Array) *program.Array {
	switch {
	case !anyPacked(all):
		return c.stack(n, all...)
	case len(all) == 1:
		return all[0]
	}

	rows := 0
	for _, a := range all {
		rows += a.Shape[0]
	}
	return &program.Array{Type: gpu.Float8E4M3, Shape: []int{rows, all[0].Shape[1]},
		Packed: &program.Packed{Parts: all}}
}

// widened returns w or, if w is packed, its elements as activations.
func (c *compiler) widened(n *gorgonia.Node, w *program.Array) *program.Array {
	if w.Packed == nil {
		return w
	}
	return c.widen(n, c.o.Activation, w.Shape, partsOf(w))
}

// partsOf returns the matrices stacked in a packed array.
func partsOf(w *program.Array) []*program.Array {
	if w.Packed.Parts != nil {
		return w.Packed.Parts
	}
	return []*program.Array{w}
}

// widen adds calls that widen or convert matrices to type t and stack them vertically.
func (c *compiler) widen(n *gorgonia.Node, t gpu.DType, shape []int, all []*program.Array) *program.Array {
	c.hold(slices.DeleteFunc(slices.Clone(all), func(a *program.Array) bool { return a.Packed == nil }))
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
			_, _, offset := p.Matrix.Nested()
			l := quantize.WidenNF4{N: a.Len(), Offset: offset, Type: t}
			addCall(c, n, &l, program.Writes(&l.Y, to), program.Reads(&l.Codes, p.Codes),
				program.Reads(&l.Nested, p.Nested), program.Reads(&l.Scales, p.Scales),
				program.Reads(&l.Table, p.Table)).Op = widenOp
		}
	}
	return m
}

// widenOp and float8Op name the widening of weights and their conversion to float8 in profiles.
const widenOp, float8Op = "Widen", "WeightToFloat8"

// anyPacked reports whether one of the arrays is packed.
func anyPacked(all []*program.Array) bool {
	for _, a := range all {
		if a.Packed != nil {
			return true
		}
	}
	return false
}

// packedFloat8 returns a packed matrix w as the operand of a float8 product, by rows or transposed. ok is false
// if one of its parts is not packed.
func (c *compiler) packedFloat8(n *gorgonia.Node, w *program.Array, transposed bool) (q program.Quantized, ok bool) {
	parts := partsOf(w)
	for _, a := range parts {
		if a.Packed == nil || a.Shape[0]%float8Pack != 0 {
			return q, false
		}
	}

	c.hold(parts)
	if transposed {
		return c.float8Columns(n, w, parts), true
	}
	if q, ok := adjacent(w, parts); ok {
		return q, true
	}

	if slices.ContainsFunc(parts, func(a *program.Array) bool { return a.Packed.Nested == nil }) {
		return c.quantize(n, c.widened(n, w), false), true // codes in float8 that are not adjacent
	}

	rows, d, at := w.Shape[0], w.Shape[1], 0
	q.Values = c.NewArray(gpu.Float8E4M3, rows, d)
	scales, factors := make([]float32, rows), make([]float32, rows)
	for i, v := range largestOfRows(parts) {
		scales[i], factors[i] = float8Scale(v)
	}

	q.Scales = c.NewConstant(scales)
	inverse := c.NewConstant(factors)
	for _, a := range parts {
		l := quantize.Float8NF4{Rows: a.Shape[0], D: d}
		args := append(packedOperands(&l.NF4, a.Packed), program.Writes(&l.Y, q.Values.View(at*d, a.Shape...)),
			program.Reads(&l.Factors, inverse.View(at, a.Shape[0])))
		addCall(c, n, &l, args...).Op = float8Op
		at += a.Shape[0]
	}
	return q, true
}

// adjacent returns w as an operand in float8 if its parts are adjacent in memory, in this form.
func adjacent(w *program.Array, parts []*program.Array) (q program.Quantized, ok bool) {
	first, row, at := parts[0].Packed, 0, 0
	for _, a := range parts {
		p := a.Packed
		if p.Nested != nil || p.Codes.Buffer != first.Codes.Buffer || p.Codes.At != first.Codes.At+at ||
			p.Scales.Buffer != first.Scales.Buffer || p.Scales.At != first.Scales.At+row*p.Scales.Type.Size() {
			return q, false
		}
		row, at = row+a.Shape[0], at+a.Len()
	}
	return program.Quantized{Values: first.Codes.View(0, w.Shape...), Scales: first.Scales.View(0, w.Shape[0])}, true
}

// float8Columns adds calls that transpose packed matrices and round them to float8. A single scale serves all
// columns, because the numbers of a matrix differ much less than the range of float8.
func (c *compiler) float8Columns(n *gorgonia.Node, w *program.Array, parts []*program.Array) program.Quantized {
	rows, d, at := w.Shape[0], w.Shape[1], 0
	scale, inverse := float8Scale(slices.Max(largestOfRows(parts)))
	factors := make([]float32, 0, rows)
	for _, a := range parts {
		for r := range a.Shape[0] {
			factor := inverse
			if a.Packed.Nested == nil { // the codes lack the scale of their row
				factor *= a.Packed.Matrix.Scales()[r]
			}
			factors = append(factors, factor)
		}
	}

	q := program.Quantized{Values: c.NewArray(gpu.Float8E4M3, d, rows),
		Scales: c.NewConstant(slices.Repeat([]float32{scale}, d))}
	all := c.NewConstant(factors)
	for _, a := range parts {
		l := quantize.Float8Columns{Rows: a.Shape[0], D: d, Stride: rows}
		y := q.Values.Columns(at, a.Shape[0])
		args := append(packedOperands(&l.NF4, a.Packed), program.Writes(&l.Y, y),
			program.Reads(&l.Factors, all.View(at, a.Shape[0])))
		addCall(c, n, &l, args...).Op = float8Op
		at += a.Shape[0]
	}
	return q
}

// packedOperands returns the operands of a launch that reads a packed matrix.
func packedOperands(l *quantize.NF4, p *program.Packed) []program.Arg {
	if p.Nested == nil {
		return []program.Arg{program.Reads(&l.Codes, p.Codes)}
	}
	_, _, l.Offset = p.Matrix.Nested()
	return []program.Arg{program.Reads(&l.Codes, p.Codes), program.Reads(&l.Nested, p.Nested),
		program.Reads(&l.Scales, p.Scales), program.Reads(&l.Table, p.Table)}
}

// largestOfRows returns the largest magnitude in each row of stacked packed matrices, or an upper bound.
func largestOfRows(parts []*program.Array) (all []float32) {
	for _, a := range parts {
		p := a.Packed
		if p.Largest == nil {
			p.Largest = p.Matrix.LargestOfRows()
		}
		all = append(all, p.Largest...)
	}
	return all
}

// float8Scale returns the scale of a row with the given largest magnitude, and its inverse.
func float8Scale(largest float32) (scale, inverse float32) {
	if scale = max(largest/half.MaxE4M3, 0x1p-126); largest == 0 {
		scale = 1
	}
	return scale, 1 / scale
}
