package lower

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/reduce"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/rope"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/op/kvcache"
)

func init() {
	register[*op.RoPEOp](lowerRoPE, linearIn(0))
}

// The queries, keys and values of an attention are usually x·Wqᵀ, x·Wkᵀ and x·Wvᵀ, with RoPE applied
// to the first two. They are lowered as
//
//	[q | k | v] = x·[Wq; Wk; Wv]ᵀ,  d[Wq; Wk; Wv] = [dq | dk | dv]ᵀ·x,  dx = [dq | dk | dv]·[Wq; Wk; Wv]
//
// with one product each instead of three products and two sums. Attention and RoPE operate on columns
// of the wide matrices. RoPE works in place, or is performed by the product if that is faster; the
// gradient of the attention inverts the rotation of dq and dk itself. Biases are also concatenated, so
// that they take one addition, and their gradients one reduction.

// projections are the linear functions that compute the queries, keys and values of an attention.
type projections struct {
	x       *gorgonia.Node
	linear  [3]*gorgonia.Node
	bias    [3]*gorgonia.Node // biases added to linear; nil if there are none
	rotated [3]*gorgonia.Node // queries and keys after RoPE; nil if not rotated
	frozen  []frozenLayer     // linear, if the weights are frozen
	group   *frozenGroup      // frozen on the device
}

// project finds the projections of attention n and records them under their linear nodes and the queries.
// The projected values must have no users except the attention and its gradient, because other ops don't
// support gaps between rows.
func (c *compiler) project(n *gorgonia.Node) {
	o, _ := n.Op().(*op.AttentionOp) // nil for attention to a cache, which performs the rotation itself
	p, queries := &projections{}, graph.Children(n)[0]
	byAttention := func(u *gorgonia.Node) bool {
		return attends(u) || isOp[*op.AttentionGradOp](u)
	}
	for i, n := range graph.Children(n)[:3] {
		if !c.onlyUsedBy(n, byAttention) {
			return
		}
		for !isOp[*op.LinearOp](n) && !isOp[*op.AdaptedLinearOp](n) {
			r, turns := n.Op().(*op.RoPEOp)
			switch {
			case turns && i < 2 && p.rotated[i] == nil && p.bias[i] == nil && !r.Inverse &&
				o != nil && r.Config.Seq == o.Config.Seq && r.Config.HeadDim == o.Config.HeadDim:
				p.rotated[i] = n
			case isOp[*op.BiasOp](n) && p.bias[i] == nil:
				p.bias[i] = n
			default:
				return
			}
			above := n
			if n = graph.Children(n)[0]; c.soleUser(n) != above {
				return
			}
		}
		if l, frozen := frozenLayerOf(n); frozen {
			p.frozen = append(p.frozen, l)
		}
		if (p.bias[i] == nil) != (p.bias[0] == nil) || slices.Contains(p.linear[:i], n) ||
			i > 0 && graph.Children(n)[0] != p.x {
			return
		}
		p.x, p.linear[i] = graph.Children(n)[0], n
	}

	if rotationKey(ropeConfigOf(p.rotated[0])) != rotationKey(ropeConfigOf(p.rotated[1])) {
		return
	}

	if p.frozen != nil && (len(p.frozen) < 3 || !canGroup(p.frozen...)) {
		return
	}

	c.projected[queries] = p
	for _, l := range p.linear {
		c.projected[l] = p
	}
}

// stacked returns the stacked weights of the projections.
func (p *projections) stacked(c *compiler, n *gorgonia.Node, weights []*program.Array) *program.Array {
	if p.group != nil {
		return p.group.weights
	}
	return c.stack(n, weights...)
}

// attends reports whether a node is an attention.
func attends(n *gorgonia.Node) bool {
	return isOp[*op.AttentionOp](n) || isOp[*kvcache.AttentionOp](n) || isOp[*kvcache.PagedAttentionOp](n)
}

func isOp[T any](n *gorgonia.Node) bool {
	_, ok := n.Op().(T)
	return ok
}

// place allocates a matrix for queries, keys and values with as many rows as x. It returns the matrix,
// the columns of each of the three, and the columns of queries and keys together.
func (p *projections) place(c *compiler, x *program.Array) (wide *program.Array,
	parts [3]*program.Array, both *program.Array) {
	var at [4]int
	for i, l := range p.linear {
		at[i+1] = at[i] + l.Shape()[1]
	}
	wide = c.NewArray(x.Type, x.Shape[0], at[3])
	for i := range parts {
		parts[i] = wide.Columns(at[i], at[i+1]-at[i])
	}
	return wide, parts, wide.Columns(0, at[2])
}

// fuseProjections lowers linear function n together with the other projections of its attention, if there
// are any.
func (c *compiler) fuseProjections(n *gorgonia.Node) bool {
	p := c.projected[n]
	if p == nil {
		return false
	}

	var weights, biases []*program.Array
	for i, l := range p.linear {
		weights = append(weights, c.available(graph.Children(l)[1]))
		if p.bias[i] != nil {
			biases = append(biases, c.available(graph.Children(p.bias[i])[1]))
		}
	}

	if slices.Contains(slices.Concat(weights, biases), nil) {
		return false
	}

	x, t := c.asActivation(n, c.Values[p.x]), term{}
	if p.frozen != nil {
		if p.group = c.newFrozenGroup(n, p.frozen...); p.group == nil {
			return false
		}
		t = p.group.second()
		for _, l := range p.linear {
			c.saved[l.Op()] = p.group
		}
	}

	wide, parts, both := p.place(c, x)
	stacked := p.stacked(c, n, weights)
	c.projectAll(n, p, wide, both, x, stacked, biases, t)
	c.setValues(p.linear, parts)
	c.setValues(p.bias, parts)
	c.setValues(p.rotated, parts)
	return true
}

// setValues sets the values of nodes, skipping nil nodes.
func (c *compiler) setValues(nodes [3]*gorgonia.Node, values [3]*program.Array) {
	for i, n := range nodes {
		if n != nil {
			c.Values[n] = values[i]
		}
	}
}

// projectAll adds wide = x·weightsᵀ, plus a term, and plus biases if there are any. If queries and keys
// are rotated, it rotates their columns of wide, which are the array both, in place.
func (c *compiler) projectAll(n *gorgonia.Node, p *projections, wide, both, x,
	weights *program.Array, biases []*program.Array, t term) {
	turned := p.rotated[0]
	switch {
	case len(biases) > 0:
		y, all := c.Like(wide), c.converted(n, wide.Type, wide.Shape[1:], biases...)
		c.linearPlus(n, y, x, weights, nil, t)
		c.map2(n, elementwise.Add, wide, y, all, elementwise.Operand{}, rowOf(all.Len()))
		if turned != nil {
			c.Add(c.rotate(turned, both, both))
		}
		return
	case turned == nil:
		c.linearPlus(n, wide, x, weights, nil, t)
		return
	}

	o, product := ropeConfigOf(turned), c.weighted(n, wide, x, weights, false)
	one := gemm.RoPEProduct{Rows: x.Shape[0], Columns: wide.Shape[1], D: x.Shape[1],
		Turned: both.Shape[1], Seq: o.Seq, HeadDim: o.HeadDim, Float8: product.ScaleA != nil,
		Type: x.Type}
	several := append(c.products(n, product, t), c.rotate(turned, both, both))
	if len(c.o.Variants(one)) == 0 {
		c.Calls = append(c.Calls, several...)
		return
	}

	tables := c.rotation(o)
	if tables.angles == nil {
		tables.angles = c.NewConstant(gemm.RoPEAngles(tables.cos.Data, tables.sin.Data, o.HeadDim/2))
	}

	args := append(t.operands(&one.Term), program.Writes(&one.Y, wide),
		program.Reads(&one.X, product.A), program.Reads(&one.Weights, product.B),
		program.Reads(&one.ScaleX, product.ScaleA),
		program.Reads(&one.ScaleWeights, product.ScaleB), program.Reads(&one.Angles, tables.angles))
	c.addProduct(several, t.x == nil || product.ScaleA == nil, newCall(c, n, &one, args...))
}

// projectionsGrad holds the nodes between an attention's gradient and the gradient of x.
type projectionsGrad struct {
	parts, linear, bias, rotated [3]*gorgonia.Node
	// the three gradients of x, followed by the sum of two and the sum of all three; empty if nothing
	// needs the gradient of x
	dx []*gorgonia.Node
}

// grad returns these nodes for attention gradient n. It returns nil if another node uses a value that
// fusion would omit.
func (p *projections) grad(c *compiler, n *gorgonia.Node) *projectionsGrad {
	g := &projectionsGrad{}
	offset := 0
	for i, l := range p.linear {
		d := c.partOf(n, offset)
		offset += opbase.Size(l.Shape())
		g.parts[i] = d
		if p.rotated[i] != nil {
			if d = c.soleUser(d); d == nil {
				return nil
			}
			if o, ok := d.Op().(*op.RoPEOp); !ok || !o.Inverse ||
				rotationKey(&o.Config) != rotationKey(ropeConfigOf(p.rotated[i])) {
				return nil
			}
			g.rotated[i] = d
		}
		want := graph.Children(l)
		for _, u := range c.users[d] {
			switch in := graph.Children(u); {
			case p.frozen != nil && u == c.gradOfLayer(p.frozen[i], d):
				g.linear[i] = u
			case isOp[*op.LinearGradOp](u) && in[0] == p.x && in[1] == want[1] && in[2] == d &&
				(g.linear[i] == nil || g.linear[i] == u):
				g.linear[i] = u
			case isOp[*op.BiasGradOp](u) && p.bias[i] != nil &&
				(g.bias[i] == nil || g.bias[i] == u):
				g.bias[i] = u
			default:
				return nil
			}
		}
		if g.linear[i] == nil || c.lasting[d] {
			return nil
		}
		dx := c.partOf(g.linear[i], 0)
		if p.frozen != nil {
			dx = c.frozenGradOf(g.linear[i]).dx
		} else if dx == nil || (p.bias[i] == nil) != (g.bias[i] == nil) {
			return nil
		}
		g.dx = append(g.dx, dx)
	}

	if len(present(slices.Clone(g.dx))) == 0 {
		g.dx = nil
		return g
	}

	if slices.Contains(g.dx, nil) {
		return nil
	}

	for i, third := range g.dx {
		first, second := g.dx[(i+1)%3], g.dx[(i+2)%3]
		two := c.soleUser(first)
		all := c.soleUser(two)
		if otherAddend(two, first) == second && c.soleUser(second) == two &&
			otherAddend(all, two) == third && c.soleUser(third) == all {
			g.dx = append(g.dx, two, all)
			return g
		}
	}

	return nil
}

// fuseProjectionsGrad lowers attention gradient n together with the gradients of the projections, if the
// inputs of the attention are projections.
func (c *compiler) fuseProjectionsGrad(n *gorgonia.Node, in []*program.Array) bool {
	p := c.projected[graph.Children(n)[0]]
	if p == nil || c.Values[p.linear[0]].Stride == 0 {
		return false
	}

	g := p.grad(c, n)
	if g == nil {
		return false
	}

	var weights []*program.Array
	for _, l := range p.linear {
		weights = append(weights, c.Values[graph.Children(l)[1]])
	}

	back := g.linear[0]
	x := c.asActivation(back, c.Values[p.x])
	wide, parts, _ := p.place(c, x)
	c.attentionGrad(n, in, parts[0], parts[1], parts[2], ropeConfigOf(p.rotated[0]))
	c.Values[n] = packed(parts[:]...)
	c.setValues(g.parts, parts)
	c.setValues(g.rotated, parts)
	if g.bias[0] != nil {
		sums, at := c.reduceMiddle(g.bias[0], reduce.Sum, wide, 1,
			wide.Shape[0], wide.Shape[1]), 0
		for _, b := range g.bias {
			part := c.aligned(b, sums.View(at, b.Shape()...))
			at += part.Len()
			c.Values[b] = part
		}
	}

	for _, d := range g.dx {
		c.Values[d] = folded(d)
	}

	if p.frozen != nil {
		c.frozenProjectionsGrad(back, p, g, wide)
		return true
	}

	var dws []*gorgonia.Node
	for _, l := range g.linear {
		dws = append(dws, c.partOf(l, x.Len()))
	}

	w := c.stack(back, weights...)
	dx, dw := c.Like(x), c.weightGradient(w.Shape, dws...)
	c.matmul(back, c.weighted(back, dx, wide, w, true))
	c.matmul(back, program.Product{D: dw, A: wide, B: x, TransA: true})
	at := 0
	for i, l := range g.linear {
		part := c.aligned(back, dw.View(at, weights[i].Shape...))
		at += part.Len()
		c.Values[l] = packed(folded(p.x), part)
	}

	c.Values[g.dx[len(g.dx)-1]] = dx
	return true
}

// frozenProjectionsGrad adds the gradients of projections with frozen weights from the gradients of
// their outputs.
func (c *compiler) frozenProjectionsGrad(n *gorgonia.Node, p *projections, g *projectionsGrad,
	wide *program.Array) {
	o := c.readOutputGrad(n, p.group, g.linear[:], wide)
	if len(g.dx) > 0 {
		dx := c.Like(p.group.x)
		c.addTerm(n, c.weighted(n, dx, wide, p.group.weights, true), o.term)
		c.Values[g.dx[len(g.dx)-1]] = dx
	}
	c.adapterGrads(p.group, g.linear[:], &program.Array{Shape: p.group.x.Shape}, o)
}

func lowerRoPE(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x := c.asActivation(n, in[0])
	y := c.Like(x)
	c.Add(c.rotate(n, y, x))
	return y
}

// rotate returns a call that rotates all heads in the rows of x and writes the result to y, which may be
// x. Node n is the RoPE op, or one of several if x contains the inputs of several.
func (c *compiler) rotate(n *gorgonia.Node, y, x *program.Array) *program.Call {
	o := n.Op().(*op.RoPEOp)
	t := c.rotation(&o.Config)
	a := rope.Rotate{Rows: x.Shape[0], Seq: o.Config.Seq, Heads: x.Shape[1] / o.Config.HeadDim,
		HeadDim: o.Config.HeadDim, XStride: x.Stride, YStride: y.Stride,
		Inverse: o.Inverse, Type: x.Type}
	out := program.Writes(&a.Y, y)
	if y == x {
		out.Role = program.Update
	}

	return newCall(c, n, &a, program.Reads(&a.X, x), out, program.Reads(&a.Cos, t.cos),
		program.Reads(&a.Sin, t.sin))
}

// rotationTables are the cosines and sines of a rotation, shared by ops with equal angles. If a product
// performs the rotation, angles contains both in the order that its kernel expects.
type rotationTables struct{ cos, sin, angles *program.Array }

// rotation returns the tables of a RoPE config. They are empty if o is nil.
func (c *compiler) rotation(o *op.RoPEConfig) *rotationTables {
	key := rotationKey(o)
	if c.rotations[key] == nil {
		c.rotations[key] = &rotationTables{}
		if o != nil {
			cosines, sines := o.Tables()
			*c.rotations[key] = rotationTables{cos: c.NewConstant(float32s(cosines)),
				sin: c.NewConstant(float32s(sines))}
		}
	}
	return c.rotations[key]
}

func float32s(wide []float64) []float32 {
	s := make([]float32, len(wide))
	for i, v := range wide {
		s[i] = float32(v)
	}
	return s
}

// rotationKey returns a key that identifies the angles of a RoPE config, regardless of the number of
// heads. The key of nil is empty.
func rotationKey(o *op.RoPEConfig) string {
	if o == nil {
		return ""
	}
	angles := *o
	angles.Heads, angles.Scaling = 0, nil
	return fmt.Sprint(angles, o.Scaling)
}

// ropeConfigOf returns the RoPE config of a node, or nil if n is nil.
func ropeConfigOf(n *gorgonia.Node) *op.RoPEConfig {
	if n == nil {
		return nil
	}
	return &n.Op().(*op.RoPEOp).Config
}
