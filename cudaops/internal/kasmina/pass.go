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

// Run enqueues a pass of a layer as the current run requires: on the device or on the host, with or
// without telemetry.
func (ls *Layers) Run(c *program.Call, p *program.KasminaPass) error {
	l := ls.of[p.Layer]
	switch {
	case l.onHost:
		return ls.runOnHost(c, p)
	case p.Replay:
		return l.m.Launch(l.pass(c, mode{}, false))
	}
	return l.m.Launch(l.pass(c, l.current().mode, true))
}

// runOnHost computes a pass on the host.
func (ls *Layers) runOnHost(c *program.Call, p *program.KasminaPass) error {
	if err := ls.m.Canceled(); err != nil {
		return err
	}

	of := func(field *gpu.Ptr) *program.Array { return c.Operand(field).Array }
	if f := &p.Forward; !p.Grad {
		return ls.m.computeOnHost(p.Node, []*program.Array{of(&f.X), of(&f.Weights), of(&f.Scales)},
			of(&f.Y))
	}

	b := &p.Backward
	return ls.m.computeOnHost(p.Node,
		[]*program.Array{of(&b.X), of(&b.Weights), of(&b.Scales), nil, of(&b.G)},
		of(&b.DX), of(&b.DWeights), of(&b.DScales))
}

// pass returns the launch of a pass in the given mode. Unless counts is set, its counts go to a slot that
// is ignored.
func (l *layer) pass(c *program.Call, m mode, counts bool) any {
	at := func(word int) gpu.Ptr {
		if !counts {
			word = program.KasminaIgnored
		}
		return l.address(word)
	}

	p := c.Bind((*program.Array).Ptr).(program.KasminaPass)
	if b := p.Backward; p.Grad {
		b.Clip, b.Telemetry, b.Reduction = l.Clips(), m.telemetry, m.reduction
		b.Figures = l.address(program.KasminaGradient)
		b.Bad, b.Clipped = at(program.KasminaBadG), at(program.KasminaClipped)
		return b
	}

	f := p.Forward
	f.Telemetry, f.Reduction = m.telemetry, m.reduction
	f.Figures, f.Bad = l.address(program.KasminaHealth), at(program.KasminaBadX)
	if m.histogram {
		f.Histogram = l.address(program.KasminaBins)
	}

	return f
}

// A monitor measures the cost of a layer's telemetry by running the pass's arithmetic once without
// telemetry before the pass itself. The extra run produces the same results bit for bit, and its counts
// are ignored.

// Measures reports whether a call is a pass that collects telemetry in the current run.
func (ls *Layers) Measures(c *program.Call) bool {
	p, ok := c.Params.(*program.KasminaPass)
	return ok && !p.Replay && ls.of[p.Layer].current().mode.telemetry
}

// Save copies the gradient that an in-place backward pass overwrites, for use by RunWithoutTelemetry.
func (ls *Layers) Save(c *program.Call) error {
	p := c.Params.(*program.KasminaPass)
	if p.GradCopy == nil {
		return nil
	}
	g := c.Operand(&p.Backward.G)
	return ls.m.Ctx.CopyOnDevice(p.GradCopy.Ptr(), g.Ptr(), g.Extent(), ls.m.Stream)
}

// RunWithoutTelemetry enqueues a pass without telemetry.
func (ls *Layers) RunWithoutTelemetry(c *program.Call) error {
	p := c.Params.(*program.KasminaPass)
	l := ls.of[p.Layer]
	pass := l.pass(c, mode{}, false)
	if b, ok := pass.(kasminakernel.Backward); ok && p.GradCopy != nil {
		b.G, b.DX = p.GradCopy.Ptr(), p.GradCopy.Ptr()
		pass = b
	}
	return l.m.Launch(pass)
}

// RecordTiming records a pass's times in the layer's lattice: the time without telemetry, and the time
// of the whole pass.
func (ls *Layers) RecordTiming(c *program.Call, unmeasured, whole time.Duration) {
	p := c.Params.(*program.KasminaPass)
	l := ls.of[p.Layer]
	seeds := 2 * l.State.Seeds // read and written, in x and y
	if b := &p.Backward; p.Grad {
		seeds = l.chunksMoved(c.Operand(&b.G).Ptr() == c.Operand(&b.DX).Ptr())
	}
	l.Op.Lattice.RecordTiming(state.Timing{Kernel: unmeasured, Telemetry: whole - unmeasured,
		Bytes: int64(seeds * l.Rows * l.Chunk * l.Type.Size())})
}

// Kasmina layers on the host. A kind of blueprint registered by a user has no kernel. As long as any seed
// of a layer works with such a kind, the op itself computes the layer's passes on the host, between two
// copies, and reports its telemetry to the lattice.
//
// The layer's state decides this before every run; once the last such seed is gone, the layer returns to
// the device. Runs that involve the host cannot be captured. Graphs captured earlier are kept until the
// layer returns.

// chooseProcessor decides where the current run computes the layer, given the error from encoding its
// state.
func (l *layer) chooseProcessor(err error) error {
	var kind *kasminakernel.KindError
	l.onHost = errors.As(err, &kind)
	switch {
	case !l.onHost:
		return err
	case l.m.Strict:
		return fmt.Errorf("%w, and WithStrict forbids computing it on the host", err)
	}

	l.m.Warn(fmt.Sprintf("the kind of blueprint %q has no kernel: Kasmina layers in which a seed "+
		"works with it are computed on the host, which waits for the device and copies their "+
		"values there and back", blueprints.Kind(kind.Kind)))
	return nil
}

// computeOnHost computes a node of a layer with its op, and copies the result to the arrays out. An
// input is nil if the op only depends on its order. As in all host computations, gradients are given
// to the op without the loss scale.
func (m *Runtime) computeOnHost(n *gorgonia.Node, in []*program.Array, out ...*program.Array) error {
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
	if err := ignoreScaledOverflow(err, scale); err != nil {
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
