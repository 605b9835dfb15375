package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/seed"
	"github.com/kasmina-go/kasmina/op"
)

func init() {
	register[*op.KasminaOp](lowerKasmina, nil)
	register[*op.KasminaGradOp](lowerKasminaGrad, linearIn(4))
}

// kasminaLayerOf returns the layer of o, adding it to the program if necessary. n is the node of o or of its gradient.
func (c *compiler) kasminaLayerOf(n *gorgonia.Node, o *op.KasminaOp) *program.KasminaLayer {
	for _, l := range c.Kasmina {
		if l.Op.SharesRun(o) {
			return l
		}
	}

	x, weights, seeds := o.InputShape(0), o.InputShape(1), o.Lattice.Seeds()
	l := &program.KasminaLayer{Op: o, Node: graph.Describe(n), Layer: kasmina.Layer{
		State: kasmina.State{Seeds: seeds, Slots: weights[0], Wide: weights[1] > o.Chunk()},
		Rows:  x[0], Chunk: o.Chunk(), Width: weights[1], Eps: o.Config.Epsilon,
		Type: c.o.Activation, Stability: seed.Stability(o.Config.Stability)}}
	l.Memory = c.NewResident(gpu.Float32, l.State.Bytes()/4)
	if c.Reports == nil {
		c.Reports = c.NewResident(gpu.Float32, 0, 0)
	}

	l.First = c.Reports.Shape[1]
	c.Kasmina = append(c.Kasmina, l)
	c.Reports.Shape = []int{program.KasminaWords, l.First + seeds}
	c.Reports.Bytes = c.Reports.Extent()
	return l
}

func lowerKasmina(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	o := n.Op().(*op.KasminaOp)
	l := c.kasminaLayerOf(n, o)
	if w, s := c.inputOf[in[1].Buffer], c.inputOf[in[2].Buffer]; !o.Replaying {
		l.Forward = true
		if w != nil && s != nil && w.Array.Type == gpu.Float32 && s.Array.Type == gpu.Float32 {
			l.WeightsInput, l.ScalesInput = w, s
		}
	}

	x, weights, scales := c.asActivation(n, in[0]), c.as(n, in[1], gpu.Float32), c.as(n, in[2], gpu.Float32)
	y := c.Like(x)

	p := program.KasminaPass{Layer: l, Node: n, Replay: o.Replaying,
		Forward: kasmina.Forward{Layer: l.Layer}}
	f := &p.Forward
	addCall(c, n, &p, program.Reads(&f.X, x), program.Reads(&f.Weights, weights),
		program.Reads(&f.Scales, scales), program.Writes(&f.Y, y),
		program.Uses(&f.Workspace, c.Workspace(f.WorkspaceBytes(c.o.Device))),
		program.Reads(&f.State.Ptr, l.Memory))
	return y
}

func lowerKasminaGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	l := c.kasminaLayerOf(n, n.Op().(*op.KasminaGradOp).Forward)
	l.Backward = true
	x, weights, scales := c.asActivation(n, in[0]), c.as(n, in[1], gpu.Float32), c.as(n, in[2], gpu.Float32)
	g := c.asActivation(n, in[4])
	dx, dw, ds := c.Like(x), c.aux(weights.Shape...), c.aux(scales.Shape...)
	p := program.KasminaPass{Layer: l, Node: n, Grad: true,
		Backward: kasmina.Backward{Layer: l.Layer, Clip: l.Clips()}}
	// If x is an input, it may lack the alignment.
	over := !l.State.Wide && l.InPlace() && !x.Resident && x.At%program.VectorBytes == 0
	if over && c.o.Timed {
		p.GradCopy = c.Like(g) // for the run without telemetry, which must not overwrite g
	}

	b := &p.Backward
	pass := addCall(c, n, &p, program.Reads(&b.X, x), program.Reads(&b.Weights, weights),
		program.Reads(&b.Scales, scales), program.Reads(&b.G, g), program.Writes(&b.DX, dx),
		program.Writes(&b.DWeights, dw), program.Writes(&b.DScales, ds),
		program.Uses(&b.Workspace, c.Workspace(b.WorkspaceBytes(c.o.Device))),
		program.Reads(&b.State.Ptr, l.Memory), program.Uses(program.NoField, p.GradCopy))
	if over {
		pass.InPlace = program.InPlace{From: g, To: dx}
	}

	return packed(dx, dw, ds)
}
