package cudaops

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/op"
)

// gated is what SiLUMLP's forward pass leaves: x·gateᵀ and x·upᵀ side by side in the rows of ab [rows, 2F], the weights of both, one
// above the other [2F, D], and h = silu(x·gateᵀ) ⊙ x·upᵀ, which is nil in float8 and need not be kept: the backward pass can form it.
type gated struct{ ab, weights, h *array }

func lowerSiLUMLP(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	return c.perceptron(n, in, nil)
}

// perceptron adds a gated perceptron, to whose result it adds another matrix, if there is one.
func (c *compiler) perceptron(n *gorgonia.Node, in []*array, add *array) (*array, error) {
	x, down := c.lowerPair(n, in[0], in[3])
	rows, f := x.shape[0], in[1].shape[0]
	s := gated{ab: c.newArray(x.elem, rows, 2*f), weights: c.stack(n, in[1], in[2])}
	y := c.like(x)
	if c.float8(rows, 2*f, x.shape[1]) {
		c.saved[n.Op()] = s
		return y, c.perceptronFloat8(n, s, y, x, down, add)
	}
	s.h = c.newArray(x.elem, rows, f)
	c.saved[n.Op()] = s
	if err := c.gate(n, s, x); err != nil {
		return nil, err
	}
	return y, c.matmul(n, product{d: y, a: s.h, b: down, transB: true}.plus(add))
}

// perceptronFloat8 is the rest of perceptron where the product with gate and up is of float8. If that with down is too, nobody
// needs h but in float8.
func (c *compiler) perceptronFloat8(n *gorgonia.Node, s gated, y, x, down, add *array) error {
	if err := c.linearProduct(n, s.ab, x, s.weights, nil); err != nil {
		return err
	}
	rows, f, t, m := x.shape[0], down.shape[1], x.elem.dtype(), c.m
	var h *array
	var q quantized
	if c.float8(rows, down.shape[0], f) {
		q = c.newQuantized(rows, f)
	} else {
		h = c.newArray(x.elem, rows, f)
	}
	c.do(n, func() error {
		a := kernels.SiLUMul{A: s.ab.ptr(), B: s.ab.ptr().Offset(f * t.Size()), Rows: rows, F: f, Stride: 2 * f, Type: t}
		if a.H8, a.Scale8 = q.pointers(); h != nil {
			a.H = h.ptr()
		}
		return m.k.SiLUMul(m.stream, a)
	}, h, s.ab, q.values, q.scales)
	if h == nil {
		return c.float8Product(n, y, q, c.quantizeWeight(n, down, false), add)
	}
	return c.matmul(n, product{d: y, a: h, b: down, transB: true}.plus(add))
}

// gate adds what forms s.ab and s.h.
func (c *compiler) gate(n *gorgonia.Node, s gated, x *array) error {
	h, d, t, m := s.h, x.shape[1], x.elem.dtype(), c.m
	rows, f := h.shape[0], h.shape[1]
	mul := func(h, ab gpu.Ptr) error {
		return m.k.SiLUMul(m.stream, kernels.SiLUMul{H: h, A: ab, B: ab.Offset(f * t.Size()), Rows: rows, F: f, Stride: 2 * f, Type: t})
	}
	w := productWays{product: product{d: s.ab, a: x, b: s.weights, transB: true}, op: "SiLUProduct",
		shape: fmt.Sprintf("%dx%dx%d %v", rows, f, d, t), units: []string{"gemm_hopper", "silu"},
		fused: m.k.SiLUProductWays(rows, f, d, t), arrays: []*array{h, s.ab, x, s.weights},
		arguments: []argument{numbers(writes, h.len(), t), numbers(writes, s.ab.len(), t), numbers(reads, x.len(), t),
			numbers(reads, s.weights.len(), t)}}
	w.run = func(way kernels.Way, a []gpu.Ptr) error {
		return m.k.SiLUProduct(m.stream, kernels.SiLUProduct{H: a[0], AB: a[1], X: a[2], Weights: a[3], Rows: rows, F: f, D: d, Type: t, Way: way})
	}
	w.separate = func(product matmulRun, a []gpu.Ptr) error {
		return first(product(a[1], a[2], a[3]), func() error { return mul(a[0], a[1]) })
	}
	return c.productThen(n, w, func() { c.do(n, func() error { return mul(h.ptr(), s.ab.ptr()) }, s.ab, h) })
}

func lowerSiLUMLPGrad(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	x, g := c.lowerPair(n, in[0], in[5])
	down := c.act(n, in[3])
	s := c.saved[n.Op().(*op.SiLUMLPGradOp).Forward].(gated)
	f, d := in[1].shape[0], x.shape[1]
	dab := c.like(s.ab)
	h, err := c.gateGrad(n, s, dab, g, down)
	if err != nil {
		return nil, err
	}
	gate, up, rest := c.partOf(n, x.len()), c.partOf(n, x.len()+f*d), c.partOf(n, x.len()+2*f*d)
	dx, dweights, ddown := c.like(x), c.weightGradient(tensor.Shape{2 * f, d}, gate, up), c.weightGradient(tensor.Shape{d, f}, rest)
	for _, p := range []product{{d: ddown, a: g, b: h, transA: true}, {d: dweights, a: dab, b: x, transA: true}} {
		if err := c.matmul(n, p); err != nil {
			return nil, err
		}
	}
	if err := c.linearProductGrad(n, dx, dab, s.weights); err != nil {
		return nil, err
	}
	return packed(dx, dweights.view(0, f, d), c.aligned(n, dweights.view(f*d, f, d)), ddown), nil
}

// gateGrad adds what forms dh = g·down and from it the gradients dab, and returns h: formed again, or where memory may be spent, and one
// kernel does all of it, that of the forward pass.
func (c *compiler) gateGrad(n *gorgonia.Node, s gated, dab, g, down *array) (*array, error) {
	rows, d, f, t, m := g.shape[0], g.shape[1], s.ab.shape[1]/2, g.elem.dtype(), c.m
	var q quantized
	mul := func(h, dab, ab, dh gpu.Ptr) error {
		a := kernels.SiLUMulBackward{H: h, DA: dab, DB: dab.Offset(f * t.Size()), DH: dh,
			A: ab, B: ab.Offset(f * t.Size()), Rows: rows, F: f, Stride: 2 * f, GradStride: 2 * f, Type: t}
		a.DAB8, a.Scale8 = q.pointers()
		return m.k.SiLUMulBackward(m.stream, a)
	}
	h, dh := c.newArray(g.elem, rows, f), c.newArray(g.elem, rows, f)
	separate := false
	after := func() {
		separate = true
		c.do(n, func() error { return mul(h.ptr(), dab.ptr(), s.ab.ptr(), dh.ptr()) }, h, dab, dh, s.ab, q.values, q.scales)
	}
	if c.float8(rows, f, d) {
		if err := c.linearProductGrad(n, dh, g, down); err != nil {
			return nil, err
		}
		q = c.quantizing(dab, c.float8(rows, d, 2*f))
		after()
		return h, nil
	}
	keeps := c.roomy && s.h != nil
	formed := numbers(writes, h.len(), t)
	if keeps {
		formed.role = scratch
	}
	w := productWays{product: product{d: dh, a: g, b: down}, op: "SiLUProductBackward",
		shape: fmt.Sprintf("%dx%dx%d %v", rows, f, d, t) + plural(keeps, "without h"), units: []string{"gemm_hopper", "silu"},
		fused: m.k.SiLUProductWays(rows, f, d, t), arrays: []*array{dab, s.ab, g, down},
		arguments: []argument{numbers(writes, dab.len(), t), numbers(reads, s.ab.len(), t), numbers(reads, g.len(), t),
			numbers(reads, down.len(), t), formed, {role: scratch, bytes: dh.extent()}}}
	if !keeps {
		w.arrays = append(w.arrays, h)
	}
	w.run = func(way kernels.Way, a []gpu.Ptr) error {
		p := kernels.SiLUProductBackward{DAB: a[0], AB: a[1], G: a[2], Down: a[3], Rows: rows, F: f, D: d, Type: t, Way: way}
		if !keeps {
			p.H = a[4]
		}
		return m.k.SiLUProductBackward(m.stream, p)
	}
	w.separate = func(product matmulRun, a []gpu.Ptr) error {
		return first(product(a[5], a[2], a[3]), func() error { return mul(a[4], a[0], a[1], a[5]) })
	}
	if err := c.productThen(n, w, after); err != nil {
		return nil, err
	}
	if keeps && !separate {
		c.spent, h = true, s.h
	}
	return h, nil
}
