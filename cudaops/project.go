package cudaops

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
)

// The queries, keys and values of an attention are mostly x·Wqᵀ, x·Wkᵀ and x·Wvᵀ, the first two turned by RoPE. They are
// lowered as
//
//	[q | k | v] = x·[Wq; Wk; Wv]ᵀ,  d[Wq; Wk; Wv] = [dq | dk | dv]ᵀ·x,  dx = [dq | dk | dv]·[Wq; Wk; Wv]
//
// one product each in place of three and two sums. Attention and RoPE read and write columns of the wide matrices, RoPE in
// place or, where that is faster, the product in its stead; attention's gradient turns dq and dk back itself.

// projections is such queries, keys and values.
type projections struct {
	x      *gorgonia.Node
	linear [3]*gorgonia.Node
	turned [2]*gorgonia.Node // queries and keys; nil where nothing turns them
}

// projections returns how the first three inputs of an attention, or of its gradient, come about, nil if not like this.
// Nobody but the attention and its gradient may use them, as no other op knows matrices whose rows have gaps.
func (c *compiler) projections(n *gorgonia.Node, o *op.AttentionOp) *projections {
	p := &projections{}
	byAttention := func(u *gorgonia.Node) bool { return isOp[*op.AttentionOp](u) || isOp[*op.AttentionGradOp](u) }
	for i, n := range opbase.Children(n)[:3] {
		if !c.onlyUsedBy(n, byAttention) {
			return nil
		}
		if r, ok := n.Op().(*op.RoPEOp); ok && i < 2 && !r.Inverse && r.Config.Seq == o.Config.Seq && r.Config.HeadDim == o.Config.HeadDim {
			p.turned[i] = n
			turned := n
			n = opbase.Children(n)[0]
			if !c.onlyUsedBy(n, func(u *gorgonia.Node) bool { return u == turned }) {
				return nil
			}
		}
		if !isOp[*op.LinearOp](n) || slices.Contains(p.linear[:i], n) || i > 0 && opbase.Children(n)[0] != p.x {
			return nil
		}
		p.x, p.linear[i] = opbase.Children(n)[0], n
	}
	if !sameRotation(p.turned[0], p.turned[1]) {
		return nil
	}
	return p
}

func isOp[T any](n *gorgonia.Node) bool {
	_, ok := n.Op().(T)
	return ok
}

// sameRotation reports whether two nodes turn by the same angles, or both are nil.
func sameRotation(a, b *gorgonia.Node) bool {
	if a == nil || b == nil {
		return a == b
	}
	x, y := a.Op().(*op.RoPEOp), b.Op().(*op.RoPEOp)
	return rotationOf(x) == rotationOf(y) && x.Inverse == y.Inverse
}

// place returns the columns of the queries, keys and values in a matrix that holds them side by side, and those of the first
// two together.
func (p *projections) place(wide *array) (parts [3]*array, both *array) {
	at := 0
	for i, n := range p.linear {
		width := n.Shape()[1]
		parts[i] = wide.columns(at, width)
		if at += width; i == 1 {
			both = wide.columns(0, at)
		}
	}
	return parts, both
}

// width is the columns of all three together.
func (p *projections) width() (n int) {
	for _, l := range p.linear {
		n += l.Shape()[1]
	}
	return n
}

// fuseProjections lowers the linear function n with the others of its attention.
func (c *compiler) fuseProjections(n *gorgonia.Node) (bool, error) {
	at := n
	for range 2 { // past RoPE, to the attention
		i := slices.IndexFunc(c.users[at], func(u *gorgonia.Node) bool { return isOp[*op.AttentionOp](u) || isOp[*op.RoPEOp](u) })
		if i < 0 {
			return false, nil
		}
		if at = c.users[at][i]; isOp[*op.AttentionOp](at) {
			break
		}
	}
	if !isOp[*op.AttentionOp](at) {
		return false, nil
	}
	p := c.projections(at, at.Op().(*op.AttentionOp))
	if p == nil || !slices.Contains(p.linear[:], n) {
		return false, nil
	}
	var weights []*array
	for _, l := range p.linear {
		w := c.there(opbase.Children(l)[1])
		if w == nil {
			return false, nil
		}
		weights = append(weights, w)
	}
	x := c.act(n, c.values[p.x])
	wide := c.newArray(x.elem, x.shape[0], p.width())
	parts, both := p.place(wide)
	if err := c.project(n, p.turned[0], wide, both, x, c.stack(n, weights...)); err != nil {
		return false, err
	}
	for i, l := range p.linear {
		c.values[l] = parts[i]
	}
	if p.turned[0] != nil {
		c.values[p.turned[0]], c.values[p.turned[1]] = parts[0], parts[1]
	}
	return true, nil
}

// project adds wide = x·weightsᵀ, whose columns both are turned as the node turned has it, unless that is nil.
func (c *compiler) project(n, turned *gorgonia.Node, wide, both, x, weights *array) error {
	if turned == nil {
		return c.linearProduct(n, wide, x, weights, nil)
	}
	o, t, m := turned.Op().(*op.RoPEOp), x.elem.dtype(), c.m
	s := kernels.RoPEProductShape{Rows: x.shape[0], Columns: wide.shape[1], D: x.shape[1], Turned: both.shape[1], Seq: o.Config.Seq,
		HeadDim: o.Config.HeadDim, Float8: c.float8(x.shape[0], weights.shape[0], weights.shape[1])}
	w := productWays{op: "RoPEProduct",
		shape: fmt.Sprintf("%dx%dx%d, %d turned of %d, sequences of %d, %v", s.Rows, s.Columns, s.D, s.Turned, s.HeadDim, s.Seq, t) +
			plural(s.Float8, "of float8"),
		units: []string{"gemm_hopper_rope", "rope"}, fused: m.k.RoPEProductWays(s, t)}
	if s.Float8 {
		a, b := c.quantize(n, x), c.quantizeWeight(n, weights, false)
		w.product = float8Product(wide, a, b)
		w.arrays = []*array{wide, a.values, b.values, a.scales, b.scales}
	} else {
		w.product = product{d: wide, a: x, b: weights, transB: true}
		w.arrays = []*array{wide, x, weights}
	}
	for i, a := range w.arrays {
		w.arguments = append(w.arguments, numbers(reads, a.len(), a.elem.dtype()))
		if i == 0 {
			w.arguments[0].role = writes
		}
	}
	tables := len(w.arrays)
	if len(w.fused) > 0 {
		angles := c.angles(o)
		for _, t := range []table{angles.cos, angles.sin, angles.angles} { // which say the same, where random numbers would not
			w.arrays = append(w.arrays, t.array)
			w.arguments = append(w.arguments, argument{role: given, bytes: 4 * len(t.data), data: gpu.Bytes(t.data)})
		}
	}
	w.run = func(way kernels.Way, a []gpu.Ptr) error {
		p := kernels.RoPEProduct{Y: a[0], X: a[1], Weights: a[2], Angles: a[tables+2], RoPEProductShape: s, Type: t, Way: way}
		if s.Float8 {
			p.ScaleX, p.ScaleWeights = a[3], a[4]
		}
		return m.k.RoPEProduct(m.stream, p)
	}
	w.separate = func(product matmulRun, a []gpu.Ptr) error {
		turn := ropeOf(o, both, both)
		turn.Y, turn.X, turn.Cos, turn.Sin = a[0], a[0], a[tables], a[tables+1]
		return first(product(a[0], a[1], a[2], a[3:tables]...), func() error { return m.k.RoPE(m.stream, turn) })
	}
	return c.productThen(n, w, func() { c.rotate(turned, both, both) })
}

// projectionsGrad is the nodes between an attention's gradient and the gradient of x.
type projectionsGrad struct {
	parts, linear [3]*gorgonia.Node
	turned        [2]*gorgonia.Node
	dx            []*gorgonia.Node // the three that add up to the gradient of x, and their sums: that of all three comes last
}

// grad returns those nodes for the gradient n of the attention, nil if anything else uses what would be left out.
func (p *projections) grad(c *compiler, n *gorgonia.Node) *projectionsGrad {
	g := &projectionsGrad{}
	offset := 0
	for i, l := range p.linear {
		d := c.partOf(n, offset)
		offset += size(l.Shape())
		if d == nil || c.sole(d) == nil {
			return nil
		}
		g.parts[i] = d
		if i < 2 && p.turned[i] != nil {
			d = c.sole(d)
			if o, ok := d.Op().(*op.RoPEOp); !ok || !o.Inverse || rotationOf(o) != rotationOf(p.turned[i].Op().(*op.RoPEOp)) {
				return nil
			}
			g.turned[i] = d
		}
		back := c.sole(d)
		if back == nil || !isOp[*op.LinearGradOp](back) {
			return nil
		}
		in, want := opbase.Children(back), opbase.Children(l)
		if in[0] != p.x || in[1] != want[1] || in[2] != d {
			return nil
		}
		dx := c.partOf(back, 0)
		if dx == nil {
			return nil
		}
		g.linear[i], g.dx = back, append(g.dx, dx)
	}
	for rest := slices.Clone(g.dx); len(rest) > 1; {
		i := slices.IndexFunc(rest, func(n *gorgonia.Node) bool { return slices.Contains(rest, other(c.sole(n), n)) })
		if i < 0 {
			return nil
		}
		sum := c.sole(rest[i])
		second := other(sum, rest[i])
		if c.sole(second) != sum {
			return nil
		}
		g.dx = append(g.dx, sum)
		rest = append(slices.DeleteFunc(rest, func(n *gorgonia.Node) bool { return other(sum, n) != nil }), sum)
	}
	return g
}

// fuseProjectionsGrad lowers the gradient n of an attention with those of the projections that its inputs are.
func (c *compiler) fuseProjectionsGrad(n *gorgonia.Node) (bool, error) {
	p := c.projections(n, n.Op().(*op.AttentionGradOp).Forward)
	if p == nil || c.values[p.linear[0]].stride == 0 {
		return false, nil
	}
	g := p.grad(c, n)
	if g == nil {
		return false, nil
	}
	var weights []*array
	for _, l := range p.linear {
		weights = append(weights, c.values[opbase.Children(l)[1]])
	}
	back := g.linear[0]
	x, w := c.act(back, c.values[p.x]), c.stack(back, weights...)
	wide := c.newArray(x.elem, x.shape[0], p.width())
	parts, _ := p.place(wide)
	var turned *op.RoPEOp
	if p.turned[0] != nil {
		turned = p.turned[0].Op().(*op.RoPEOp)
		c.values[g.turned[0]], c.values[g.turned[1]] = parts[0], parts[1]
	}
	if err := c.attentionGrad(n, c.operands(n), parts[0], parts[1], parts[2], turned); err != nil {
		return false, err
	}
	c.values[n] = packed(parts[:]...)
	for i, d := range g.parts {
		c.values[d] = parts[i]
	}
	var dws []*gorgonia.Node
	for _, l := range g.linear {
		dws = append(dws, c.partOf(l, x.len()))
	}
	dx, dw := c.like(x), c.weightGradient(w.shape, dws...)
	if err := c.linearProductGrad(back, dx, wide, w); err != nil {
		return false, err
	}
	if err := c.matmul(back, product{d: dw, a: wide, b: x, transA: true}); err != nil {
		return false, err
	}
	at := 0
	for i, l := range g.linear {
		part := c.aligned(back, dw.view(at, weights[i].shape...))
		at += part.len()
		c.values[l] = packed(folded(p.x), part)
	}
	for _, d := range g.dx {
		c.values[d] = folded(d)
	}
	c.values[g.dx[len(g.dx)-1]] = dx
	return true, nil
}
