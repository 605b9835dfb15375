package kasmina

import (
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/state"
)

// A monitor tells what telemetry costs a pass of a layer: ahead of the pass its arithmetic runs without
// telemetry. The results are the same bits, and nobody reads what these runs count.

// Measures reports whether a call is a pass that measures in the run under way.
func (ls *Layers) Measures(c *program.Call) bool {
	p, ok := c.Params.(program.KasminaPass)
	return ok && !p.Replay && ls.all[p.Layer].mode.telemetry
}

// CanMeasure reports whether a call is a pass that can measure.
func (ls *Layers) CanMeasure(c *program.Call) bool {
	p, ok := c.Params.(program.KasminaPass)
	return ok && !p.Replay
}

// Save copies what a backward pass in place replaces, for Bare.
func (ls *Layers) Save(c *program.Call) error {
	p := c.Params.(program.KasminaPass)
	if p.Spare == nil {
		return nil
	}
	g := operands(c)["G"]
	return ls.m.Ctx.CopyOnDevice(p.Spare.Ptr(), g.Ptr(), g.Extent(), ls.m.Stream)
}

// Bare enqueues a pass without telemetry.
func (ls *Layers) Bare(c *program.Call) error {
	p := c.Params.(program.KasminaPass)
	return ls.bare(ls.all[p.Layer], p, operands(c), p.Spare)
}

// Note tells a layer's lattice what its pass took, without telemetry and with it.
func (ls *Layers) Note(c *program.Call, bare, whole time.Duration) {
	p := c.Params.(program.KasminaPass)
	l := ls.all[p.Layer]
	seeds := 2 * l.Seeds // read and written, in x and y
	if operands(c)["G"] != nil {
		reads, writes := l.moving(p.InPlace)
		seeds = reads + l.Seeds + writes // in x, the gradient of y, and that of x
	}
	l.Op.Lattice.RecordTiming(state.Timing{Kernel: bare, Telemetry: whole - bare,
		Bytes: int64(seeds * l.Rows * l.Chunk * l.Type.Size())})
}
