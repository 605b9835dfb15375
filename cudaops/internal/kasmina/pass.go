package kasmina

import (
	"errors"
	"fmt"
	"time"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	kasminakernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/state"
)

// Run enqueues a pass of a layer as the run under way has it: on the device or on the host, with
// telemetry or without.
func (ls *Layers) Run(c *program.Call, p *program.KasminaPass) error {
	l := ls.of[p.Layer]
	switch {
	case l.hosted:
		return ls.onHost(c, p)
	case p.Replay:
		return l.m.Launch(l.pass(c, mode{}, false))
	}
	return l.m.Launch(l.pass(c, l.now().mode, true))
}

// onHost computes a pass on the host.
func (ls *Layers) onHost(c *program.Call, p *program.KasminaPass) error {
	if err := ls.m.Canceled(); err != nil {
		return err
	}

	of := func(field *gpu.Ptr) *program.Array { return c.Operand(field).Array }
	if f := &p.Forward; !p.Grad {
		return ls.m.passOnHost(p.Node, []*program.Array{of(&f.X), of(&f.Weights), of(&f.Scales)},
			of(&f.Y))
	}

	b := &p.Backward
	return ls.m.passOnHost(p.Node,
		[]*program.Array{of(&b.X), of(&b.Weights), of(&b.Scales), nil, of(&b.G)},
		of(&b.DX), of(&b.DWeights), of(&b.DScales))
}

// pass is the launch of a pass in a mode. Of one that is not to count nobody reads the counts.
func (l *layer) pass(c *program.Call, m mode, counts bool) any {
	at := func(word int) gpu.Ptr {
		if !counts {
			word = program.KasminaIgnored
		}
		return l.at(word)
	}

	p := c.Bind((*program.Array).Ptr).(program.KasminaPass)
	if b := p.Backward; p.Grad {
		b.Clip, b.Telemetry, b.Reduction = l.Clips(), m.telemetry, m.reduction
		b.Figures = l.at(program.KasminaGradient)
		b.Bad, b.Clipped = at(program.KasminaBadG), at(program.KasminaClipped)
		return b
	}

	f := p.Forward
	f.Telemetry, f.Reduction = m.telemetry, m.reduction
	f.Figures, f.Bad = l.at(program.KasminaHealth), at(program.KasminaBadX)
	if m.histogram {
		f.Histogram = l.at(program.KasminaBins)
	}

	return f
}

// A monitor tells what telemetry costs a pass of a layer: ahead of the pass its arithmetic runs
// without telemetry. The results are the same bits, and nobody reads what these runs count.

// Measures reports whether a call is a pass that measures in the run under way.
func (ls *Layers) Measures(c *program.Call) bool {
	p, ok := c.Params.(*program.KasminaPass)
	return ok && !p.Replay && ls.of[p.Layer].now().mode.telemetry
}

// Save copies what a backward pass in place replaces, for Unmeasured.
func (ls *Layers) Save(c *program.Call) error {
	p := c.Params.(*program.KasminaPass)
	if p.Spare == nil {
		return nil
	}
	g := c.Operand(&p.Backward.G)
	return ls.m.Ctx.CopyOnDevice(p.Spare.Ptr(), g.Ptr(), g.Extent(), ls.m.Stream)
}

// Unmeasured enqueues a pass without telemetry.
func (ls *Layers) Unmeasured(c *program.Call) error {
	p := c.Params.(*program.KasminaPass)
	l := ls.of[p.Layer]
	pass := l.pass(c, mode{}, false)
	if b, ok := pass.(kasminakernel.Backward); ok && p.Spare != nil {
		b.G, b.DX = p.Spare.Ptr(), p.Spare.Ptr()
		pass = b
	}
	return l.m.Launch(pass)
}

// Note tells a layer's lattice what its pass took, without telemetry and with it.
func (ls *Layers) Note(c *program.Call, unmeasured, whole time.Duration) {
	p := c.Params.(*program.KasminaPass)
	l := ls.of[p.Layer]
	seeds := 2 * l.State.Seeds // read and written, in x and y
	if b := &p.Backward; p.Grad {
		seeds = l.moving(c.Operand(&b.G).Ptr() == c.Operand(&b.DX).Ptr())
	}
	l.Op.Lattice.RecordTiming(state.Timing{Kernel: unmeasured, Telemetry: whole - unmeasured,
		Bytes: int64(seeds * l.Rows * l.Chunk * l.Type.Size())})
}

// A Kasmina layer on the host. A kind of blueprint that somebody has registered has no kernel.
// While a seed of a layer works with such a kind, the op itself computes the layer's passes,
// between two copies. It tells the lattice what it measures. Ahead of each run the layer's state
// decides: with the last such seed gone, the layer is back on the device. What was captured of runs
// there waits for that, since runs that the host takes part in cannot be captured.

// choose decides where the run under way computes the layer, by what became of encoding its state.
func (l *layer) choose(err error) error {
	var kind *kasminakernel.KindError
	l.hosted = errors.As(err, &kind)
	switch {
	case !l.hosted:
		return err
	case l.m.Strict:
		return fmt.Errorf("%w, and WithStrict forbids computing it on the host", err)
	}

	l.m.Warn(fmt.Sprintf("the kind of blueprint %q has no kernel: Kasmina layers in which a seed "+
		"works with it are computed on the host, which waits for the device and copies their "+
		"values there and back", blueprints.Kind(kind.Kind)))
	return nil
}

// passOnHost computes a node of a layer with its op, from what it reads to the parts of its result.
// What it only comes behind is nil. As all that is computed on the host it sees gradients without
// the loss scale.
func (m *Machine) passOnHost(n *gorgonia.Node, in []*program.Array, out ...*program.Array) error {
	args := make(opbase.Args, len(in))
	for i, a := range in {
		if a == nil {
			continue
		}
		v, err := m.HostOperand(n, i, a)
		if err != nil {
			return err
		}
		if args[i], err = opbase.Flat(v); err != nil {
			return err
		}
	}

	result := make([]float32, opbase.Size(n.Shape()))
	scale := m.Carried(n)
	err := n.Op().(interface{ Shared() *opbase.Base }).Shared().Run(result, args)
	if err := unlessScaled(err, scale); err != nil {
		return err
	}

	for i := range result {
		result[i] *= scale
	}

	for _, a := range out {
		raw := make([]byte, a.Extent())
		gpu.Encode(raw, a.Type, result[:a.Len()])
		if err := m.Ctx.CopyToDevice(a.Ptr(), raw, m.Stream); err != nil {
			return err
		}
		result = result[a.Len():]
	}

	return nil
}
