package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/preference"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/op"
)

func init() {
	register[*op.PreferenceLossOp](lowerPreferenceLoss, nil)
	register[*op.PreferenceLossGradOp](lowerPreferenceLossGrad, linearIn(4))
}

// preferenceState holds data that the loss of preference pairs saves for its gradient: the figures of the pairs, and
// the derivatives with respect to the log-probabilities of the answers.
type preferenceState struct{ figures, gradients *program.Array }

func lowerPreferenceLoss(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	o, rows := n.Op().(*op.PreferenceLossOp), in[0].Len()
	c.constrain(n, in[2], program.IDRange{Pairs: true})

	loss, s := c.aux(), preferenceState{c.NewResident(gpu.Float32, preference.FigureCount), c.aux(2 * rows)}
	a := preference.Forward{Rows: rows, Pair: o.Loss()}
	addCall(c, n, &a, program.Writes(&a.Loss, loss), program.Writes(&a.Figures, s.figures),
		program.Writes(&a.Gradients, s.gradients), program.Reads(&a.LogProbs, c.as(n, in[0], gpu.Float32)),
		program.Reads(&a.Reference, c.as(n, in[1], gpu.Float32)), program.Reads(&a.Answers, in[2]))

	c.Meters = append(c.Meters, program.Meter{Array: s.figures, Add: func(x []float32) {
		o.AddFigures(op.PreferenceFigures{Pairs: int(x[0]), Right: int(x[1]), Chosen: float64(x[2]),
			Rejected: float64(x[3])})
	}})
	c.saved[n.Op()] = s
	return loss
}

func lowerPreferenceLossGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	s := c.saved[n.Op().(*op.PreferenceLossGradOp).Forward].(preferenceState)
	dx := c.aux(in[0].Shape...)
	a := preference.Backward{Rows: in[0].Len()}
	addCall(c, n, &a, program.Writes(&a.DX, dx), program.Reads(&a.Gradients, s.gradients),
		program.Reads(&a.Figures, s.figures), program.Reads(&a.Grad, c.as(n, in[4], gpu.Float32)),
		program.Reads(&a.Answers, in[2]))
	return dx
}
