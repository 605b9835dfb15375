package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/crossentropy"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/op"
)

func init() {
	register[*op.LinearLogProbsOp](lowerLinearLogProbs, nil)
	register[*op.LinearLogProbsGradOp](lowerLinearLogProbsGrad, linearIn(4))
}

// The log-probability of a row is the negative of its cross-entropy. The gradient of x is therefore the one of the
// sum of the cross-entropies, with each row multiplied by the negative gradient of its log-probability:
//
//	dx[r] = −g[r]·(softmax(x[r]·wᵀ) − onehot(targets[r]))·w
//
// With a frozen w, the forward pass computes dx but for this factor, so that the logits are computed only once.

// logProbsState holds data that the forward pass saves: the number 1 and, if w is frozen, the gradient of the sum of
// the cross-entropies.
type logProbsState struct{ one, dx *program.Array }

func lowerLinearLogProbs(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x, w := c.asActivations(n, in[0], in[1])
	targets, saved := in[2], logProbsState{one: c.NewConstant([]float32{1})}
	c.constrain(n, targets, program.IDRange{Argument: "targets", Vocab: w.Shape[0], Negative: true})
	if n.Op().(*op.LinearLogProbsOp).Frozen && len(c.gradients[n.Op()]) > 0 {
		saved.dx = c.Like(x)
	}

	c.saved[n.Op()] = saved
	losses := c.aux(targets.Len())
	c.outputChunks(n, x, w, func(o outputRows, lo, rows int) {
		o.losses, o.targets, o.scale = losses.View(lo, rows), targets.View(lo, rows), saved.one
		if saved.dx != nil {
			o.dx = saved.dx.View(lo*x.Shape[1], rows, x.Shape[1])
		}
		c.outputRows(o)
	})
	return c.map1(n, elementwise.Neg, c.aux(targets.Len()), losses, 0)
}

// outputChunks calls add for the chunks of an output layer's rows, with their x and logits, their first row and
// their number of rows.
func (c *compiler) outputChunks(n *gorgonia.Node, x, w *program.Array, add func(o outputRows, lo, rows int)) {
	rows, v, d := x.Shape[0], w.Shape[0], x.Shape[1]
	chunk := outputChunk(rows, v, d, x.Type.Size(), c.o.Device.SMs)
	logits := c.NewArray(x.Type, chunk, v)
	for lo := 0; lo < rows; lo += chunk {
		here := min(chunk, rows-lo)
		add(outputRows{node: n, x: x.View(lo*d, here, d), w: w, logits: logits.View(0, here, v)}, lo, here)
	}
}

func lowerLinearLogProbsGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x, w := c.asActivations(n, in[0], in[1])
	targets, rows, d := in[2], x.Shape[0], x.Shape[1]
	factors := c.map1(n, elementwise.Neg, c.aux(rows), c.as(n, in[4], gpu.Float32), 0)
	scaled := func(x *program.Array) *program.Array {
		y := c.Like(x)
		s := gemm.ScaledRows{Rows: rows, Columns: d, Type: x.Type}
		addCall(c, n, &s, program.Writes(&s.Y, y), program.Reads(&s.X, x), program.Reads(&s.Factors, factors))
		return y
	}

	saved := c.saved[n.Op().(*op.LinearLogProbsGradOp).Forward].(logProbsState)
	if saved.dx != nil {
		return packed(scaled(saved.dx))
	}

	dx, dw, losses, turned := c.Like(x), c.aux(w.Shape...), c.aux(rows), scaled(x)
	c.outputChunks(n, x, w, func(o outputRows, lo, here int) {
		a := crossentropy.Forward{Rows: here, V: w.Shape[0], Type: x.Type}
		c.matmul(n, program.Product{D: o.logits, A: o.x, B: w, TransB: true})
		addCall(c, n, &a, program.Updates(&a.Logits, o.logits), program.Writes(&a.Losses, losses.View(lo, here)),
			program.Reads(&a.Targets, targets.View(lo, here)), program.Reads(&a.Scale, saved.one))
		c.matmul(n, program.Product{D: dx.View(lo*d, here, d), A: o.logits, B: w})
		c.matmul(n, program.Product{D: dw, A: o.logits, B: turned.View(lo*d, here, d), TransA: true,
			Beta: min(1, float32(lo))})
	})
	return packed(scaled(dx), dw)
}
