package lower

import (
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/op"
)

// With [Float8] the products of linear layers, y = x·wᵀ and dx = g·w, are computed in float8. Both
// operands are laid out along the summed dimension, and each row has a scaling factor that is applied to
// the sums (see quantize/NOTES.md). Weights are therefore stored twice, in rows and transposed, and are
// quantized again when they change. Activations are quantized by the kernel that produces them, or before
// the first product that needs them. Everything else works as with [BFloat16].

const (
	// float8Rows is the minimum number of rows for a float8 product. With fewer rows the time is
	// dominated by reading weights, while quantizing the rows takes an additional kernel.
	float8Rows = 128
	// float8Pack must divide the other dimensions of a product.
	float8Pack = 16
)

// float8 reports whether a product with the given dimensions uses float8. The decision depends only on
// sizes, so that results don't depend on timing.
func (c *compiler) float8(rows, columns, depth int) bool {
	return c.o.Float8 && rows >= float8Rows && columns%float8Pack == 0 && depth%float8Pack == 0
}

// weighted returns the product y = x·wᵀ of a linear layer or, if grad is set, y = x·w for its gradient. w may be
// packed.
func (c *compiler) weighted(n *gorgonia.Node, y, x, w *program.Array, grad bool) program.Product {
	if !c.float8(x.Shape[0], w.Shape[0], w.Shape[1]) {
		return program.Product{D: y, A: x, B: c.widened(n, w), TransB: !grad}
	}

	a, b, ok := c.quantize(n, x, false), program.Quantized{}, false
	if w.Packed != nil {
		b, ok = c.packedFloat8(n, w, grad)
	}
	if !ok {
		b = c.quantize(n, c.widened(n, w), grad)
	}
	return program.Product{D: y, A: a.Values, B: b.Values, TransB: true,
		ScaleA: a.Scales, ScaleB: b.Scales}
}

// newQuantized returns memory for a float8 matrix, allocated by place.
func newQuantized(place func(gpu.DType, ...int) *program.Array, rows,
	columns int) program.Quantized {
	return program.Quantized{Values: place(gpu.Float8E4M3, rows, columns),
		Scales: place(gpu.Float32, rows)}
}

// float8Of returns the key of a conversion of x to float8, by rows or transposed.
func float8Of(x *program.Array, turned bool) program.Conversion {
	m := program.NewConversion(gpu.Float8E4M3, x)
	m.Width, m.Stride, m.Transposed = x.Shape[1], x.Stride, turned
	return m
}

// quantize returns x in float8, by rows or transposed. Equal conversions share a result. Conversions of
// parameters and constants are resident, and updated along with them.
func (c *compiler) quantize(n *gorgonia.Node, x *program.Array, turned bool) program.Quantized {
	key := float8Of(x, turned)
	if q, ok := c.Conversions[key]; ok {
		return q
	}

	rows, d := x.Shape[0], x.Shape[1]
	var q program.Quantized
	switch of := c.sources[x.Buffer]; {
	case of != nil:
		q = c.residentFloat8(x, of, turned)
	case turned:
		q = newQuantized(c.NewArray, d, rows)
		l := quantize.Columns{Rows: rows, D: d, Type: x.Type}
		addCall(c, n, &l, program.Writes(&l.Y, q.Values), program.Writes(&l.Scale, q.Scales),
			program.Reads(&l.X, x)).Op = "QuantizeColumns"
	default:
		q = newQuantized(c.NewArray, rows, d)
		l := quantize.Rows{Rows: rows, D: d, XStride: x.Stride, Type: x.Type}
		addCall(c, n, &l, program.Writes(&l.Y, q.Values), program.Writes(&l.Scale, q.Scales),
			program.Reads(&l.X, x)).Op = "Quantize"
	}

	c.Conversions[key] = q
	return q
}

// residentFloat8 returns the resident float8 copy of w, which derives from the given inputs.
func (c *compiler) residentFloat8(w *program.Array, of []*program.Input,
	turned bool) program.Quantized {
	i := slices.IndexFunc(c.Weights, func(k *program.QuantizedWeight) bool {
		return float8Of(k.Array, false) == float8Of(w, false)
	})
	if i < 0 {
		i = len(c.Weights)
		c.Weights = append(c.Weights, &program.QuantizedWeight{Inputs: of, Array: w,
			Rows: newQuantized(c.NewResident, w.Shape[0], w.Shape[1])})
	}

	k := c.Weights[i]
	if !turned {
		return k.Rows
	}

	k.Transposed = newQuantized(c.NewResident, w.Shape[1], w.Shape[0])
	return k.Transposed
}

// wantsFloat8 reports whether n's value is a row operand of a linear layer, a perceptron or the gradient
// of either, so that its rows may be needed in float8.
func (c *compiler) wantsFloat8(n *gorgonia.Node) bool {
	if n == nil || !c.float8(n.Shape()[0], float8Pack, n.Shape()[1]) {
		return false
	}

	return slices.ContainsFunc(c.users[n], func(u *gorgonia.Node) bool {
		input := 0
		switch u.Op().(type) {
		case *op.LinearOp, *op.AdaptedLinearOp, *op.SiLUMLPOp:
		case *op.LinearInputGradOp:
		case *op.LinearGradOp:
			input = 2
		case *op.AdaptedLinearGradOp:
			input = 4
		case *op.SiLUMLPGradOp:
			input = 5
		default:
			return false
		}
		return graph.Children(u)[input] == n
	})
}

// float8Output returns memory where the op that computes a also writes its rows in float8. If wanted is
// false, it returns no memory.
func (c *compiler) float8Output(a *program.Array, wanted bool) program.Quantized {
	if !wanted {
		return program.Quantized{}
	}
	q := newQuantized(c.NewArray, a.Shape[0], a.Shape[1])
	c.Conversions[float8Of(a, false)] = q
	return q
}
