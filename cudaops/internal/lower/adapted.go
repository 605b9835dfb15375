package lower

import (
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/layout"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/silu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/op"
)

func init() {
	register[*op.AdaptedLinearOp](lowerFrozenLinear, linearIn(0))
	register[*op.AdaptedLinearGradOp](lowerAdaptedLinearGrad, linearIn(4))
}

// Linear layers with frozen weights that read the same x form a group. With the weights stacked, and the
// matrices a of their adapters, a group is lowered as
//
//	u = scale·x·aᵀ,  y = x·wᵀ + u·bᵀ
//	v = scale·dy·b,  dx = dy·w + v·a,  da = vᵀ·x,  db = dyᵀ·u
//
// Here b is block-diagonal, with the rows of all layers and the columns of all adapters. A single kernel
// can compute both products of y, or of dx, so that adapters need no additional pass over y or dx.
//
// Queries, keys and values form a group, and so do the gate and up layers of an MLP. All other layers are
// groups of one.

// frozenLayer is a linear layer with a frozen weight. a and b are nil if it has no adapter.
type frozenLayer struct {
	n, x, w, a, b *gorgonia.Node
	scale         float64
}

// frozenLayerOf returns the layer that a node computes. ok is false if the node is not a linear layer
// with a frozen weight.
func frozenLayerOf(n *gorgonia.Node) (l frozenLayer, ok bool) {
	switch o := n.Op().(type) {
	case *op.LinearOp:
		in := graph.Children(n)
		return frozenLayer{n: n, x: in[0], w: in[1]}, o.Frozen
	case *op.AdaptedLinearOp:
		in := graph.Children(n)
		return frozenLayer{n, in[0], in[1], in[2], in[3], o.Scale}, true
	}
	return l, false
}

// frozenGroup is a group on the device. a, b and u are nil if no layer has an adapter.
type frozenGroup struct {
	layers  []frozenLayer
	x       *program.Array
	parts   []*program.Array // weights of the layers
	weights *program.Array   // parts, stacked, and perhaps packed
	a, b, u *program.Array
	scale   float32

	// If x is the output of an RMSNorm, raw is the norm's input. x is then raw, with each row multiplied
	// by its 1/rms and each column by the factor of its feature.
	raw  *program.Array
	norm normState
}

// canGroup reports whether layers read the same x and all their adapters have the same scale.
func canGroup(layers ...frozenLayer) bool {
	scale := 0.0
	for _, l := range layers {
		if l.x != layers[0].x || l.a != nil && scale != 0 && l.scale != scale {
			return false
		}
		if l.a != nil {
			scale = l.scale
		}
	}
	return true
}

// newFrozenGroup adds the call that computes u. It returns nil if the parameters of a layer are not
// available.
func (c *compiler) newFrozenGroup(n *gorgonia.Node, layers ...frozenLayer) *frozenGroup {
	var weights, as, bs []*program.Array
	for _, l := range layers {
		weights = append(weights, c.available(l.w))
		if l.a != nil {
			as, bs = append(as, c.available(l.a)), append(bs, c.available(l.b))
		}
	}

	if slices.Contains(slices.Concat(weights, as, bs), nil) {
		return nil
	}

	g := &frozenGroup{layers: layers, x: c.asActivation(n, c.Values[layers[0].x]), parts: weights,
		weights: c.stackFrozen(n, weights...)}
	for _, l := range layers {
		if l.a != nil {
			g.scale = float32(l.scale)
		}
	}

	if o, ok := layers[0].x.Op().(*op.RMSNormOp); ok {
		raw := c.Values[graph.Children(layers[0].x)[0]]
		if norm, ok := c.saved[o].(normState); ok && raw != nil && raw.Buffer != nil && raw.Stride == 0 &&
			raw.Type == g.x.Type && norm.factor.Len() == g.x.Shape[1] {
			g.raw, g.norm = raw, norm
		}
	}

	if len(as) > 0 {
		g.a, g.b = c.stack(n, as...), c.blockDiagonal(n, layers)
		g.u = c.NewArray(g.x.Type, g.x.Shape[0], g.a.Shape[0])
		c.rowProduct(n, g.u, g.x, g.a, true, g.scale, nil, nil)
	}

	return g
}

// adapterOp is the name of the adapters' narrow products in profiles.
const adapterOp = "Adapter"

// rowProduct adds the narrow product y = scale·x·w or, if trans is set, y = scale·x·wᵀ. If scaled is not
// nil, it receives y with each row multiplied by its factor.
func (c *compiler) rowProduct(n *gorgonia.Node, y, x, w *program.Array, trans bool, scale float32, scaled,
	factors *program.Array) {
	one := gemm.RowProduct{Rows: y.Shape[0], Columns: y.Shape[1], D: x.Shape[1], TransW: trans,
		Scale: float64(scale), Type: x.Type}
	several := []*program.Call{c.newProduct(n, program.Product{D: y, A: x, B: w, TransB: trans, Alpha: scale})}
	several[0].Op = adapterOp
	if scaled != nil {
		s := gemm.ScaledRows{Rows: y.Shape[0], Columns: y.Shape[1], Type: y.Type}
		several = append(several, newCall(c, n, &s, program.Writes(&s.Y, scaled), program.Reads(&s.X, y),
			program.Reads(&s.Factors, factors)))
	}
	c.addProduct(several, true, newCall(c, n, &one, program.Writes(&one.Y, y), program.Reads(&one.X, x),
		program.Reads(&one.W, w), program.Writes(&one.Scaled, scaled), program.Reads(&one.Factors, factors)))
}

// columnProduct adds the narrow product y = xᵀ·v or, if transposed is set, y = vᵀ·x. If factors is not
// nil, which requires transposed, the columns of y are multiplied by their factors.
func (c *compiler) columnProduct(n *gorgonia.Node, y, x, v *program.Array, transposed bool,
	factors *program.Array) {
	p := program.Product{D: y, A: x, B: v, TransA: true}
	if transposed {
		p.A, p.B = v, x
	}
	one := gemm.ColumnProduct{Rows: x.Shape[0], Columns: x.Shape[1], Narrow: v.Shape[1],
		Transposed: transposed, Type: x.Type, YType: y.Type}
	several := []*program.Call{c.newProduct(n, p)}
	several[0].Op = adapterOp
	if factors != nil {
		m := elementwise.Binary{Op: elementwise.Mul, N: y.Len(), Type: y.Type, B: elementwise.Operand{
			Period: factors.Len()}}
		several = append(several, newCall(c, n, &m, program.Updates(&m.Y, y), program.Reads(&m.A.Ptr, y),
			program.Reads(&m.B.Ptr, c.as(n, factors, y.Type))))
	}
	c.addProduct(several, true, newCall(c, n, &one, program.Writes(&one.Y, y), program.Reads(&one.X, x),
		program.Reads(&one.V, v), program.Reads(&one.Factors, factors)))
}

// blockDiagonal returns a block-diagonal matrix of the adapters' matrices b. The rows of layers without
// an adapter are zero.
func (c *compiler) blockDiagonal(n *gorgonia.Node, layers []frozenLayer) *program.Array {
	if len(layers) == 1 {
		return c.asActivation(n, c.available(layers[0].b))
	}

	d, out, rank := blocksOf(layers)
	all := c.NewArray(c.o.Activation, out, rank)
	d.Size = all.Type.Size()
	args := []program.Arg{program.Writes(&d.Y, all)}
	for i, l := range layers {
		if l.a != nil {
			args = append(args, program.Reads(&d.Blocks[i], c.asActivation(n, c.available(l.b))))
		}
	}
	addCall(c, n, d, args...).Op = adapterOp
	return all
}

// blocksOf returns a launch for the block-diagonal matrix of the layers' matrices b, without operands,
// and the shape of that matrix.
func blocksOf(layers []frozenLayer) (d *gemm.BlockDiagonal, out, rank int) {
	d = new(gemm.BlockDiagonal)
	for i, l := range layers {
		d.Rows[i] = l.n.Shape()[1]
		if l.a != nil {
			d.Columns[i] = l.a.Shape()[0]
		}
		out, rank = out+d.Rows[i], rank+d.Columns[i]
	}
	return d, out, rank
}

// copyBlock copies a matrix of the given shape from x to y, given the row strides of both. role declares
// the operand y.
func (c *compiler) copyBlock(n *gorgonia.Node, y, x *program.Array, shape []int, yStride, xStride int,
	role func(*gpu.Ptr, *program.Array) program.Arg) {
	l := layout.Copy{Dims: shape, YStrides: []int{yStride, 1}, XStrides: []int{xStride, 1},
		Size: y.Type.Size()}
	addCall(c, n, &l, role(&l.Y, y), program.Reads(&l.X, x)).Op = adapterOp
}

// second returns u·bᵀ, the term that a group adds to x·wᵀ. It is empty if there are no adapters.
func (g *frozenGroup) second() term { return term{g.u, g.b, true} }

// A term is a product x·w, or x·wᵀ if transW is set, that is added to another product. An empty term is zero.
type term struct {
	x, w   *program.Array
	transW bool
}

// products returns the calls that compute a product and add a term to it. In float8, the term comes first. The
// product then reads it while it computes, whereas a term of little depth takes as long as reading and writing the
// sum.
func (c *compiler) products(n *gorgonia.Node, p program.Product, t term) []*program.Call {
	if t.x == nil {
		return []*program.Call{c.newProduct(n, p)}
	}

	second := program.Product{D: p.D, A: t.x, B: t.w, TransB: t.transW}
	if p.ScaleA == nil {
		second.Beta = 1
		return []*program.Call{c.newProduct(n, p), c.newProduct(n, second)}
	}

	second.C, second.Beta = p.C, p.Beta
	p.C, p.Beta = nil, 1
	return []*program.Call{c.newProduct(n, second), c.newProduct(n, p)}
}

// operands returns the operands of a launch that adds t to its product.
func (t term) operands(to *gemm.Term) []program.Arg {
	if t.x == nil {
		return nil
	}
	to.D = t.x.Shape[1]
	return []program.Arg{program.Reads(&to.X, t.x), program.Reads(&to.W, t.w)}
}

// addTerm adds the calls for a product plus a term, using a single kernel if that is faster.
func (c *compiler) addTerm(n *gorgonia.Node, p program.Product, t term) {
	if t.x == nil {
		c.matmul(n, p)
		return
	}

	one := gemm.ProductSum{Product: gemm.Product{Rows: p.D.Shape[0], Columns: p.D.Shape[1], D: p.A.Shape[1],
		TransW: p.TransB, Type: p.D.Type}}
	args := append(t.operands(&one.Term), program.Writes(&one.Y, p.D), program.Reads(&one.X, p.A),
		program.Reads(&one.W, p.B), program.Reads(&one.C, p.C))
	c.addProduct(c.products(n, p, t), p.ScaleA == nil, newCall(c, n, &one, args...))
}

// lowerFrozenLinear lowers a linear layer with a frozen weight, together with the other layers of its
// group.
func lowerFrozenLinear(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	if c.fuseProjections(n) || c.fuseGate(n) {
		return c.Values[n]
	}

	l, _ := frozenLayerOf(n)
	g := c.newFrozenGroup(n, l)
	c.saved[n.Op()] = g
	y := c.NewArray(g.x.Type, n.Shape()...)
	_, add := c.addend(n, y)
	c.linearPlus(n, y, g.x, g.weights, add, g.second())
	return y
}

// linearPlus adds the calls for y = x·wᵀ plus a term and, if it is not nil, the matrix add.
func (c *compiler) linearPlus(n *gorgonia.Node, y, x, w, add *program.Array, t term) {
	if t.x != nil && x.Shape[0] > 1 {
		c.addTerm(n, c.weighted(n, y, x, w, false).Plus(add), t)
		return
	}

	c.linear(n, y, x, w, add)
	if t.x != nil {
		c.matmul(n, program.Product{D: y, A: t.x, B: t.w, TransB: true, Beta: 1})
	}
}

// frozenGrad describes the gradients of one layer of a group.
type frozenGrad struct {
	n  *gorgonia.Node // the op that computes the gradients
	dx *gorgonia.Node // gradient of x; nil if nothing needs it
}

// frozenGradOf returns the gradients that node n computes.
func (c *compiler) frozenGradOf(n *gorgonia.Node) frozenGrad {
	dx := n
	if !isOp[*op.LinearInputGradOp](n) {
		dx = c.partOf(n, 0)
	}
	if len(c.users[dx]) == 0 && !c.lasting[dx] {
		dx = nil
	}
	return frozenGrad{n, dx}
}

// gradOfLayer returns the node that computes the gradients of a layer from the gradient d of its output.
func (c *compiler) gradOfLayer(l frozenLayer, d *gorgonia.Node) *gorgonia.Node {
	for _, u := range c.users[d] {
		switch in := graph.Children(u); u.Op().(type) {
		case *op.LinearInputGradOp:
			if l.a == nil && in[0] == d && in[1] == l.w {
				return u
			}
		case *op.AdaptedLinearGradOp:
			if l.a != nil && in[0] == l.x && in[1] == l.a && in[2] == l.b && in[3] == l.w && in[4] == d {
				return u
			}
		}
	}
	return nil
}

// outputGrads contains the results of the products that read dy: the factor v of the term v·a, which is
// added to dy·w, and db. If x is the output of a norm, scaled is v with each row multiplied by the norm's
// 1/rms.
type outputGrads struct {
	term
	scaled, db *program.Array
}

// readOutputGrad adds the calls for v = scale·dy·b and db = dyᵀ·u, in a single pass over dy if that is
// faster. grads are the gradient nodes of the group's layers.
func (c *compiler) readOutputGrad(n *gorgonia.Node, g *frozenGroup, grads []*gorgonia.Node,
	dy *program.Array) (o outputGrads) {
	if g.u == nil {
		return o
	}

	v, db := c.Like(g.u), c.weightGradient(g.b.Shape, c.gradsOfAdapters(g, grads, true)...)
	o = outputGrads{term: term{x: v, w: g.a}, db: db}
	var factors *program.Array
	if g.raw != nil {
		o.scaled, factors = c.Like(g.u), g.norm.rstd
	}

	before := len(c.Calls)
	c.rowProduct(n, v, dy, g.b, false, g.scale, o.scaled, factors)
	c.columnProduct(n, db, dy, g.u, false, nil)
	several := slices.Clone(c.Calls[before:])
	c.Calls = c.Calls[:before]

	one := gemm.NarrowProducts{Rows: dy.Shape[0], Columns: dy.Shape[1], Narrow: v.Shape[1],
		Scale: float64(g.scale), Type: dy.Type, DWType: db.Type}
	c.addProduct(several, true, newCall(c, n, &one, program.Writes(&one.V, v), program.Writes(&one.DW, db),
		program.Reads(&one.X, dy), program.Reads(&one.W, g.b), program.Reads(&one.U, g.u),
		program.Writes(&one.Scaled, o.scaled), program.Reads(&one.Factors, factors)))
	return o
}

// gradsOfAdapters returns the nodes for the gradients of a group's matrices a or, if b is set, matrices
// b.
func (c *compiler) gradsOfAdapters(g *frozenGroup, grads []*gorgonia.Node, b bool) (all []*gorgonia.Node) {
	for i, l := range g.layers {
		if l.a == nil {
			continue
		}
		at := g.x.Len()
		if b {
			at += l.a.Shape()[0] * g.weights.Shape[1]
		}
		if n := c.partOf(grads[i], at); n != nil {
			all = append(all, n)
		}
	}
	return all
}

// adapterGrads adds the calls for the gradients of a group's adapters, and sets the values of the nodes
// in grads, one for each layer. dx is the value of the gradient of x.
//
// If x is the output of a norm, da = vᵀ·x is computed from the norm's input instead, so that x need not
// be kept: the rows of v are multiplied by 1/rms, and the columns of the result by the features' factors.
func (c *compiler) adapterGrads(g *frozenGroup, grads []*gorgonia.Node, dx *program.Array, o outputGrads) {
	n, in := grads[0], g.weights.Shape[1]
	var da *program.Array
	if g.u != nil {
		da = c.weightGradient(g.a.Shape, c.gradsOfAdapters(g, grads, false)...)
		if o.scaled != nil {
			c.columnProduct(n, da, g.raw, o.scaled, true, g.norm.factor)
		} else {
			c.columnProduct(n, da, g.x, o.x, true, nil)
		}
	}

	d, _, _ := blocksOf(g.layers)
	d.Back = true
	args := []program.Arg{program.Reads(&d.Y, o.db)}
	column := 0
	for i, l := range g.layers {
		if l.a == nil {
			if c.Values[grads[i]] == nil {
				c.Values[grads[i]] = dx
			}
			continue
		}

		rank, db := d.Columns[i], o.db
		first := c.aligned(grads[i], da.View(column*in, rank, in))
		if len(g.layers) > 1 {
			db = c.NewArray(db.Type, d.Rows[i], rank)
			args = append(args, program.Writes(&d.Blocks[i], db))
		}
		c.Values[grads[i]] = packed(dx, first, db)
		column += rank
	}

	if len(args) > 1 {
		d.Size = o.db.Type.Size()
		addCall(c, n, d, args...).Op = adapterOp
	}
}

// present returns the nodes that are not nil.
func present(nodes []*gorgonia.Node) []*gorgonia.Node {
	return slices.DeleteFunc(nodes, func(n *gorgonia.Node) bool { return n == nil })
}

func lowerAdaptedLinearGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	forward := n.Op().(*op.AdaptedLinearGradOp).Forward
	if g, ok := c.saved[forward].(*frozenGroup); ok {
		return c.lowerFrozenGrad(n, g, in[4])
	}

	// The forward op is not in the graph.
	x, a := c.asActivations(n, in[0], in[1])
	b, w := c.asActivations(n, in[2], in[3])
	dy, scale := c.asActivation(n, in[4]), float32(forward.Scale)
	rows, rank := x.Shape[0], a.Shape[0]
	u, v := c.NewArray(x.Type, rows, rank), c.NewArray(x.Type, rows, rank)
	dx, da, db := c.Like(x), c.aux(a.Shape...), c.aux(b.Shape...)
	c.matmul(n, program.Product{D: u, A: x, B: a, TransB: true, Alpha: scale})
	c.matmul(n, program.Product{D: v, A: dy, B: b, Alpha: scale})
	c.matmul(n, c.weighted(n, dx, dy, w, true))
	c.matmul(n, program.Product{D: dx, A: v, B: a, Beta: 1})
	c.matmul(n, program.Product{D: da, A: v, B: x, TransA: true})
	c.matmul(n, program.Product{D: db, A: dy, B: u, TransA: true})
	return packed(dx, da, db)
}

// lowerFrozenGrad lowers the gradients of a layer, given the gradient of its output.
func (c *compiler) lowerFrozenGrad(n *gorgonia.Node, g *frozenGroup, dy *program.Array) *program.Array {
	if c.fuseGateGrad(n, g) {
		return c.Values[n]
	}

	dy, g = c.contiguous(n, c.asActivation(n, dy)), c.alone(n, g)
	if c.fuseMulGrad(n, g, dy) {
		return c.Values[n]
	}

	grads := []*gorgonia.Node{n}
	o := c.readOutputGrad(n, g, grads, dy)
	var dx *program.Array
	if to := c.frozenGradOf(n).dx; to != nil {
		dx = c.Like(g.x)
		_, add := c.addend(to, dx)
		c.addTerm(n, c.weighted(n, dx, dy, g.weights, true).Plus(add), o.term)
	} else {
		dx = &program.Array{Shape: g.x.Shape}
	}

	c.adapterGrads(g, grads, dx, o)
	return c.Values[n]
}

// contiguous returns a, or a contiguous copy if a has gaps between its rows.
func (c *compiler) contiguous(n *gorgonia.Node, a *program.Array) *program.Array {
	if a.Stride == 0 {
		return a
	}
	b := c.NewArray(a.Type, a.Shape...)
	c.copyBlock(n, b.View(0), a.View(0), a.Shape, a.Shape[1], a.Stride, program.Writes)
	return b
}

// alone returns a group that contains only the layer of g for which node n computes the gradients.
func (c *compiler) alone(n *gorgonia.Node, g *frozenGroup) *frozenGroup {
	if len(g.layers) == 1 {
		return g
	}

	in, rows := g.weights.Shape[1], g.x.Shape[0]
	row, column := 0, 0
	for i, l := range g.layers {
		out := l.n.Shape()[1]
		if c.gradOfLayer(l, c.gradientIn(n)) == n {
			one := &frozenGroup{layers: []frozenLayer{l}, x: g.x, parts: g.parts[i : i+1], weights: g.parts[i],
				scale: g.scale}
			if g.weights.Packed == nil {
				one.weights = g.weights.View(row*in, out, in)
			}
			if l.a == nil {
				return one
			}
			rank := l.a.Shape()[0]
			one.a = g.a.View(column*in, rank, in)
			one.b = c.asActivation(n, c.available(l.b))
			one.u = c.NewArray(g.u.Type, rows, rank)
			c.copyBlock(n, one.u.View(0), g.u.View(column), one.u.Shape, rank, g.u.Shape[1], program.Writes)
			return one
		}
		row += out
		if l.a != nil {
			column += l.a.Shape()[0]
		}
	}

	panic("lower: a gradient of no layer of its group")
}

// gradientIn returns the gradient of a layer's output, given the node that computes the layer's
// gradients.
func (c *compiler) gradientIn(n *gorgonia.Node) *gorgonia.Node {
	in := graph.Children(n)
	if isOp[*op.LinearInputGradOp](n) {
		return in[0]
	}
	return in[4]
}

// ---- MLPs ----

// keptShare limits the memory for keeping the results of gates to 1/keptShare of the device's memory.
// Keeping them saves less than 1% of a step.
const keptShare = 50

// gateState records the forward pass of an MLP with a group of gate and up layers: ab [rows, 2F] contains
// the outputs of both layers side by side. The backward pass adds dab, the gradient of ab.
type gateState struct {
	mul     *gorgonia.Node
	group   *frozenGroup
	ab, dab *program.Array
	gelu    bool
}

// fuseGate lowers the gate and up layers of an MLP together with the gate's multiplication, if n is one
// of the two layers and the fusion is possible.
func (c *compiler) fuseGate(n *gorgonia.Node) bool {
	i := slices.IndexFunc(c.users[n], isOp[*op.SiLUMulOp])
	if i < 0 {
		return false
	}

	mul := c.users[n][i]
	o, in := mul.Op().(*op.SiLUMulOp), graph.Children(mul)
	gate, ok := frozenLayerOf(in[0])
	up, too := frozenLayerOf(in[1])
	if !ok || !too || in[0] == in[1] || gate.n.Shape()[0] == 1 || !canGroup(gate, up) ||
		c.Values[in[0]] != nil || c.Values[in[1]] != nil || c.Values[mul] != nil {
		return false
	}

	for _, half := range in {
		if !c.onlyUsedBy(half, func(u *gorgonia.Node) bool {
			back, ok := u.Op().(*op.SiLUMulGradOp)
			return u == mul || ok && back.Forward == o
		}) {
			return false
		}
	}

	g := c.newFrozenGroup(n, gate, up)
	if g == nil {
		return false
	}

	rows, f := g.x.Shape[0], gate.n.Shape()[1]
	s := &gateState{mul: mul, group: g, ab: c.NewArray(g.x.Type, rows, 2*f), gelu: o.GELU}
	h := c.NewArray(g.x.Type, rows, f)
	p, t := c.weighted(n, s.ab, g.x, g.weights, false), g.second()
	q := c.float8Output(h, p.ScaleA != nil && c.wantsFloat8(mul))
	m := silu.Mul{Rows: rows, F: f, GELU: s.gelu, Type: h.Type}
	several := append(c.products(n, p, t), newCall(c, n, &m, program.Writes(&m.H, h),
		program.Reads(&m.AB, s.ab), program.Writes(&m.H8, q.Values), program.Writes(&m.Scale8, q.Scales)))
	one := gemm.SiLUProduct{Gate: gemm.Gate{Rows: rows, F: f, D: g.x.Shape[1], Type: h.Type}}
	args := append(t.operands(&one.Term), program.Writes(&one.H, h), program.Writes(&one.AB, s.ab),
		program.Reads(&one.X, g.x), program.Reads(&one.Weights, p.B))
	c.addProduct(several, !s.gelu && p.ScaleA == nil, newCall(c, n, &one, args...))

	c.saved[gate.n.Op()], c.saved[up.n.Op()], c.saved[o] = g, g, s
	c.Values[gate.n], c.Values[up.n], c.Values[mul] = s.ab.Columns(0, f), s.ab.Columns(f, f), h
	return true
}

// fuseMulGrad lowers the gradients of a down layer together with the gradient of the gate's
// multiplication, if nothing else uses the gradient of the layer's input.
func (c *compiler) fuseMulGrad(n *gorgonia.Node, g *frozenGroup, dy *program.Array) bool {
	dh := c.frozenGradOf(n).dx
	back := c.soleUser(dh)
	if back == nil || !isOp[*op.SiLUMulGradOp](back) {
		return false
	}

	s, ok := c.saved[back.Op().(*op.SiLUMulGradOp).Forward].(*gateState)
	if !ok || graph.Children(back)[2] != dh {
		return false
	}

	rows, d, f := dy.Shape[0], dy.Shape[1], g.weights.Shape[1]
	s.dab = c.Like(s.ab)
	h, product := c.Like(g.x), c.Like(g.x)
	grads := []*gorgonia.Node{n}
	o := c.readOutputGrad(n, g, grads, dy)
	p := c.weighted(n, product, dy, g.weights, true)
	q := c.float8Output(s.dab, p.ScaleA != nil && c.float8(rows, float8Pack, 2*f))
	m := silu.MulBackward{Rows: rows, F: f, GELU: s.gelu, Type: dy.Type}
	several := append(c.products(n, p, o.term), newCall(c, n, &m, program.Writes(&m.H, h),
		program.Writes(&m.DAB, s.dab), program.Reads(&m.DH, product), program.Reads(&m.AB, s.ab),
		program.Writes(&m.DAB8, q.Values), program.Writes(&m.Scale8, q.Scales)))
	one := gemm.SiLUProductBackward{Gate: gemm.Gate{Rows: rows, F: f, D: d, Type: dy.Type}}
	args := append(o.operands(&one.Term), program.Writes(&one.DAB, s.dab), program.Reads(&one.AB, s.ab),
		program.Reads(&one.G, dy), program.Reads(&one.Down, p.B))
	room := min(c.o.Room, int(c.o.Device.Memory/keptShare))
	keep := g.u != nil && c.Spent+g.x.Extent() <= room
	if g.u != nil && !keep {
		args = append(args, program.Writes(&one.H, h))
	}

	// Unless h is kept, it is recomputed.
	again, call := *g, newCall(c, n, &one, args...)
	again.x = h
	if c.addProduct(several, !s.gelu && p.ScaleA == nil, call) {
		call.InPlace = program.InPlace{From: s.ab, To: s.dab}
		if keep {
			again.x = g.x
			c.Spent += g.x.Extent()
		}
	}
	c.adapterGrads(&again, grads, folded(dh), o)
	c.Values[dh], c.Values[back] = folded(dh), packed(s.dab.Columns(0, f), s.dab.Columns(f, f))
	return true
}

// fuseGateGrad lowers the gradients of the gate and up layers together, if n computes the gradients of
// one of the two layers.
func (c *compiler) fuseGateGrad(n *gorgonia.Node, g *frozenGroup) bool {
	if len(g.layers) != 2 {
		return false
	}

	mul := c.soleMul(g)
	s, ok := c.saved[mul].(*gateState)
	if !ok || s.group != g || s.dab == nil {
		return false
	}

	d := c.gradientIn(n)
	back := graph.Children(d)[0]
	if !isOp[*op.SiLUMulGradOp](back) {
		return false
	}

	f := s.ab.Shape[1] / 2
	var grads, dxs []*gorgonia.Node
	for i, l := range g.layers {
		part := c.partOf(back, i*s.ab.Shape[0]*f)
		if part == nil || c.lasting[part] {
			return false
		}
		u := c.gradOfLayer(l, part)
		if u == nil || c.soleUser(part) != u || c.Values[u] != nil {
			return false
		}
		grads, dxs = append(grads, u), append(dxs, c.frozenGradOf(u).dx)
	}

	sum := c.soleUser(dxs[0])
	if dxs[0] == nil && dxs[1] == nil {
		sum = nil
	} else if dxs[0] == nil || otherAddend(sum, dxs[0]) != dxs[1] || c.soleUser(dxs[1]) != sum {
		return false
	}

	o := c.readOutputGrad(n, g, grads, s.dab)
	c.groupInputGrad(n, g, s.dab, o.term, dxs, sum)
	c.adapterGrads(g, grads, &program.Array{Shape: g.x.Shape}, o)
	return true
}

// groupInputGrad adds the calls for dx = dy·w plus a term, and makes dx the value of sum, the node that
// adds the layers' gradients dxs. If sum is nil, no dx is needed.
func (c *compiler) groupInputGrad(n *gorgonia.Node, g *frozenGroup, dy *program.Array, t term,
	dxs []*gorgonia.Node, sum *gorgonia.Node) {
	if sum == nil {
		return
	}
	dx := c.Like(g.x)
	c.addTerm(n, c.weighted(n, dx, dy, g.weights, true), t)
	for _, d := range dxs {
		c.Values[d] = folded(d)
	}
	c.Values[sum] = dx
}

// soleMul returns the multiplication that reads the group's layers.
func (c *compiler) soleMul(g *frozenGroup) gorgonia.Op {
	for _, u := range c.users[g.layers[0].n] {
		if isOp[*op.SiLUMulOp](u) {
			return u.Op()
		}
	}
	return nil
}
