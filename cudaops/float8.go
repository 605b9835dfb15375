package cudaops

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
)

// With [Float8] linear layers multiply float8: y = x·wᵀ and dx = g·w. Both operands of such a product lie along what is added up,
// and each of their rows has a factor of its own, by which the sums are multiplied: KERNELS.md explains it. So weights are there
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

// quantizedWeight is made of parameters and constants, and made again when one of them changes.
type quantizedWeight struct {
	quantizedKey
	quantized
	of    []*input
	renew func() error
}

// checkFloat8 returns an error where the card or its library has no products of float8 with a factor for each row.
func (m *Machine) checkFloat8() error {
	blas, err := m.device.ctx.Blas()
	if err != nil {
		return err
	}
	info := m.device.info
	if info.Capability() >= float8Capability && blas.Version() >= float8Blas {
		const t = driver.Float8E4M3
		var plan driver.MatmulPlan
		plan, err = blas.Plan(driver.MatmulSpec{M: float8Rows, N: float8Rows, K: float8Rows, TransB: true, A: t, B: t,
			D: m.activations().dtype(), Scaling: driver.ScaledRows, FastAccumulation: true}, workspaceBytes, 1)
		if err == nil {
			return plan.Close()
		}
	}
	why := fmt.Errorf("WithPrecision(Float8) needs products of float8 with a factor for each row, which a GPU of compute capability %d.%d "+
		"and cuBLASLt 12.9 or later have; this is %s, of %d.%d, with cuBLASLt %d.%d: use BFloat16", float8Capability/10, float8Capability%10,
		info.Name, info.Major, info.Minor, blas.Version()/10000, blas.Version()/100%100)
	if info.Capability() < float8Capability {
		why = fmt.Errorf("%w: %w", ErrUnsupportedDevice, why)
	}
	if err != nil {
		return fmt.Errorf("%w (%w)", why, err)
	}
	return why
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
	return c.matmul(n, product{d: d, a: a.values, b: b.values, transB: true, scaleA: a.scales, scaleB: b.scales}.plus(add))
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
	if shared := c.m.config.share.quantizedWeight(key); shared != nil {
		c.quantized[key] = shared.quantized
		return shared.quantized
	}
	of := c.sources[w.block]
	kept := len(of) > 0 && !slices.ContainsFunc(of, func(in *input) bool { return !in.constant || c.m.config.share.owns(in) })
	if !kept && !turned {
		return c.quantize(n, w)
	}
	rows, d, m := w.shape[0], w.shape[1], c.m
	q := c.newQuantized(rows, d)
	if turned {
		q = c.newQuantized(d, rows)
	}
	if kept {
		q = quantized{c.newResident(float8s, q.values.shape...), c.newResident(float32s, q.scales.shape...)}
	}
	c.quantized[key] = q
	renew := func() error { return m.k.Quantize(m.stream, quantizeRows(q, w)) }
	if turned {
		workspace := c.columnsWorkspace(m.k.QuantizeColumnsWorkspace(rows, d), kept)
		renew = func() error {
			return m.k.QuantizeColumns(m.stream, kernels.QuantizeColumns{Y: q.values.ptr(), Scale: q.scales.ptr(), X: w.ptr(),
				Workspace: workspace.ptr(), Rows: rows, D: d, Type: w.elem.dtype()})
		}
		if !kept {
			c.do(n, renew, q.values, q.scales, w, workspace)
			c.named("QuantizeColumns")
		}
	}
	if kept {
		c.weights = append(c.weights, &quantizedWeight{key, q, of, renew})
	}
	return q
}

// columnsWorkspace returns workspace of so many bytes. What is made outside of runs, one after the other, has the same.
func (c *compiler) columnsWorkspace(bytes int, kept bool) *array {
	if !kept {
		return c.bytes(bytes)
	}
	if c.workspace == nil {
		c.workspace = c.newResident(float32s, 1)
	}
	c.workspace.Bytes = max(c.workspace.Bytes, bytes)
	return c.workspace
}

// quantizedWeight returns what the machine keeps of a matrix, nil if it keeps none.
func (m *Machine) quantizedWeight(key quantizedKey) *quantizedWeight {
	if m == nil {
		return nil
	}
	i := slices.IndexFunc(m.program.weights, func(w *quantizedWeight) bool { return w.quantizedKey == key })
	if i < 0 {
		return nil
	}
	return m.program.weights[i]
}

// quantizeAgain makes anew what is made of some of the inputs, whose copies in other types are new already.
func (m *Machine) quantizeAgain(changed func(*input) bool) error {
	for _, w := range m.program.weights {
		if slices.ContainsFunc(w.of, changed) {
			if err := w.renew(); err != nil {
				return err
			}
		}
	}
	return nil
}

// multiplied reports whether a linear layer or its gradient takes the rows of n's value, or of its gradient, in float8.
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

// quantizing returns where the op that makes a puts a's rows in float8 too, if a product takes them; otherwise it has no memory.
func (c *compiler) quantizing(a *array, wanted bool) quantized {
	if !wanted {
		return quantized{}
	}
	q := c.newQuantized(a.shape[0], a.shape[1])
	c.quantized[keyOf(a, false)] = q
	return q
}

// pointers returns the addresses of values and scales, null for those that have no memory.
func (q quantized) pointers() (values, scales driver.Ptr) {
	if q.values == nil {
		return 0, 0
	}
	return q.values.ptr(), q.scales.ptr()
}
