package kasmina

import (
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/internal/seed"
)

// Constants of kasmina_capacity.cu, and limits on its memory.
const (
	mixThreads   = 256
	mixSums      = 4096     // floats of shared memory for adding up the sums of groups of threads
	mixMaxShared = 96 << 10 // bytes of shared memory; available on every GPU
	mixMinTile   = 16       // rows at a time needed to keep weights in shared memory
	mixPartials  = 16 << 20 // limit on floats of partial sums
	mixSpread    = 64       // parts of the rows if few seeds mix features
	mixTile      = 256      // limit on rows at a time
	mixUnit      = "kasmina_capacity"
)

// mixing describes how the kernels for wide slots divide a layer, and holds their workspace.
type mixing struct {
	m, tile, parts, mixShared int
	resident                  bool // weights are in shared memory
	// the first Chunk weights of each slot, for pointwise kinds, and their gradients
	narrowWeights, dweights, dscales gpu.Ptr
	partialWeights, partialScales    gpu.Ptr // sums over parts of the rows
}

// newMixing divides a layer. In shared memory, a backward pass has two arrays with a chunk's
// columns and two with m columns; a forward pass has one of each.
func newMixing(d gpu.DeviceInfo, l Layer, backward bool, c *kernel.Carve) (g mixing) {
	arrays := 1 + int(kernel.Bit(backward))
	g.m = blueprints.Mixing(l.Chunk, l.Width)
	step := func(columns int) int { return mixPadded(columns) + 4 }
	weights := mixPadded(g.m)*step(l.Chunk) + mixPadded(l.Chunk)*step(g.m)
	row := arrays*(step(l.Chunk)+step(g.m)) + 1
	size := func() int {
		bytes := 4 * max(g.tile*row, mixSums)
		if g.resident {
			bytes += 4 * weights
		}
		return bytes
	}

	for _, g.resident = range []bool{true, false} {
		for g.tile = mixTile; g.tile > 1 && size() > mixMaxShared; {
			g.tile /= 2
		}
		if g.tile >= mixMinTile && size() <= mixMaxShared {
			break
		}
	}

	g.tile = min(g.tile, powerOfTwo(l.Rows))
	g.mixShared = size()
	g.parts = min(kernel.CeilDiv(l.Rows, g.tile),
		max(mixSpread, kernel.CeilDiv(4*d.SMs, l.State.Seeds)))
	g.parts = max(1, min(g.parts, mixPartials/(2*l.State.Seeds*l.Chunk*max(g.m, 1))))
	g.narrowWeights = c.Take(4 * l.State.Slots * l.Chunk)
	if backward {
		g.dweights, g.dscales = c.Take(4*l.State.Slots*l.Chunk), c.Take(4*l.State.Slots)
		g.partialWeights = c.Take(4 * g.parts * l.State.Seeds * 2 * l.Chunk * g.m)
		g.partialScales = c.Take(4 * g.parts * l.State.Seeds)
	}

	return g
}

// mixPadded must match padded in kasmina_capacity.cu.
func mixPadded(n int) int { return kernel.CeilDiv(n, 4) * 4 }

// narrow copies the first Chunk weights of each wide slot to a compact array, which replaces
// p.Weights for the pointwise kinds.
func (p *pass) narrow(c *kernel.Carve) {
	p.mixing = newMixing(p.Info, p.Layer, p.use.backward, c)
	n, wide := p.State.Slots*p.Chunk, p.Weights
	p.Weights = p.narrowWeights
	p.Run(mixUnit, "kasmina_narrow", kernel.Line(min(kernel.CeilDiv(n, mixThreads),
		8*p.Info.SMs), mixThreads), p.Weights, wide, int64(n), p.Chunk, p.Width)
}

// mix launches a kernel with blocks that loop over seeds and parts of the rows, in the variant for
// weights in shared or in global memory.
func (p *pass) mix(name string, args ...any) {
	if p.resident {
		name += "_near"
	} else {
		name += "_far"
	}
	name += kernel.Suffix(p.Type)
	c := kernel.Line(1, mixThreads)
	c.Shared = p.mixShared
	p.RunAll(mixUnit, name, c, args...)
}

// mixFields returns a Mixing of kasmina_capacity.cu.
func (p *pass) mixFields(weights gpu.Ptr, vectors, clip bool) kernel.Struct {
	st := p.State
	limit, large := p.bounds(clip)
	return kernel.Struct{st.List(), st.field(1), st.field(2), st.field(3), limit, weights,
		p.Scales, int64(p.Rows), st.Seeds, st.Slots, p.Chunk, p.m, p.Width, p.tile, p.parts,
		p.Stability == seed.Strict, vectors, p.Eps, large}
}
