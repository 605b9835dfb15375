package cudaops

import (
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
)

// With [Float8] linear layers multiply float8: y = x·wᵀ and dx = g·w. Both operands of such a product lie along what is added up,
// and each of their rows has a factor of its own, by which the sums are multiplied: docs/lab/notes/quantize.md explains it. So weights are there
// twice, as they are and turned, and are made anew when they change; activations are made where they come about, or ahead of
// the first product that takes them. Everything else is as with [BFloat16].

const (
	// float8Rows is the fewest rows for which a product is of float8: with fewer it takes the time to read its weights, and
	// rounding the rows is a kernel more.
	float8Rows = 128
	// float8Pack is what the other sizes of a product are multiples of.
	float8Pack = 16
	// float8Blas is the first cuBLASLt that has a factor for each row, float8Capability the first GPU.
	float8Blas, float8Capability = 120900, 90
)

// quantized is a matrix in float8, and the float32 factor of each of its rows.
type quantized struct{ values, scales *array }

// quantizedKey is the matrix that a quantized one is made of, and whether its columns have become rows.
type quantizedKey struct {
	converted
	width, stride int
	turned        bool
}

// quantizedWeight is a matrix that is made of parameters and constants, its rows and, unless nobody needs them, its columns turned to
// rows. They are made again when one of the inputs changes.
type quantizedWeight struct {
	of           []*input
	array        *array
	rows, turned quantized
}

// checkFloat8 returns an error where the card or its library has no products of float8 with a factor for each row.
func (m *Machine) checkFloat8() error {
	blas, err := m.device.ctx.Blas()
	if err != nil {
		return err
	}
	info := m.device.info
	if info.Capability() >= float8Capability && blas.Version() >= float8Blas {
		const t = gpu.Float8E4M3
		plan, err := blas.Plan(gpu.MatmulSpec{M: float8Rows, N: float8Rows, K: float8Rows, TransB: true, A: t, B: t,
			D: m.activations().dtype(), Scaling: gpu.ScaledRows, FastAccumulation: true}, workspaceBytes, 1)
		if err == nil {
			return plan.Close()
		}
		if !errors.Is(err, gpu.BlasNotSupported) && !errors.Is(err, gpu.BlasInvalidValue) {
			return err
		}
	}
	return fmt.Errorf("WithPrecision(Float8): %w: it takes products of float8 with a factor for each row, which a GPU of compute capability "+
		"%d.%d and cuBLASLt 12.9 or later have; this is %s, of %d.%d, with cuBLASLt %d.%d: use BFloat16", ErrUnsupportedPrecision,
		float8Capability/10, float8Capability%10, info.Name, info.Major, info.Minor, blas.Version()/10000, blas.Version()/100%100)
}

// float8 reports whether a product with so many rows and columns, and sums of so many products, is one of float8. It is a rule of
// sizes, so that what is computed does not depend on what was timed.
func (c *compiler) float8(rows, columns, depth int) bool {
	return c.m.config.float8 && rows >= float8Rows && columns%float8Pack == 0 && depth%float8Pack == 0
}

// linearProduct adds y = x·wᵀ, and another matrix to it, if there is one.
func (c *compiler) linearProduct(n *gorgonia.Node, y, x, w, add *array) error {
	if !c.float8(x.shape[0], w.shape[0], w.shape[1]) {
		return c.matmul(n, product{d: y, a: x, b: w, transB: true}.plus(add))
	}
	return c.float8Product(n, y, c.quantize(n, x), c.quantizeWeight(n, w, false), add)
}

// linearProductGrad adds dx = g·w.
func (c *compiler) linearProductGrad(n *gorgonia.Node, dx, g, w *array) error {
	if !c.float8(g.shape[0], w.shape[1], w.shape[0]) {
		return c.matmul(n, product{d: dx, a: g, b: w})
	}
	return c.float8Product(n, dx, c.quantize(n, g), c.quantizeWeight(n, w, true), nil)
}

// float8Product adds d = a·bᵀ, and another matrix to it, if there is one.
func (c *compiler) float8Product(n *gorgonia.Node, d *array, a, b quantized, add *array) error {
	return c.matmul(n, float8Product(d, a, b).plus(add))
}

// float8Product is d = a·bᵀ.
func float8Product(d *array, a, b quantized) product {
	return product{d: d, a: a.values, b: b.values, transB: true, scaleA: a.scales, scaleB: b.scales}
}

// newQuantized returns memory in the arena for a matrix.
func (c *compiler) newQuantized(rows, columns int) quantized {
	return quantized{c.newArray(float8s, rows, columns), c.aux(rows)}
}

func keyOf(a *array, turned bool) quantizedKey {
	return quantizedKey{converted{a.block, a.at, a.len(), float8s}, a.shape[1], a.stride, turned}
}

// quantize returns the rows of x, which are made once.
func (c *compiler) quantize(n *gorgonia.Node, x *array) quantized {
	key := keyOf(x, false)
	if q, ok := c.quantized[key]; ok {
		return q
	}
	q, m := c.newQuantized(x.shape[0], x.shape[1]), c.m
	c.do(n, func() error { return m.k.Quantize(m.stream, quantizeRows(q, x)) }, q.values, q.scales, x)
	c.named("Quantize")
	c.quantized[key] = q
	return q
}

func quantizeRows(q quantized, x *array) kernels.Quantize {
	return kernels.Quantize{Y: q.values.ptr(), Scale: q.scales.ptr(), X: x.ptr(), Rows: x.shape[0], D: x.shape[1], XStride: x.stride,
		Type: x.elem.dtype()}
}

// quantizeWeight returns the rows of w, or its columns turned to rows. Of parameters and constants they are kept, and renewed with these.
func (c *compiler) quantizeWeight(n *gorgonia.Node, w *array, turned bool) quantized {
	key := keyOf(w, turned)
	if q, ok := c.quantized[key]; ok {
		return q
	}
	of, share := c.sources[w.block], c.m.config.share
	kept := len(of) > 0 && !slices.ContainsFunc(of, func(in *input) bool { return !in.constant || share.owns(in) })
	switch q, shared := share.quantizedWeight(key); {
	case shared:
		c.quantized[key] = q
	case kept:
		c.quantized[key] = c.keepWeight(w, of, turned)
	case turned:
		rows, d, m := w.shape[0], w.shape[1], c.m
		q, workspace := c.newQuantized(d, rows), c.bytes(m.k.QuantizeColumnsWorkspace(rows, d))
		c.do(n, func() error {
			return m.k.QuantizeColumns(m.stream, kernels.QuantizeColumns{Y: q.values.ptr(), Scale: q.scales.ptr(), X: w.ptr(),
				Workspace: workspace.ptr(), Rows: rows, D: d, Type: w.elem.dtype()})
		}, q.values, q.scales, w, workspace)
		c.named("QuantizeColumns")
		c.quantized[key] = q
	default:
		return c.quantize(n, w)
	}
	return c.quantized[key]
}

// keepWeight returns what is kept of w, which is made of some inputs.
func (c *compiler) keepWeight(w *array, of []*input, turned bool) quantized {
	resident := func(rows, columns int) quantized {
		return quantized{c.newResident(float8s, rows, columns), c.newResident(float32s, rows)}
	}
	i := slices.IndexFunc(c.weights, func(k *quantizedWeight) bool { return keyOf(k.array, false) == keyOf(w, false) })
	if i < 0 {
		i = len(c.weights)
		c.weights = append(c.weights, &quantizedWeight{of: of, array: w, rows: resident(w.shape[0], w.shape[1])})
	}
	k := c.weights[i]
	if !turned {
		return k.rows
	}
	if k.turned.values == nil {
		k.turned = resident(w.shape[1], w.shape[0])
	}
	return k.turned
}

// quantizedWeight returns what the machine keeps of a matrix, if it does.
func (m *Machine) quantizedWeight(key quantizedKey) (q quantized, ok bool) {
	if m == nil {
		return q, false
	}
	for _, w := range m.program.weights {
		if q = w.rows; key.turned {
			q = w.turned
		}
		if keyOf(w.array, key.turned) == key && q.values != nil {
			return q, true
		}
	}
	return q, false
}

// quantizeAgain makes the float8 of weights anew if some of the inputs are among those that they are made of, whose copies in other
// types are new already. It is one pass over all of them, which takes little more than one over a few.
func (m *Machine) quantizeAgain(changed func(*input) bool) error {
	if !slices.ContainsFunc(m.program.weights, func(w *quantizedWeight) bool { return slices.ContainsFunc(w.of, changed) }) {
		return nil
	}
	var all []kernels.QuantizeWeight
	for _, w := range m.program.weights {
		k := kernels.QuantizeWeight{X: w.array.ptr(), Rows: w.array.shape[0], D: w.array.shape[1]}
		k.Y, k.Scale = w.rows.pointers()
		k.Turned, k.TurnedScale = w.turned.pointers()
		all = append(all, k)
	}
	if b := m.blas; !slices.Equal(all, b.weights) { // at first, and when Bind has moved some
		if err := b.freeTable(); err != nil {
			return err
		}
		var err error
		if b.table, err = m.k.NewQuantizeTable(all); err != nil {
			return err
		}
		b.weights = all
	}
	return m.k.QuantizeWeights(m.stream, m.blas.table)
}

// freeTable lets go of the table of weights.
func (b *matmuls) freeTable() error {
	if b.table == nil {
		return nil
	}
	t := b.table
	b.table, b.weights = nil, nil
	return joined(b.m.device.ctx.SyncStream(b.m.stream), t.Free())
}

// multiplied reports whether a linear layer, a perceptron or the gradient of either multiplies the rows of n's value in float8.
func (c *compiler) multiplied(n *gorgonia.Node) bool {
	if n == nil || !c.m.config.float8 {
		return false
	}
	return slices.ContainsFunc(c.users[n], func(u *gorgonia.Node) bool {
		in := opbase.Children(u)
		switch u.Op().(type) {
		case *op.LinearOp:
			w := in[1].Shape()
			return in[0] == n && c.float8(n.Shape()[0], w[0], w[1])
		case *op.LinearGradOp:
			w := in[1].Shape()
			return in[2] == n && c.float8(n.Shape()[0], w[1], w[0])
		case *op.SiLUMLPOp:
			gate := in[1].Shape()
			return in[0] == n && c.float8(n.Shape()[0], 2*gate[0], gate[1])
		case *op.SiLUMLPGradOp:
			down := in[3].Shape()
			return in[5] == n && c.float8(n.Shape()[0], down[1], down[0])
		}
		return false
	})
}

// quantizing returns memory for a's rows in float8, which the op that makes a writes too, if a product wants them; else none.
func (c *compiler) quantizing(a *array, wanted bool) quantized {
	if !wanted {
		return quantized{}
	}
	q := c.newQuantized(a.shape[0], a.shape[1])
	c.quantized[keyOf(a, false)] = q
	return q
}

// pointers returns the addresses of values and scales, null for those that have no memory.
func (q quantized) pointers() (values, scales gpu.Ptr) {
	if q.values == nil {
		return 0, 0
	}
	return q.values.ptr(), q.scales.ptr()
}
