package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/decode"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/layout"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/silu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/op"
)

func init() {
	register[*op.SiLUMLPOp](lowerSiLUMLP, nil)
	register[*op.SiLUMLPGradOp](lowerSiLUMLPGrad, linearIn(5))
	register[*op.SiLUMulOp](lowerSiLUMul, nil)
	register[*op.SiLUMulGradOp](lowerSiLUMulGrad, linearIn(2))
}

// mlpState holds data saved by SiLUMLP's forward pass: x·gateᵀ and x·upᵀ concatenated in the rows of ab
// [rows, 2F], the stacked weights of both [2F, D], and h = silu(x·gateᵀ) ⊙ x·upᵀ.
//
// h is nil in float8. The backward pass can recompute it, so its memory need not be reserved until
// then. If gelu is set, the op is GELUMLP, which has no fused kernels.
type mlpState struct {
	ab, weights, h *program.Array
	gelu           bool
}

func lowerSiLUMLP(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x, down := c.asActivations(n, in[0], in[3])
	rows, f := x.Shape[0], in[1].Shape[0]
	s := mlpState{ab: c.NewArray(x.Type, rows, 2*f), weights: c.stack(n, in[1], in[2]),
		gelu: n.Op().(*op.SiLUMLPOp).GELU}
	y, h := c.Like(x), c.NewArray(x.Type, rows, f)
	c.gate(n, s, h, x, down.Shape[0])
	if !c.float8(rows, 2*f, x.Shape[1]) {
		s.h = h
	}

	c.saved[n.Op()] = s
	_, add := c.addend(n, y)
	c.linear(n, y, h, down, add)
	return y
}

// gate adds calls that compute h and s.ab. For a single row without a gradient, they compute only h. The
// next product multiplies h by a matrix with the given number of columns.
func (c *compiler) gate(n *gorgonia.Node, s mlpState, h, x *program.Array, columns int) {
	rows, f := h.Shape[0], h.Shape[1]
	if rows == 1 && len(c.gradients[n.Op()]) == 0 {
		a := decode.Gated{F: f, D: x.Shape[1], GELU: s.gelu, Type: x.Type}
		a.Steady = s.weights.Resident && len(c.Calls) > 0
		addCall(c, n, &a, program.Writes(&a.H, h), program.Reads(&a.X, x),
			program.Reads(&a.W, s.weights)).FLOPs = 2 * float64(s.weights.Len())
		return
	}

	p := c.weighted(n, s.ab, x, s.weights, false)
	float8, out := p.ScaleA != nil, h
	q := c.float8Output(h, float8 && c.float8(rows, columns, f))
	if q.Values != nil && !s.gelu {
		out = nil // h is needed only in float8
	}

	m := silu.Mul{Rows: rows, F: f, GELU: s.gelu, Type: x.Type}
	several := []*program.Call{c.newProduct(n, p), newCall(c, n, &m, program.Writes(&m.H, out),
		program.Reads(&m.AB, s.ab), program.Writes(&m.H8, q.Values),
		program.Writes(&m.Scale8, q.Scales))}
	one := gemm.SiLUProduct{Gate: gemm.Gate{Rows: rows, F: f, D: x.Shape[1], Type: x.Type}}
	c.addProduct(several, !s.gelu && !float8, newCall(c, n, &one, program.Writes(&one.H, h),
		program.Writes(&one.AB, s.ab), program.Reads(&one.X, x),
		program.Reads(&one.Weights, s.weights)))
}

func lowerSiLUMLPGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x, g := c.asActivations(n, in[0], in[5])
	down := c.asActivation(n, in[3])
	s := c.saved[n.Op().(*op.SiLUMLPGradOp).Forward].(mlpState)
	f, d := in[1].Shape[0], x.Shape[1]
	dab := c.Like(s.ab)
	h := c.gateGrad(n, s, dab, g, down)
	gate, up, rest := c.partOf(n, x.Len()), c.partOf(n, x.Len()+f*d), c.partOf(n, x.Len()+2*f*d)
	dx, dweights := c.Like(x), c.weightGradient([]int{2 * f, d}, gate, up)
	ddown := c.weightGradient([]int{d, f}, rest)
	c.matmul(n, program.Product{D: ddown, A: g, B: h, TransA: true})
	c.matmul(n, program.Product{D: dweights, A: dab, B: x, TransA: true})
	c.matmul(n, c.weighted(n, dx, dab, s.weights, true))
	return packed(dx, dweights.View(0, f, d), c.aligned(n, dweights.View(f*d, f, d)), ddown)
}

// gateGrad adds calls that compute dh = g·down and, from dh, the gradients dab. It returns h, which is
// recomputed unless a fused kernel is chosen and there is room to keep the forward pass's h.
func (c *compiler) gateGrad(n *gorgonia.Node, s mlpState, dab, g, down *program.Array) *program.Array {
	rows, d, f, t := g.Shape[0], g.Shape[1], s.ab.Shape[1]/2, g.Type
	h, dh := c.NewArray(t, rows, f), c.NewArray(t, rows, f)
	p := c.weighted(n, dh, g, down, true)
	float8 := p.ScaleA != nil
	q := c.float8Output(dab, float8 && c.float8(rows, d, 2*f))
	m := silu.MulBackward{Rows: rows, F: f, GELU: s.gelu, Type: t}
	several := []*program.Call{c.newProduct(n, p), newCall(c, n, &m, program.Writes(&m.H, h),
		program.Writes(&m.DAB, dab), program.Reads(&m.DH, dh), program.Reads(&m.AB, s.ab),
		program.Writes(&m.DAB8, q.Values), program.Writes(&m.Scale8, q.Scales))}

	keepH := s.h != nil && c.Spent+s.h.Extent() <= c.o.Room
	one := gemm.SiLUProductBackward{Gate: gemm.Gate{Rows: rows, F: f, D: d, Type: t}}
	args := []program.Arg{program.Writes(&one.DAB, dab), program.Reads(&one.AB, s.ab),
		program.Reads(&one.G, g), program.Reads(&one.Down, down)}
	if !keepH {
		args = append(args, program.Writes(&one.H, h))
	}

	if c.addProduct(several, !s.gelu && !float8, newCall(c, n, &one, args...)) && keepH {
		h = s.h
		c.Spent += h.Extent()
	}

	return h
}

// lowerSiLUMul lowers silu(a) ⊙ b. The kernel reads a and b side by side, so both are copied first.
func lowerSiLUMul(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	a, b := c.asActivations(n, in[0], in[1])
	rows, f := a.Shape[0], a.Shape[1]
	ab, h := c.NewArray(a.Type, rows, 2*f), c.Like(a)
	c.columns(n, ab, a, 0)
	c.columns(n, ab, b, f)

	m := silu.Mul{Rows: rows, F: f, GELU: n.Op().(*op.SiLUMulOp).GELU, Type: a.Type}
	addCall(c, n, &m, program.Writes(&m.H, h), program.Reads(&m.AB, ab))
	c.saved[n.Op()] = ab
	return h
}

func lowerSiLUMulGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	forward, g := n.Op().(*op.SiLUMulGradOp).Forward, c.asActivation(n, in[2])
	rows, f := g.Shape[0], g.Shape[1]
	s, fused := c.saved[forward].(*gateState)
	if fused {
		s.dab = c.Like(s.ab)
		m := silu.MulBackward{Rows: rows, F: f, GELU: forward.GELU, Type: g.Type}
		addCall(c, n, &m, program.Writes(&m.H, c.Like(g)), program.Writes(&m.DAB, s.dab),
			program.Reads(&m.DH, g), program.Reads(&m.AB, s.ab))
		return packed(s.dab.Columns(0, f), s.dab.Columns(f, f))
	}

	ab := c.saved[forward].(*program.Array)
	h, dab, da, db := c.Like(g), c.Like(ab), c.Like(g), c.Like(g)

	m := silu.MulBackward{Rows: rows, F: f, GELU: forward.GELU, Type: g.Type}
	addCall(c, n, &m, program.Writes(&m.H, h), program.Writes(&m.DAB, dab), program.Reads(&m.DH, g),
		program.Reads(&m.AB, ab))
	c.columns(n, da, dab, 0)
	c.columns(n, db, dab, f)
	return packed(da, db)
}

// columns copies x to y. One matrix is narrower than the other, and all its columns are copied to or from
// the columns of the wider matrix that start at from.
func (c *compiler) columns(n *gorgonia.Node, y, x *program.Array, from int) {
	width := min(y.Shape[1], x.Shape[1])
	l := layout.Copy{Dims: []int{y.Shape[0], width}, YStrides: []int{y.Shape[1], 1},
		XStrides: []int{x.Shape[1], 1}, Size: y.Type.Size()}
	if y.Shape[1] > width {
		y = y.View(from, y.Len()-from)
	} else {
		x = x.View(from, x.Len()-from)
	}
	addCall(c, n, &l, program.Writes(&l.Y, y), program.Reads(&l.X, x))
}
