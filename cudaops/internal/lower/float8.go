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

// With [Float8] linear layers multiply float8: y = x·wᵀ and dx = g·w. Both operands of such a
// product lie along what is added up. Each of their rows has a factor of its own, by which the sums
// are multiplied: quantize/NOTES.md explains it. So weights are there twice, as they are and
// turned, and are made anew when they change. Activations are made where they come about, or ahead
// of the first product that takes them. Everything else is as with [BFloat16].

const (
	// float8Rows is the fewest rows for which a product is of float8. With fewer it takes the time
	// to read its weights, and rounding the rows is a kernel more.
	float8Rows = 128
	// float8Pack is what the other sizes of a product are multiples of.
	float8Pack = 16
)

// float8 reports whether a product with so many rows and columns, and sums of so many products, is
// one of float8. It is a rule of sizes, so that what is computed does not depend on what was timed.
func (c *compiler) float8(rows, columns, depth int) bool {
	return c.o.Float8 && rows >= float8Rows && columns%float8Pack == 0 && depth%float8Pack == 0
}

// weighted is the product y = x·wᵀ of a linear layer or, for its gradient, y = x·w.
func (c *compiler) weighted(n *gorgonia.Node, y, x, w *program.Array, grad bool) program.Product {
	if !c.float8(x.Shape[0], w.Shape[0], w.Shape[1]) {
		return program.Product{D: y, A: x, B: w, TransB: !grad}
	}
	a, b := c.quantize(n, x, false), c.quantize(n, w, grad)
	return program.Product{D: y, A: a.Values, B: b.Values, TransB: true,
		ScaleA: a.Scales, ScaleB: b.Scales}
}

// newQuantized returns memory for a matrix.
func newQuantized(place func(gpu.DType, ...int) *program.Array, rows,
	columns int) program.Quantized {
	return program.Quantized{Values: place(gpu.Float8E4M3, rows, columns),
		Scales: place(gpu.Float32, rows)}
}

// float8Of is float8 of the rows of x, or of its columns turned to rows.
func float8Of(x *program.Array, turned bool) program.Making {
	m := program.NewMaking(gpu.Float8E4M3, x)
	m.Width, m.Stride, m.Turned = x.Shape[1], x.Stride, turned
	return m
}

// quantize returns the rows of x, or its columns turned to rows. They are made once. Of parameters
// and constants they are kept, and renewed with these.
func (c *compiler) quantize(n *gorgonia.Node, x *program.Array, turned bool) program.Quantized {
	key := float8Of(x, turned)
	if q, ok := c.Made[key]; ok {
		return q
	}

	rows, d := x.Shape[0], x.Shape[1]
	var q program.Quantized
	switch of := c.sources[x.Buffer]; {
	case of != nil:
		q = c.keepWeight(x, of, turned)
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

	c.Made[key] = q
	return q
}

// keepWeight returns what is kept of w, which is made of some inputs.
func (c *compiler) keepWeight(w *program.Array, of []*program.Input,
	turned bool) program.Quantized {
	i := slices.IndexFunc(c.Weights, func(k *program.QuantizedWeight) bool {
		return float8Of(k.Array, false) == float8Of(w, false)
	})
	if i < 0 {
		i = len(c.Weights)
		c.Weights = append(c.Weights, &program.QuantizedWeight{Of: of, Array: w,
			Rows: newQuantized(c.NewResident, w.Shape[0], w.Shape[1])})
	}

	k := c.Weights[i]
	if !turned {
		return k.Rows
	}

	k.Turned = newQuantized(c.NewResident, w.Shape[1], w.Shape[0])
	return k.Turned
}

// multiplied reports whether a linear layer, a perceptron or the gradient of either multiplies the
// rows of n's value, which may be float8.
func (c *compiler) multiplied(n *gorgonia.Node) bool {
	if n == nil || !c.float8(n.Shape()[0], float8Pack, n.Shape()[1]) {
		return false
	}

	return slices.ContainsFunc(c.users[n], func(u *gorgonia.Node) bool {
		input := 0
		switch u.Op().(type) {
		case *op.LinearOp, *op.SiLUMLPOp:
		case *op.LinearGradOp:
			input = 2
		case *op.SiLUMLPGradOp:
			input = 5
		default:
			return false
		}
		return graph.Children(u)[input] == n
	})
}

// quantizing returns memory for a's rows in float8, which the op that makes a writes too, if a
// product wants them; else none.
func (c *compiler) quantizing(a *program.Array, wanted bool) program.Quantized {
	if !wanted {
		return program.Quantized{}
	}
	q := newQuantized(c.NewArray, a.Shape[0], a.Shape[1])
	c.Made[float8Of(a, false)] = q
	return q
}
