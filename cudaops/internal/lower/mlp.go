package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/decode"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/silu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/op"
)

// gated is what SiLUMLP's forward pass leaves. It has x·gateᵀ and x·upᵀ side by side in the rows of
// ab [rows, 2F]. The weights of both are one above the other [2F, D]. It also has h = silu(x·gateᵀ)
// ⊙ x·upᵀ. This is nil in float8, and need not be kept: the backward pass can form it. With gelu
// the gate is that of GELUMLP, which no product takes in.
type gated struct {
	ab, weights, h *program.Array
	gelu           bool
}

func lowerSiLUMLP(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x, down := c.acts(n, in[0], in[3])
	rows, f := x.Shape[0], in[1].Shape[0]
	s := gated{ab: c.NewArray(x.Type, rows, 2*f), weights: c.stack(n, in[1], in[2]),
		gelu: n.Op().(*op.SiLUMLPOp).GELU}
	y, h := c.like(x), c.NewArray(x.Type, rows, f)
	if c.float8(rows, 2*f, x.Shape[1]) {
		c.linearProduct(n, s.ab, x, s.weights, nil)
		q, out := c.quantizing(h, c.float8(rows, down.Shape[0], f)), h
		if q.Values != nil && !s.gelu {
			out = nil // nobody needs h but in float8
		}
		c.Add(c.siluMul(n, s, out, q))
	} else {
		s.h = h
		c.gate(n, s, x)
	}
	c.saved[n.Op()] = s
	_, add := c.addend(n, y)
	c.linearProduct(n, y, h, down, add)
	return y
}

// siluMul is the call that forms h, or its float8.
func (c *compiler) siluMul(n *gorgonia.Node, s gated, h *program.Array,
	q program.Quantized) *program.Call {
	return c.newCall(n, silu.Mul{Rows: s.ab.Shape[0], F: s.ab.Shape[1] / 2, GELU: s.gelu,
		Type: s.ab.Type}, program.Writes("H", h), program.Reads("AB", s.ab),
		program.Writes("H8", q.Values), program.Writes("Scale8", q.Scales))
}

// gate adds what forms s.ab and s.h, of one row h alone unless there is a gradient.
func (c *compiler) gate(n *gorgonia.Node, s gated, x *program.Array) {
	if x.Shape[0] == 1 && len(c.gradients[n.Op()]) == 0 {
		call := c.call(n, decode.Gated{F: s.h.Shape[1], D: x.Shape[1], GELU: s.gelu, Type: x.Type,
			Steady: s.weights.Resident && len(c.Calls) > 0},
			program.Writes("H", s.h), program.Reads("X", x), program.Reads("W", s.weights))
		call.FLOPs = 2 * float64(s.weights.Len())
		return
	}
	p := program.Product{D: s.ab, A: x, B: s.weights, TransB: true}
	several := []*program.Call{c.newProduct(n, p), c.siluMul(n, s, s.h, program.Quantized{})}
	if s.gelu {
		c.Calls = append(c.Calls, several...)
		return
	}
	one := gemm.SiLUProduct{Rows: s.h.Shape[0], F: s.h.Shape[1], D: x.Shape[1], Type: x.Type}
	c.either(n, several, one, program.Writes("H", s.h), program.Writes("AB", s.ab),
		program.Reads("X", x), program.Reads("Weights", s.weights))
}

func lowerSiLUMLPGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x, g := c.acts(n, in[0], in[5])
	down := c.act(n, in[3])
	s := c.saved[n.Op().(*op.SiLUMLPGradOp).Forward].(gated)
	f, d := in[1].Shape[0], x.Shape[1]
	dab := c.like(s.ab)
	h := c.gateGrad(n, s, dab, g, down)
	gate, up, rest := c.partOf(n, x.Len()), c.partOf(n, x.Len()+f*d), c.partOf(n, x.Len()+2*f*d)
	dx, dweights := c.like(x), c.weightGradient([]int{2 * f, d}, gate, up)
	ddown := c.weightGradient([]int{d, f}, rest)
	c.matmul(n, program.Product{D: ddown, A: g, B: h, TransA: true})
	c.matmul(n, program.Product{D: dweights, A: dab, B: x, TransA: true})
	c.linearProductGrad(n, dx, dab, s.weights, nil)
	return packed(dx, dweights.View(0, f, d), c.aligned(n, dweights.View(f*d, f, d)), ddown)
}

// siluMulGrad is the call that forms dab, and h again.
func (c *compiler) siluMulGrad(n *gorgonia.Node, s gated, h, dab, dh *program.Array,
	q program.Quantized) *program.Call {
	return c.newCall(n, silu.MulBackward{Rows: h.Shape[0], F: h.Shape[1], GELU: s.gelu,
		Type: s.ab.Type}, program.Writes("H", h), program.Writes("DAB", dab),
		program.Reads("DH", dh), program.Reads("AB", s.ab),
		program.Writes("DAB8", q.Values), program.Writes("Scale8", q.Scales))
}

// gateGrad adds what forms dh = g·down and from it the gradients dab, and returns h, which is
// formed again. Where memory may be spent, and one kernel does all of it, it is that of the forward
// pass.
func (c *compiler) gateGrad(n *gorgonia.Node, s gated, dab, g, down *program.Array) *program.Array {
	rows, d, f, t := g.Shape[0], g.Shape[1], s.ab.Shape[1]/2, g.Type
	h, dh := c.NewArray(t, rows, f), c.NewArray(t, rows, f)
	if c.float8(rows, f, d) {
		c.linearProductGrad(n, dh, g, down, nil)
		q := c.quantizing(dab, c.float8(rows, d, 2*f))
		c.Add(c.siluMulGrad(n, s, h, dab, dh, q))
		return h
	}
	p := program.Product{D: dh, A: g, B: down}
	several := []*program.Call{c.newProduct(n, p),
		c.siluMulGrad(n, s, h, dab, dh, program.Quantized{})}
	if s.gelu {
		c.Calls = append(c.Calls, several...)
		return h
	}
	keeps := s.h != nil && c.Spent+s.h.Extent() <= c.o.Room
	args := []program.Arg{program.Writes("DAB", dab), program.Reads("AB", s.ab),
		program.Reads("G", g),
		program.Reads("Down", down)}
	if !keeps {
		args = append(args, program.Writes("H", h))
	}
	one := gemm.SiLUProductBackward{Rows: rows, F: f, D: d, Type: t, KeepsH: keeps}
	if c.either(n, several, one, args...) && keeps {
		h = s.h
		c.Spent += h.Extent()
	}
	return h
}
