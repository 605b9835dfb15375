package lower

import (
	"math"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/crossentropy"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/op"
)

func init() {
	register[*op.CrossEntropyOp](lowerCrossEntropy, nil)
	register[*op.CrossEntropyGradOp](lowerCrossEntropyGrad, linearIn(3))
	register[*op.LinearCrossEntropyOp](lowerLinearCrossEntropy, nil)
	register[*op.LinearCrossEntropyGradOp](lowerLinearCrossEntropyGrad, linearIn(4))
}

// logitBytes is the maximum size of the logits that the fused output layer holds at a time; it is doubled
// for models with at most narrowFeatures features. This is enough to fill a GPU, and little compared with
// the activations of a model with a large vocabulary. On an H200, doubling the limit saves 1% of a step
// at 768 and 1024 features, and nothing at 2048.
const (
	logitBytes     = 600 << 20
	narrowFeatures = 1024
)

// outputChunk returns the number of rows that the output layer processes at a time.
//
// The gradient of its input, with d columns, is a product with few blocks that each iterate over the
// whole vocabulary. Its time depends on the total number of waves that these blocks need on the GPU's
// multiprocessors, so outputChunk minimizes that number. Fewer chunks also mean fewer additions to the
// gradient of the weights.
func outputChunk(rows, vocab, d, size, multiprocessors int) int {
	const tile, width = 128, 256 // dimensions of a cuBLASLt block
	up := kernel.CeilDiv
	most := logitBytes
	if d <= narrowFeatures {
		most *= 2
	}

	fewest := up(rows, max(tile, most/(vocab*size)/tile*tile))
	best, least := 0, math.MaxInt
	for n := fewest; n <= 2*fewest; n++ {
		chunk := min(rows, up(up(rows, n), tile)*tile)
		if turns := n * up(up(chunk, tile)*up(d, width), multiprocessors); turns < least {
			best, least = chunk, turns
		}
	}

	return best
}

// lowerLinearCrossEntropy lowers the loss and, if the graph contains the backward op, the gradients, so
// that the logits are computed only once. The gradients are computed for the actual gradient of the loss
// if it is a known constant, and otherwise for 1 or the loss scale.
func lowerLinearCrossEntropy(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x, w := c.asActivations(n, in[0], in[1])
	targets := in[2]
	v, d := w.Shape[0], x.Shape[1]
	losses, saved := c.classify(n, targets, v)
	saved.upstream = c.Scale
	if back := c.gradients[n.Op()]; len(back) > 0 { // the graph contains the backward op
		saved.dx = c.Like(x)
		if !n.Op().(*op.LinearCrossEntropyOp).Frozen {
			saved.dw = c.aux(w.Shape...)
		}
		if g, ok := factor(graph.Children(back[0])[4]); ok && g != 1 && len(back) == 1 &&
			c.Scale == nil {
			saved.upstream = c.NewConstant([]float32{float32(g)})
		}
	}

	c.saved[n.Op()] = saved
	c.outputChunks(n, x, w, func(o outputRows, lo, here int) {
		o.losses, o.targets, o.lossState = losses.View(lo, here), targets.View(lo, here), saved
		o.beta = min(1, float32(lo))
		if o.dx != nil {
			o.dx = o.dx.View(lo*d, here, d)
		}
		c.outputRows(o)
	})

	return c.meanLoss(n, losses, saved.scale)
}

// outputRows describes a chunk of the output layer's rows. dx is nil if no gradients are needed.
type outputRows struct {
	node                          *gorgonia.Node
	x, w, logits, losses, targets *program.Array
	lossState
	beta float32 // factor for the dw of previous chunks
}

// outputRows adds the losses of a chunk and, if needed, their gradients.
func (c *compiler) outputRows(o outputRows) {
	n, p := o.node, program.Product{D: o.logits, A: o.x, B: o.w, TransB: true}
	a := crossentropy.Forward{Rows: o.x.Shape[0], V: o.w.Shape[0], Type: o.x.Type}
	if o.dx == nil {
		c.matmul(n, p)
		addCall(c, n, &a, program.Reads(&a.Logits, o.logits), program.Writes(&a.Losses, o.losses),
			program.Reads(&a.Targets, o.targets))
		return
	}

	// The gradient overwrites the logits.
	several := []*program.Call{c.newProduct(n, p),
		newCall(c, n, &a, program.Updates(&a.Logits, o.logits),
			program.Writes(&a.Losses, o.losses), program.Reads(&a.Targets, o.targets),
			program.Reads(&a.Scale, o.scale), program.Reads(&a.Grad, o.upstream))}
	scaled, factors := c.Like(o.x), c.aux(o.x.Shape[0])
	// The fused kernel computes the exponentials within the product: see [gemm.LinearCrossEntropy].
	// Timing uses logits with standard deviation 4.
	d := o.x.Shape[1]
	f := gemm.LinearCrossEntropy{Rows: a.Rows, V: a.V, D: d, Type: o.x.Type}
	x := program.Reads(&f.X, o.x)
	x.Deviation = 4 / math.Sqrt(float64(d))
	one := c.addProduct(several, true, newCall(c, n, &f, program.Uses(&f.Terms, o.logits),
		program.Uses(&f.Scaled, scaled), program.Uses(&f.Factors, factors),
		program.Writes(&f.Losses, o.losses), x, program.Reads(&f.W, o.w),
		program.Reads(&f.Targets, o.targets), program.Reads(&f.Scale, o.scale),
		program.Reads(&f.Grad, o.upstream)))
	c.matmul(n, program.Product{D: o.dx, A: o.logits, B: o.w})
	if one {
		s := gemm.ScaleRows{Rows: o.dx.Shape[0], D: o.dx.Shape[1]}
		addCall(c, n, &s, program.Updates(&s.X, o.dx), program.Reads(&s.Factors, factors))
		o.x = scaled
	}

	if o.dw == nil {
		return
	}

	c.matmul(n, program.Product{D: o.dw, A: o.logits, B: o.x, TransA: true, Beta: o.beta})
}

func lowerLinearCrossEntropyGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	saved := c.saved[n.Op().(*op.LinearCrossEntropyGradOp).Forward].(lossState)
	if saved.upstream != c.Scale || isOne(graph.Children(n)[4]) {
		return saved.gradients()
	}
	upstream := c.as(n, in[4], gpu.Float32)
	if c.Scale != nil { // both already include the loss scale
		upstream = c.map2(n, elementwise.Div, c.Like(upstream), upstream, c.Scale.View(0))
	}

	saved.dx = c.multiply(n, saved.dx, upstream)
	if saved.dw != nil {
		saved.dw = c.multiply(n, saved.dw, upstream)
	}

	return saved.gradients()
}

// gradients returns the packed gradients of the fused op. A frozen weight has none.
func (s lossState) gradients() *program.Array {
	if s.dw == nil {
		return packed(s.dx)
	}
	return packed(s.dx, s.dw)
}

// factor returns the value of a node that is a known number or a product of known numbers.
func factor(n *gorgonia.Node) (x float64, ok bool) {
	if graph.Symbol(n) != "⊙" {
		return number(n)
	}

	x = 1
	for _, child := range graph.Children(n) {
		f, ok := factor(child)
		if !ok {
			return 0, false
		}
		x *= f
	}

	return x, true
}

// lossState holds data that a cross-entropy saves for its gradient: 1/(number of targets), and the
// normalizer of each row. The fused op also saves the gradients, and the gradient of the loss assumed
// in computing them, where nil means 1.
type lossState struct{ scale, normalizers, dx, dw, upstream *program.Array }

func lowerCrossEntropy(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	logits, targets := c.asActivation(n, in[0]), in[1]
	rows, v := logits.Shape[0], logits.Shape[1]
	losses, saved := c.classify(n, targets, v)
	saved.normalizers = c.aux(rows, 2)
	c.saved[n.Op()] = saved
	a := crossentropy.Forward{Rows: rows, V: v, Type: logits.Type}
	addCall(c, n, &a, program.Reads(&a.Logits, logits), program.Reads(&a.Targets, targets),
		program.Writes(&a.Losses, losses), program.Writes(&a.Normalizers, saved.normalizers))
	return c.meanLoss(n, losses, saved.scale)
}

// classify performs the common first steps of cross-entropy ops: it constrains the targets, allocates the
// losses, and adds a call that computes 1/(number of targets).
func (c *compiler) classify(n *gorgonia.Node, targets *program.Array,
	vocab int) (losses *program.Array, s lossState) {
	c.constrain(n, targets, program.IDRange{Argument: "targets", Vocab: vocab, Negative: true})
	losses, s.scale = c.aux(targets.Len()), c.aux(1)
	a := crossentropy.Scale{Rows: targets.Len()}
	addCall(c, n, &a, program.Writes(&a.Scale, s.scale), program.Reads(&a.Targets, targets))
	return losses, s
}

// meanLoss adds the mean loss over all rows that have a target.
func (c *compiler) meanLoss(n *gorgonia.Node, losses, scale *program.Array) *program.Array {
	loss := c.aux()
	a := crossentropy.Mean{Rows: losses.Len()}
	addCall(c, n, &a, program.Writes(&a.Mean, loss), program.Reads(&a.Losses, losses),
		program.Reads(&a.Scale, scale))
	return loss
}

func lowerCrossEntropyGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	logits, targets, g := c.asActivation(n, in[0]), in[1], c.as(n, in[3], gpu.Float32)
	saved := c.saved[n.Op().(*op.CrossEntropyGradOp).Forward].(lossState)
	d := c.Like(logits)
	a := crossentropy.Backward{Forward: crossentropy.Forward{Rows: logits.Shape[0],
		V: logits.Shape[1], Type: logits.Type}}
	addCall(c, n, &a, program.Writes(&a.Out, d), program.Reads(&a.Logits, logits),
		program.Reads(&a.Normalizers, saved.normalizers), program.Reads(&a.Targets, targets),
		program.Reads(&a.Scale, saved.scale), program.Reads(&a.Grad, g))
	return d
}
