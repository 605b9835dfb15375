package cudaops

import (
	"cmp"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
)

// Activations, their gradients and the operands of matrix products are of the machine's activation type. Weights of norms,
// losses, what a forward op leaves for its backward op, and gradients of parameters are float32, but for what weightGradient is for.

// packed is a result that consists of several arrays.
func packed(parts ...*array) *array { return &array{parts: parts} }

// aux is float32 memory that no node stands for.
func (c *compiler) aux(shape ...int) *array { return c.newArray(float32s, shape...) }

// bytes is workspace.
func (c *compiler) bytes(n int) *array { return c.newArray(float32s, (n+3)/4) }

// like is a new array of a's type and shape.
func (c *compiler) like(a *array) *array { return c.newArray(a.elem, a.shape...) }

// as returns a's values in another type: a itself, or a copy that is made once, or for a parameter one that is kept beside
// it and renewed with it.
func (c *compiler) as(n *gorgonia.Node, a *array, e elem) *array {
	if a.elem == e {
		return a
	}
	key := converted{a.block, a.at, a.len(), e}
	if b := c.copies[key]; b != nil {
		return b.view(0, a.shape...)
	}
	m := c.m
	cast := func(b *array) func() error {
		return func() error { return m.k.Cast(m.stream, b.ptr(), b.elem.dtype(), a.ptr(), a.elem.dtype(), a.len()) }
	}
	if in := c.inputOf[a.block]; in != nil && c.m.config.share.owns(in) {
		for _, s := range in.copies {
			if s.elem == e && s.len() == a.len() {
				return s.view(0, a.shape...)
			}
		}
	} else if in != nil && in.constant {
		b := c.newResident(e, a.shape...)
		in.copies = append(in.copies, shadow{b, cast(b)})
		c.copies[key], c.sources[b.block] = b, []*input{in}
		return b
	}
	b := c.newArray(e, a.shape...)
	c.do(n, cast(b), a, b)
	c.copies[key] = b
	return b
}

// act returns a's values as activations.
func (c *compiler) act(n *gorgonia.Node, a *array) *array { return c.as(n, a, c.m.activations()) }

func (c *compiler) lowerPair(n *gorgonia.Node, a, b *array) (*array, *array) {
	return c.act(n, a), c.act(n, b)
}

func lowerLinear(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	return c.linear(n, in, nil)
}

// linear adds a linear layer, to whose result it adds another matrix, if there is one.
func (c *compiler) linear(n *gorgonia.Node, in []*array, add *array) (*array, error) {
	x, w := c.lowerPair(n, in[0], in[1])
	y := c.newArray(x.elem, n.Shape()...)
	return y, c.linearProduct(n, y, x, w, add)
}

func lowerLinearGrad(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	x, w := c.lowerPair(n, in[0], in[1])
	g := c.act(n, in[2])
	dx, dw := c.like(x), c.weightGradient(w.shape, c.partOf(n, x.len()))
	if err := c.linearProductGrad(n, dx, g, w); err != nil {
		return nil, err
	}
	return packed(dx, dw), c.matmul(n, product{d: dw, a: g, b: x, transA: true})
}

func lowerRMSNorm(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	o := n.Op().(*op.RMSNormOp)
	y, _ := c.norm(n, o, c.act(n, in[0]), nil, in[1])
	return y, nil
}

// norm adds a normalisation of x or, where there is a residual, of the sum of both.
func (c *compiler) norm(n *gorgonia.Node, o *op.RMSNormOp, x, residual, weight *array) (y, sum *array) {
	w, m := c.as(n, weight, float32s), c.m
	y, rstd := c.like(x), c.aux(x.shape[0])
	c.saved[o] = rstd
	if residual != nil {
		sum = c.like(x)
	}
	q := c.quantizing(y, c.multiplied(n))
	ascending := residual == nil && isOp[*op.KasminaOp](opbase.Children(n)[0]) // which ends with the first rows
	c.do(n, func() error {
		a := kernels.RMSNorm{Y: y.ptr(), Rstd: rstd.ptr(), X: x.ptr(), W: w.ptr(), Rows: x.shape[0], D: x.shape[1], Eps: o.Eps,
			Type: x.elem.dtype(), Ascending: ascending}
		a.Y8, a.Scale8 = q.pointers()
		if residual != nil {
			a.Residual, a.Sum = residual.ptr(), sum.ptr()
		}
		return m.k.RMSNorm(m.stream, a)
	}, x, residual, w, y, sum, rstd, q.values, q.scales)
	return y, sum
}

func lowerRMSNormGrad(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	return c.normGrad(n, in, nil, c.partOf(n, 0)), nil
}

// normGrad adds the gradients of a normalisation. To that of its input it adds another one, if there is one; node to has the result
// as its value.
func (c *compiler) normGrad(n *gorgonia.Node, in []*array, add *array, to *gorgonia.Node) *array {
	x, w, g := c.act(n, in[0]), c.as(n, in[1], float32s), c.act(n, in[3])
	rstd := c.saved[n.Op().(*op.RMSNormGradOp).Forward].(*array)
	m := c.m
	dx, dw, workspace := c.like(x), c.aux(w.shape...), c.bytes(m.k.RMSNormWorkspace(x.shape[1], x.elem.dtype()))
	left := new(kernels.RMSNormParts)
	q := c.quantizing(dx, c.multiplied(to))
	c.do(n, func() error {
		a := kernels.RMSNormBackward{DX: dx.ptr(), DW: dw.ptr(), G: g.ptr(), X: x.ptr(), W: w.ptr(), Rstd: rstd.ptr(),
			Rows: x.shape[0], D: x.shape[1], Type: x.elem.dtype(), DWType: gpu.Float32, Workspace: workspace.ptr(), Leave: left}
		if add != nil {
			a.Add = add.ptr()
		}
		a.DX8, a.Scale8 = q.pointers()
		return m.k.RMSNormBackward(m.stream, a)
	}, x, w, g, add, rstd, dx, dw, workspace, q.values, q.scales)
	leave(c, &c.normEnds, left, n, []*array{dw}, []*array{workspace})
	return packed(dx, dw)
}

func lowerRoPE(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	x := c.act(n, in[0])
	y := c.like(x)
	c.rotate(n, y, x)
	return y, nil
}

// rotate adds the rotation of all heads in the rows of x, which node n is of, or is of some of. y may be x.
func (c *compiler) rotate(n *gorgonia.Node, y, x *array) {
	o, m := n.Op().(*op.RoPEOp), c.m
	cos, sin := c.tables(o)
	a := ropeOf(o, y, x)
	c.do(n, func() error {
		a.Y, a.X, a.Cos, a.Sin = y.ptr(), x.ptr(), cos.ptr(), sin.ptr()
		return m.k.RoPE(m.stream, a)
	}, x, y)
}

// ropeOf is the rotation of x, whose result is y, but for their addresses and those of the tables.
func ropeOf(o *op.RoPEOp, y, x *array) kernels.RoPE {
	return kernels.RoPE{Rows: x.shape[0], Seq: o.Config.Seq, Heads: x.shape[1] / o.Config.HeadDim, HeadDim: o.Config.HeadDim,
		XStride: x.stride, YStride: y.stride, Inverse: o.Inverse, Type: x.elem.dtype()}
}

// tables returns the cosines and sines of a rotation, which ops with the same angles share.
func (c *compiler) tables(o *op.RoPEOp) (cos, sin *array) {
	t := c.rotation(o)
	return t.cos.array, t.sin.array
}

// rotationTables are the cosines and sines of a rotation and, where a product turns its results, both in the order of that.
type rotationTables struct{ cos, sin, angles table }

func (c *compiler) rotation(o *op.RoPEOp) *rotationTables {
	key := rotationOf(o)
	if c.rotations[key] == nil {
		cosines, sines := o.Config.Tables()
		c.rotations[key] = &rotationTables{cos: c.table(narrow(cosines)), sin: c.table(narrow(sines))}
	}
	return c.rotations[key]
}

// angles is rotation with the table of products.
func (c *compiler) angles(o *op.RoPEOp) *rotationTables {
	t := c.rotation(o)
	if t.angles.array == nil {
		t.angles = c.table(kernels.RoPEAngles(t.cos.data, t.sin.data, o.Config.HeadDim/2))
	}
	return t
}

func (c *compiler) table(data []float32) table { return table{c.constant(data), data} }

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

func rotationOf(o *op.RoPEOp) rotation {
	r := rotation{config: o.Config}
	r.config.Heads, r.config.Scaling = 0, nil
	if o.Config.Scaling != nil {
		r.scaling = *o.Config.Scaling
	}
	return r
}

func rowsOf(a *array) kernels.Rows {
	return kernels.Rows{Ptr: a.ptr(), Stride: cmp.Or(a.stride, a.shape[1])}
}

func attentionShape(o *op.AttentionOp, rows int) kernels.AttentionShape {
	c := o.Config
	return kernels.AttentionShape{Batch: rows / c.Seq, Seq: c.Seq, Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim,
		Causal: c.Causal, Scale: c.Scale}
}

func lowerAttention(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	q, k := c.lowerPair(n, in[0], in[1])
	v := c.act(n, in[2])
	o := n.Op().(*op.AttentionOp)
	s := attentionShape(o, q.shape[0])
	documents := c.documentsOf(n, o, in)
	y, lse, m := c.like(q), c.aux(s.Batch, s.Heads, s.Seq), c.m
	c.saved[o] = lse
	c.do(n, func() error {
		if documents != nil {
			s.Documents = documents.ptr()
		}
		return m.k.Attention(m.stream, s, rowsOf(y), lse.ptr(), rowsOf(q), rowsOf(k), rowsOf(v), q.elem.dtype())
	}, y, lse, q, k, v, documents)
	if documents == nil { // of these, the lengths decide how much there is to compute
		c.computes(attentionFLOPs(s, 2))
	}
	return y, nil
}

// packing is where the documents of sequences of seq tokens start.
type packing struct {
	starts *array
	seq    int
}

// documentsOf returns the table of where documents start, which all attentions to the same share, nil if o knows of none.
func (c *compiler) documentsOf(n *gorgonia.Node, o *op.AttentionOp, in []*array) *array {
	if !o.Documents() {
		return nil
	}
	starts, seq, m := in[3], o.Config.Seq, c.m
	if table := c.documents[packing{starts, seq}]; table != nil {
		return table
	}
	c.bound(starts, idRange{op: "DocumentAttention", argument: "starts", seq: seq})
	batch := starts.len() / seq
	table := c.bytes(kernels.AttentionDocumentsBytes(batch, seq))
	c.do(n, func() error {
		return m.k.AttentionDocuments(m.stream, table.ptr(), intsOf(starts), batch, seq)
	}, starts, table)
	c.documents[packing{starts, seq}] = table
	return table
}

func lowerAttentionGrad(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	q, k, v := in[0], in[1], in[2]
	e := c.m.activations()
	dq, dk, dv := c.newArray(e, q.shape...), c.newArray(e, k.shape...), c.newArray(e, v.shape...)
	return packed(dq, dk, dv), c.attentionGrad(n, in, dq, dk, dv, nil)
}

// attentionGrad adds the gradients of an attention. Where queries and keys have been turned, those of what they were before.
func (c *compiler) attentionGrad(n *gorgonia.Node, in []*array, dq, dk, dv *array, turned *op.RoPEOp) error {
	q, k := c.lowerPair(n, in[0], in[1])
	v, y, g := c.act(n, in[2]), c.act(n, in[len(in)-2]), c.act(n, in[len(in)-1])
	o := n.Op().(*op.AttentionGradOp).Forward
	documents := c.documentsOf(n, o, in)
	lse, t, m := c.saved[o].(*array), q.elem.dtype(), c.m
	var cos, sin *array
	if turned != nil {
		cos, sin = c.tables(turned)
	}
	shape := func() kernels.AttentionShape {
		s := attentionShape(o, q.shape[0])
		if turned != nil {
			s.Cos, s.Sin = cos.ptr(), sin.ptr()
		}
		if documents != nil {
			s.Documents = documents.ptr()
		}
		return s
	}
	s := attentionShape(o, q.shape[0])
	stats := c.bytes(m.k.AttentionStatsBytes(s, t))
	c.do(n, func() error {
		return m.k.AttentionBackward(m.stream, shape(), rowsOf(dq), rowsOf(dk), rowsOf(dv), stats.ptr(), rowsOf(g), rowsOf(q), rowsOf(k),
			rowsOf(v), rowsOf(y), lse.ptr(), t)
	}, q, k, v, y, g, lse, dq, dk, dv, stats, documents)
	if documents == nil {
		c.computes(attentionFLOPs(s, 5))
	}
	return nil
}

// stack returns matrices of as many columns as activations, one above the other, so that one product serves all. Of
// parameters the stack is kept, and renewed with them; of others it is made in every run.
func (c *compiler) stack(n *gorgonia.Node, all ...*array) *array {
	var key stacked
	var inputs []*input
	rows, kept := 0, true
	for i, a := range all {
		key[i] = converted{a.block, a.at, a.len(), a.elem}
		in := c.inputOf[a.block]
		inputs = append(inputs, in)
		rows += a.shape[0]
		kept = kept && in != nil && in.constant && !c.m.config.share.owns(in)
	}
	if s := c.stacks[key]; s != nil {
		return s
	}
	e, m := c.m.activations(), c.m
	s := c.sharedStack(inputs, all, e)
	if s != nil {
		c.stacks[key] = s
		return s
	}
	if s = c.newArray(e, rows, all[0].shape[1]); kept {
		s = c.newResident(e, s.shape...)
		c.sources[s.block] = inputs
	}
	c.stacks[key] = s
	at := 0
	for i, a := range all {
		to := s.view(at, a.shape...)
		at += a.len()
		run := func() error { return m.k.Cast(m.stream, to.ptr(), e.dtype(), a.ptr(), a.elem.dtype(), a.len()) }
		if kept {
			inputs[i].copies = append(inputs[i].copies, shadow{to, run})
		} else {
			c.do(n, run, to, a)
		}
	}
	return s
}

// sharedStack returns the stack of parameters that the machine they belong to keeps, nil if there is none.
func (c *compiler) sharedStack(inputs []*input, all []*array, e elem) *array {
	var first *array
	rows, at := 0, 0
	for i, in := range inputs {
		if in == nil || !c.m.config.share.owns(in) {
			return nil
		}
		j := slices.IndexFunc(in.copies, func(s shadow) bool {
			return s.elem == e && s.len() == all[i].len() && (i == 0 || s.block == first.block && s.at == first.at+at*e.size())
		})
		if j < 0 {
			return nil
		}
		if i == 0 {
			first = in.copies[j].array
		}
		rows += all[i].shape[0]
		at += all[i].len()
	}
	return first.view(0, rows, all[0].shape[1])
}

// stacked is the matrices of a stack, at most three.
type stacked [3]converted

// vectorBytes is what optimisers read at once.
const vectorBytes = 16

// aligned returns a, or a copy of it where it begins at an address that optimisers do not take.
func (c *compiler) aligned(n *gorgonia.Node, a *array) *array {
	if a.at%vectorBytes == 0 {
		return a
	}
	b, m := c.like(a), c.m
	c.do(n, func() error { return m.k.Cast(m.stream, b.ptr(), b.elem.dtype(), a.ptr(), a.elem.dtype(), a.len()) }, a, b)
	return b
}

func intsOf(a *array) kernels.Ints { return kernels.Ints{Ptr: a.ptr(), Wide: true} }

func lowerEmbedding(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	ids, table := in[0], c.act(n, in[1])
	c.bound(ids, idRange{op: "Embedding", argument: "ids", vocab: table.shape[0]})
	y, m := c.newArray(table.elem, n.Shape()...), c.m
	c.do(n, func() error {
		return m.k.Embedding(m.stream, kernels.Embedding{Y: y.ptr(), IDs: intsOf(ids), Table: table.ptr(), Rows: y.shape[0],
			Vocab: table.shape[0], D: table.shape[1], Type: y.elem.dtype(), TableType: table.elem.dtype()})
	}, ids, table, y)
	return y, nil
}

func lowerEmbeddingGrad(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	dt := c.aux(n.Shape()...)
	c.embeddingGrad(n, in[0], in[1], dt, false)
	return dt, nil
}

// embeddingGrad adds the gradient of a table, which is written to dt or added to what is there.
func (c *compiler) embeddingGrad(n *gorgonia.Node, ids, g, dt *array, add bool) {
	g = c.act(n, g)
	m := c.m
	workspace := c.bytes(kernels.EmbeddingWorkspace(g.shape[0], dt.shape[0], dt.shape[1]))
	c.do(n, func() error {
		return m.k.EmbeddingBackward(m.stream, kernels.EmbeddingBackward{DT: dt.ptr(), IDs: intsOf(ids), G: g.ptr(), Rows: g.shape[0],
			Vocab: dt.shape[0], D: dt.shape[1], DTType: gpu.Float32, GType: g.elem.dtype(), Workspace: workspace.ptr(), Accumulate: add})
	}, ids, g, dt, workspace)
}

// classified is what a cross-entropy leaves: 1/(number of targets), each row's log-sum-exp and, for the fused op, the
// gradients for a gradient of 1.
type classified struct{ scale, lse, dx, dw *array }

func lowerCrossEntropy(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	logits, targets := c.act(n, in[0]), in[1]
	rows, v, m := logits.shape[0], logits.shape[1], c.m
	c.bound(targets, idRange{op: "CrossEntropy", argument: "targets", vocab: v, negative: true})
	loss, losses, saved := c.aux(), c.aux(rows), classified{scale: c.aux(1), lse: c.aux(rows)}
	c.saved[n.Op()] = saved
	c.do(n, func() error {
		if err := m.k.CrossEntropyScale(m.stream, saved.scale.ptr(), intsOf(targets), rows); err != nil {
			return err
		}
		if err := m.k.CrossEntropy(m.stream, kernels.CrossEntropy{Logits: logits.ptr(), Losses: losses.ptr(), LSE: saved.lse.ptr(),
			Targets: intsOf(targets), Rows: rows, V: v, Type: logits.elem.dtype()}); err != nil {
			return err
		}
		return m.k.CrossEntropyMean(m.stream, loss.ptr(), losses.ptr(), saved.scale.ptr(), rows)
	}, logits, targets, loss, losses, saved.scale, saved.lse)
	return loss, nil
}

func lowerCrossEntropyGrad(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	logits, targets, g := c.act(n, in[0]), in[1], c.as(n, in[3], float32s)
	saved := c.saved[n.Op().(*op.CrossEntropyGradOp).Forward].(classified)
	d, m := c.like(logits), c.m
	c.do(n, func() error {
		return m.k.CrossEntropyBackward(m.stream, d.ptr(), kernels.CrossEntropy{Logits: logits.ptr(), LSE: saved.lse.ptr(),
			Targets: intsOf(targets), Scale: saved.scale.ptr(), Grad: g.ptr(), Rows: logits.shape[0], V: logits.shape[1], Type: logits.elem.dtype()})
	}, logits, targets, g, saved.scale, saved.lse, d)
	return d, nil
}
