package kasmina

import (
	kasminakernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// operands are the arrays of a pass's call by the names of their fields.
func operands(c *program.Call) map[string]*program.Array {
	all := map[string]*program.Array{}
	for _, a := range c.Args {
		all[a.Field] = a.Array
	}
	return all
}

// Run enqueues a pass of a layer as the run under way has it: on the device or on the host, with
// telemetry or without. Where it is whole, it leaves nothing for a later launch.
func (ls *Layers) Run(c *program.Call, p program.KasminaPass, whole bool) error {
	l, a := ls.all[p.Layer], operands(c)
	backward := a["G"] != nil
	if l.hosted {
		clearSums(p)
		in := []*program.Array{a["X"], a["Weights"], a["Scales"]}
		if !backward {
			return ls.m.passOnHost(p.Node, in, a["Y"])
		}
		return ls.m.passOnHost(p.Node, append(in, nil, a["G"]), a["DX"], a["DWeights"], a["DScales"])
	}
	if whole {
		clearSums(p)
		p.Records, p.Parts = nil, nil
	}
	if p.Replay {
		return ls.bare(l, p, a, nil)
	}
	if backward {
		return ls.launchBackward(l, p, a, kasminakernel.Backward{Telemetry: l.mode.telemetry,
			Reduction: l.mode.reduction, Figures: l.at(program.KasminaGradient), Parts: p.Parts,
			Bad: l.at(program.KasminaBadG), Clipped: l.at(program.KasminaClipped)}, nil)
	}
	f := kasminakernel.Forward{Bad: l.at(program.KasminaBadX), Figures: l.at(program.KasminaHealth),
		Telemetry: l.mode.telemetry, Reduction: l.mode.reduction, Records: p.Records}
	if l.mode.histogram {
		f.Histogram = l.at(program.KasminaBins)
	}
	return ls.launchForward(l, p, a, f)
}

// clearSums says that a pass has left nothing.
func clearSums(p program.KasminaPass) {
	if p.Records != nil {
		*p.Records = kasminakernel.Records{}
	}
	if p.Parts != nil {
		*p.Parts = kasminakernel.Parts{}
	}
}

// bare enqueues a pass without telemetry, whose counts nobody reads. Where spare is not nil, a backward
// pass in place works there.
func (ls *Layers) bare(l *layer, p program.KasminaPass, a map[string]*program.Array, spare *program.Array) error {
	if a["G"] != nil {
		return ls.launchBackward(l, p, a, kasminakernel.Backward{Bad: l.at(program.KasminaIgnored),
			Clipped: l.at(program.KasminaIgnored)}, spare)
	}
	return ls.launchForward(l, p, a, kasminakernel.Forward{Bad: l.at(program.KasminaIgnored)})
}

// description is the layer as the kernels take it.
func (l *layer) description(a map[string]*program.Array) kasminakernel.Layer {
	k := l.Shape()
	k.X, k.Weights, k.Scales, k.State = a["X"].Ptr(), a["Weights"].Ptr(), a["Scales"].Ptr(), l.latticeState()
	return k
}

// mixing describes wide slots.
func (l *layer) mixing(p program.KasminaPass) kasminakernel.Wide {
	st, w := l.latticeState(), l.Mixing()
	w.Mixing.Ptr, w.Workspace = st.Ptr.Offset(st.Bytes()), p.Wide.Ptr()
	return w
}

func (ls *Layers) launchForward(l *layer, p program.KasminaPass, a map[string]*program.Array, f kasminakernel.Forward) error {
	f.Layer, f.Y, f.Workspace = l.description(a), a["Y"].Ptr(), a["Workspace"].Ptr()
	if l.Wide() {
		return ls.m.Launch(kasminakernel.WideForward{Forward: f, Wide: l.mixing(p)})
	}
	return ls.m.Launch(f)
}

func (ls *Layers) launchBackward(l *layer, p program.KasminaPass, a map[string]*program.Array, b kasminakernel.Backward,
	spare *program.Array) error {
	g, dx := a["G"], a["DX"]
	if spare != nil {
		g, dx = spare, spare
	}
	b.Layer, b.G, b.Clip, b.Workspace = l.description(a), g.Ptr(), l.Clips(), a["Workspace"].Ptr()
	b.DX, b.DWeights, b.DScales = dx.Ptr(), a["DWeights"].Ptr(), a["DScales"].Ptr()
	if l.Wide() {
		return ls.m.Launch(kasminakernel.WideBackward{Backward: b, Wide: l.mixing(p)})
	}
	return ls.m.Launch(b)
}
