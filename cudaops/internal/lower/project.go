package lower

import (
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	reducekernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/reduce"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/rope"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/op/kvcache"
)

// The queries, keys and values of an attention are mostly x·Wqᵀ, x·Wkᵀ and x·Wvᵀ, the first two
// turned by RoPE. They are lowered as
//
//	[q | k | v] = x·[Wq; Wk; Wv]ᵀ,  d[Wq; Wk; Wv] = [dq | dk | dv]ᵀ·x,  dx = [dq | dk | dv]·[Wq; Wk; Wv]
//
// one product each in place of three and two sums. Attention and RoPE read and write columns of the
// wide matrices, RoPE in place or, where that is faster, the product in its stead. Attention's
// gradient turns dq and dk back itself. Biases lie side by side too: one sum adds them, and one
// forms their gradients.

// projections is such queries, keys and values.
type projections struct {
	x      *gorgonia.Node
	linear [3]*gorgonia.Node
	bias   [3]*gorgonia.Node // behind them; nil where there is none
	turned [2]*gorgonia.Node // queries and keys; nil where nothing turns them
}

// projections returns how the first three inputs of an attention, or of its gradient, come about,
// nil if not like this. The op o is nil for attention to what is kept, which turns them itself.
// Nobody but the attention and its gradient may use them, as no other op knows matrices whose rows
// have gaps.
func (c *compiler) projections(n *gorgonia.Node, o *op.AttentionOp) *projections {
	p := &projections{}
	byAttention := func(u *gorgonia.Node) bool {
		return attends(u) || isOp[*op.AttentionGradOp](u)
	}
	for i, n := range graph.Children(n)[:3] {
		if !c.onlyUsedBy(n, byAttention) {
			return nil
		}
		if r, ok := n.Op().(*op.RoPEOp); ok && i < 2 && !r.Inverse && o != nil &&
			r.Config.Seq == o.Config.Seq && r.Config.HeadDim == o.Config.HeadDim {
			p.turned[i] = n
			turned := n
			n = graph.Children(n)[0]
			if !c.onlyUsedBy(n, func(u *gorgonia.Node) bool { return u == turned }) {
				return nil
			}
		}
		if isOp[*op.BiasOp](n) {
			p.bias[i] = n
			biased := n
			n = graph.Children(n)[0]
			if !c.onlyUsedBy(n, func(u *gorgonia.Node) bool { return u == biased }) {
				return nil
			}
		}
		if !isOp[*op.LinearOp](n) || (p.bias[i] == nil) != (p.bias[0] == nil) ||
			slices.Contains(p.linear[:i], n) || i > 0 && graph.Children(n)[0] != p.x {
			return nil
		}
		p.x, p.linear[i] = graph.Children(n)[0], n
	}
	if !sameRotation(p.turned[0], p.turned[1]) {
		return nil
	}
	return p
}

// attends reports whether a node is an attention.
func attends(n *gorgonia.Node) bool {
	return isOp[*op.AttentionOp](n) || isOp[*kvcache.AttentionOp](n)
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
	return rotationOf(x.Config) == rotationOf(y.Config) && x.Inverse == y.Inverse
}

// place returns the columns of the queries, keys and values in a matrix that holds them side by
// side. It also returns those of the first two together.
func (p *projections) place(wide *program.Array) (parts [3]*program.Array, both *program.Array) {
	at := 0
	for i, n := range p.linear {
		width := n.Shape()[1]
		parts[i] = wide.Columns(at, width)
		if at += width; i == 1 {
			both = wide.Columns(0, at)
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
	for range 3 { // past a bias and RoPE, to the attention
		i := slices.IndexFunc(c.users[at], func(u *gorgonia.Node) bool {
			return attends(u) || isOp[*op.RoPEOp](u) || isOp[*op.BiasOp](u)
		})
		if i < 0 {
			return false, nil
		}
		if at = c.users[at][i]; attends(at) {
			break
		}
	}
	if !attends(at) {
		return false, nil
	}
	o, _ := at.Op().(*op.AttentionOp)
	p := c.projections(at, o)
	if p == nil || !slices.Contains(p.linear[:], n) {
		return false, nil
	}
	var weights, biases []*program.Array
	for i, l := range p.linear {
		w := c.there(graph.Children(l)[1])
		if w == nil {
			return false, nil
		}
		weights = append(weights, w)
		if p.bias[i] == nil {
			continue
		}
		b := c.there(graph.Children(p.bias[i])[1])
		if b == nil {
			return false, nil
		}
		biases = append(biases, b.View(0, b.Len(), 1))
	}
	x := c.act(n, c.Values[p.x])
	wide := c.NewArray(x.Type, x.Shape[0], p.width())
	parts, both := p.place(wide)
	if len(biases) > 0 {
		c.projectBiased(n, p.turned[0], wide, both, x, c.stack(n, weights...),
			c.stack(n, biases...))
	} else if err := c.project(n, p.turned[0], wide, both, x, c.stack(n, weights...)); err != nil {
		return false, err
	}
	for i, l := range p.linear {
		c.Values[l] = parts[i]
		if p.bias[i] != nil {
			c.Values[p.bias[i]] = parts[i]
		}
	}
	if p.turned[0] != nil {
		c.Values[p.turned[0]], c.Values[p.turned[1]] = parts[0], parts[1]
	}
	return true, nil
}

// project adds wide = x·weightsᵀ, whose columns both are turned as the node turned has it, unless
// that is nil.
func (c *compiler) project(n, turned *gorgonia.Node, wide, both, x, weights *program.Array) error {
	if turned == nil {
		c.linearProduct(n, wide, x, weights, nil)
		return nil
	}
	o := turned.Op().(*op.RoPEOp)
	s := gemm.RoPEProductShape{Rows: x.Shape[0], Columns: wide.Shape[1], D: x.Shape[1],
		Turned: both.Shape[1],
		Seq:    o.Config.Seq, HeadDim: o.Config.HeadDim,
		Float8: c.float8(x.Shape[0], weights.Shape[0], weights.Shape[1])}
	p := program.Product{D: wide, A: x, B: weights, TransB: true}
	if s.Float8 {
		p = float8Product(wide, c.quantize(n, x), c.quantizeWeight(n, weights, false))
	}
	several := []*program.Call{c.newProduct(n, p), c.rotate(turned, both, both)}
	one := gemm.RoPEProduct{RoPEProductShape: s, Type: x.Type}
	if len(c.o.Ways(one)) == 0 {
		c.Calls = append(c.Calls, several...)
		return nil
	}
	_, err := c.either(fusion{several: several,
		one: c.fusedCall(n, p, one, program.Writes("Y", wide),
			program.Reads("X", p.A), program.Reads("Weights", p.B),
			program.Reads("ScaleX", p.ScaleA),
			program.Reads("ScaleWeights", p.ScaleB), program.Reads("Angles", c.angles(o).angles))})
	return err
}

// projectBiased is project for wide = x·weightsᵀ + biases, in calls of their own.
func (c *compiler) projectBiased(n, turned *gorgonia.Node, wide, both, x, weights,
	biases *program.Array) {
	y := c.like(wide)
	c.linearProduct(n, y, x, weights, nil)
	c.map2(n, elementwise.Add, wide, repeated{Array: y},
		repeated{biases, spread{repeat: 1, period: biases.Len()}})
	if turned != nil {
		c.Add(c.rotate(turned, both, both))
	}
}

// projectionsGrad is the nodes between an attention's gradient and the gradient of x.
type projectionsGrad struct {
	parts, linear, bias [3]*gorgonia.Node
	turned              [2]*gorgonia.Node
	// the three that add up to the gradient of x, and their sums: that of all three comes last
	dx []*gorgonia.Node
}

// grad returns those nodes for the gradient n of the attention, nil if anything else uses what
// would be left out.
func (p *projections) grad(c *compiler, n *gorgonia.Node) *projectionsGrad {
	g := &projectionsGrad{}
	offset := 0
	for i, l := range p.linear {
		d := c.partOf(n, offset)
		offset += opbase.Size(l.Shape())
		if d == nil {
			return nil
		}
		g.parts[i] = d
		if i < 2 && p.turned[i] != nil {
			if d = c.sole(d); d == nil {
				return nil
			}
			if o, ok := d.Op().(*op.RoPEOp); !ok || !o.Inverse ||
				rotationOf(o.Config) != rotationOf(p.turned[i].Op().(*op.RoPEOp).Config) {
				return nil
			}
			g.turned[i] = d
		}
		back := c.sole(d)
		if p.bias[i] != nil {
			back, g.bias[i] = c.both(d)
		}
		if back == nil || !isOp[*op.LinearGradOp](back) {
			return nil
		}
		in, want := graph.Children(back), graph.Children(l)
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
		i := slices.IndexFunc(rest, func(n *gorgonia.Node) bool {
			return slices.Contains(rest, other(c.sole(n), n))
		})
		if i < 0 {
			return nil
		}
		sum := c.sole(rest[i])
		second := other(sum, rest[i])
		if c.sole(second) != sum {
			return nil
		}
		g.dx = append(g.dx, sum)
		rest = append(slices.DeleteFunc(rest, func(n *gorgonia.Node) bool {
			return other(sum, n) != nil
		}), sum)
	}
	return g
}

// both returns the gradients of a linear layer and of the bias behind it, which alone use d, nil if
// there are others or none.
func (c *compiler) both(d *gorgonia.Node) (linear, bias *gorgonia.Node) {
	if !c.onlyUsedBy(d, func(u *gorgonia.Node) bool {
		return isOp[*op.LinearGradOp](u) || isOp[*op.BiasGradOp](u)
	}) ||
		len(c.users[d]) != 2 {
		return nil, nil
	}
	for _, u := range c.users[d] {
		if isOp[*op.BiasGradOp](u) {
			bias = u
		} else {
			linear = u
		}
	}
	if bias == nil {
		return nil, nil
	}
	return linear, bias
}

// fuseProjectionsGrad lowers the gradient n of an attention with those of the projections that its
// inputs are.
func (c *compiler) fuseProjectionsGrad(n *gorgonia.Node) (bool, error) {
	p := c.projections(n, n.Op().(*op.AttentionGradOp).Forward)
	if p == nil || c.Values[p.linear[0]].Stride == 0 {
		return false, nil
	}
	g := p.grad(c, n)
	if g == nil {
		return false, nil
	}
	var weights []*program.Array
	for _, l := range p.linear {
		weights = append(weights, c.Values[graph.Children(l)[1]])
	}
	back := g.linear[0]
	x, w := c.act(back, c.Values[p.x]), c.stack(back, weights...)
	wide := c.NewArray(x.Type, x.Shape[0], p.width())
	parts, _ := p.place(wide)
	var turned *op.RoPEOp
	if p.turned[0] != nil {
		turned = p.turned[0].Op().(*op.RoPEOp)
		c.Values[g.turned[0]], c.Values[g.turned[1]] = parts[0], parts[1]
	}
	c.attentionGrad(n, c.operands(n), parts[0], parts[1], parts[2], turned)
	c.Values[n] = packed(parts[:]...)
	for i, d := range g.parts {
		c.Values[d] = parts[i]
	}
	if g.bias[0] != nil {
		sums, at := c.reduceMiddle(g.bias[0], reducekernel.Sum, wide, 1,
			wide.Shape[0], wide.Shape[1]), 0
		for _, b := range g.bias {
			part := c.aligned(b, sums.View(at, b.Shape()...))
			at += part.Len()
			c.Values[b] = part
		}
	}
	var dws []*gorgonia.Node
	for _, l := range g.linear {
		dws = append(dws, c.partOf(l, x.Len()))
	}
	dx, dw := c.like(x), c.weightGradient(w.Shape, dws...)
	c.linearProductGrad(back, dx, wide, w, nil)
	c.matmul(back, program.Product{D: dw, A: wide, B: x, TransA: true})
	at := 0
	for i, l := range g.linear {
		part := c.aligned(back, dw.View(at, weights[i].Shape...))
		at += part.Len()
		c.Values[l] = packed(folded(p.x), part)
	}
	for _, d := range g.dx {
		c.Values[d] = folded(d)
	}
	c.Values[g.dx[len(g.dx)-1]] = dx
	return true, nil
}

func lowerRoPE(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	x := c.act(n, in[0])
	y := c.like(x)
	c.Add(c.rotate(n, y, x))
	return y, nil
}

// rotate is the rotation of all heads in the rows of x, which node n is of, or is of some of. The
// result y may be x.
func (c *compiler) rotate(n *gorgonia.Node, y, x *program.Array) *program.Call {
	o := n.Op().(*op.RoPEOp)
	t := c.rotation(o.Config)
	a := rope.Rotate{Rows: x.Shape[0], Seq: o.Config.Seq, Heads: x.Shape[1] / o.Config.HeadDim,
		HeadDim: o.Config.HeadDim, XStride: x.Stride, YStride: y.Stride,
		Inverse: o.Inverse, Type: x.Type}
	out := program.Writes("Y", y)
	if y == x {
		out.Role = program.Update
	}
	return c.newCall(n, a, program.Reads("X", x), out, program.Reads("Cos", t.cos),
		program.Reads("Sin", t.sin))
}

// rotationTables are the cosines and sines of a rotation, which ops with the same angles share.
// Where a product turns its results they have both in the order of that.
type rotationTables struct{ cos, sin, angles *program.Array }

func (c *compiler) rotation(o op.RoPEConfig) *rotationTables {
	key := rotationOf(o)
	if c.rotations[key] == nil {
		cosines, sines := o.Tables()
		c.rotations[key] = &rotationTables{cos: c.NewConstant(narrow(cosines)),
			sin: c.NewConstant(narrow(sines))}
	}
	return c.rotations[key]
}

// angles is rotation with the table of products.
func (c *compiler) angles(o *op.RoPEOp) *rotationTables {
	t := c.rotation(o.Config)
	if t.angles == nil {
		t.angles = c.NewConstant(gemm.RoPEAngles(t.cos.Data, t.sin.Data, o.Config.HeadDim/2))
	}
	return t
}

func narrow(wide []float64) []float32 {
	s := make([]float32, len(wide))
	for i, v := range wide {
		s[i] = float32(v)
	}
	return s
}

// rotation is the angles of a RoPE, whatever the number of heads.
type rotation struct {
	config  op.RoPEConfig
	scaling op.RoPEScaling
}

func rotationOf(o op.RoPEConfig) rotation {
	r := rotation{config: o}
	r.config.Heads, r.config.Scaling = 0, nil
	if o.Scaling != nil {
		r.scaling = *o.Scaling
	}
	return r
}
