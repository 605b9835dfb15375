package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/crossentropy"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/op"
)

// classified is what a cross-entropy leaves: 1/(number of targets), each row's log-sum-exp and, for the
// fused op, the gradients for a gradient of 1.
type classified struct{ scale, lse, dx, dw *program.Array }

func lowerCrossEntropy(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	logits, targets := c.act(n, in[0]), in[1]
	rows, v := logits.Shape[0], logits.Shape[1]
	c.bound(targets, program.IDRange{Op: "CrossEntropy", Argument: "targets", Vocab: v, Negative: true})
	losses, saved := c.aux(rows), classified{scale: c.aux(1), lse: c.aux(rows)}
	c.saved[n.Op()] = saved
	c.targetScale(n, saved.scale, targets)
	c.call(n, crossentropy.Forward{Targets: ints(), Rows: rows, V: v, Type: logits.Type},
		program.Reads("Logits", logits), program.Reads("Targets", targets),
		program.Writes("Losses", losses), program.Writes("LSE", saved.lse))
	return c.meanLoss(n, losses, saved.scale), nil
}

// targetScale adds scale = 1/(number of targets).
func (c *compiler) targetScale(n *gorgonia.Node, scale, targets *program.Array) {
	c.call(n, crossentropy.Scale{Targets: ints(), Rows: targets.Len()},
		program.Writes("Scale", scale), program.Reads("Targets", targets))
}

// meanLoss adds the mean of the losses of all rows with a target.
func (c *compiler) meanLoss(n *gorgonia.Node, losses, scale *program.Array) *program.Array {
	loss := c.aux()
	c.call(n, crossentropy.Mean{Rows: losses.Len()}, program.Writes("Mean", loss),
		program.Reads("Losses", losses), program.Reads("Scale", scale))
	return loss
}

func lowerCrossEntropyGrad(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	logits, targets, g := c.act(n, in[0]), in[1], c.as(n, in[3], gpu.Float32)
	saved := c.saved[n.Op().(*op.CrossEntropyGradOp).Forward].(classified)
	d := c.like(logits)
	c.call(n, crossentropy.Backward{Forward: crossentropy.Forward{Targets: ints(),
		Rows: logits.Shape[0], V: logits.Shape[1], Type: logits.Type}},
		program.Writes("Out", d), program.Reads("Logits", logits), program.Reads("LSE", saved.lse),
		program.Reads("Targets", targets), program.Reads("Scale", saved.scale), program.Reads("Grad", g))
	return d, nil
}
