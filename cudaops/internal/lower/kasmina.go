package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/op"
)

// kasminaLayerOf returns the layer that o belongs to.
func (c *compiler) kasminaLayerOf(o *op.KasminaOp) *program.KasminaLayer {
	for _, l := range c.Kasmina {
		if l.Op.SharesRun(o) {
			return l
		}
	}
	x, weights, seeds := o.InputShape(0), o.InputShape(1), o.Lattice.Seeds()
	l := &program.KasminaLayer{Op: o, Seeds: seeds, Rows: x[0], Chunk: o.Chunk(),
		Width: weights[1], Type: c.o.Activation}
	bytes := (kasmina.State{Seeds: seeds, Slots: weights[0]}).Bytes()
	if l.Wide() {
		bytes += (kasmina.Mixing{Seeds: seeds, Slots: weights[0]}).Bytes()
	}
	l.State = c.NewResident(gpu.Float32, bytes/4)
	if c.Reports == nil {
		c.Reports = c.NewResident(gpu.Float32, 0, 0)
	}
	for _, other := range c.Kasmina {
		l.First += other.Seeds
	}
	c.Kasmina = append(c.Kasmina, l)
	c.Reports.Shape = []int{program.KasminaWords, l.First + seeds}
	c.Reports.Bytes = c.Reports.Extent()
	return l
}

// startsSlots makes the machine look at a layer's slots before its runs, where weights and scales
// are inputs of the graph.
func (c *compiler) startsSlots(o *op.KasminaOp, weights, scales *program.Array) {
	w, s := c.inputOf[weights.Buffer], c.inputOf[scales.Buffer]
	if o.Replaying || w == nil || s == nil || weights.Type != gpu.Float32 ||
		scales.Type != gpu.Float32 {
		return
	}
	c.Starts = append(c.Starts, program.KasminaStart{Op: o, Weights: weights, Scales: scales,
		OfWeights: w, OfScales: s})
}

func lowerKasmina(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	o := n.Op().(*op.KasminaOp)
	l := c.kasminaLayerOf(o)
	c.startsSlots(o, in[1], in[2])
	l.Forward = l.Forward || !o.Replaying
	x, weights, scales := c.act(n, in[0]), c.as(n, in[1], gpu.Float32), c.as(n, in[2], gpu.Float32)
	y := c.like(x)
	plain := kasmina.Forward{Layer: l.Shape()}
	workspace := c.bytes(plain.WorkspaceBytes(c.o.Device))
	p := program.KasminaPass{Layer: l, Node: n, Replay: o.Replaying}
	args := []program.Arg{program.Reads("X", x), program.Reads("Weights", weights),
		program.Reads("Scales", scales),
		program.Writes("Y", y), program.Uses("Workspace", workspace),
		program.Reads("State", l.State)}
	if l.Wide() {
		p.Wide = c.bytes(kasmina.WideForward{Forward: plain,
			Wide: l.Mixing()}.WorkspaceBytes(c.o.Device))
		args = append(args, program.Uses("", p.Wide))
	}
	c.call(n, p, args...)
	return y
}

func lowerKasminaGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	l := c.kasminaLayerOf(n.Op().(*op.KasminaGradOp).Forward)
	l.Backward = true
	x, weights, scales := c.act(n, in[0]), c.as(n, in[1], gpu.Float32), c.as(n, in[2], gpu.Float32)
	g := c.act(n, in[4])
	dx, dw, ds := c.like(x), c.aux(weights.Shape...), c.aux(scales.Shape...)
	p := program.KasminaPass{Layer: l, Node: n}
	// The x of an input may begin anywhere.
	over := !l.Wide() && l.Shape().InPlace() && !x.Resident && x.At%program.VectorBytes == 0
	if over && c.o.Timed {
		p.Spare = c.like(g) // for what comes ahead of the pass, which needs g as it is
	}
	plain := kasmina.Backward{Layer: l.Shape(), Clip: l.Clips()}
	workspace := c.bytes(plain.WorkspaceBytes(c.o.Device))
	args := []program.Arg{program.Reads("X", x), program.Reads("Weights", weights),
		program.Reads("Scales", scales),
		program.Reads("G", g), program.Writes("DX", dx), program.Writes("DWeights", dw),
		program.Writes("DScales", ds),
		program.Uses("Workspace", workspace), program.Reads("State", l.State)}
	if p.Spare != nil {
		args = append(args, program.Uses("", p.Spare))
	}
	if l.Wide() {
		p.Wide = c.bytes(kasmina.WideBackward{Backward: plain,
			Wide: l.Mixing()}.WorkspaceBytes(c.o.Device))
		args = append(args, program.Uses("", p.Wide))
	}
	pass := c.call(n, p, args...)
	if over {
		pass.Over = program.Over{From: g, To: dx}
	}
	return packed(dx, dw, ds)
}
