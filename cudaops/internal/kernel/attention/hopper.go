package attention

import (
	"fmt"
	"math"
	"slices"
	"sort"
	"sync"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// hopperShape mirrors a Shape of attention_hopper.cu or of the fused backward pass.
type hopperShape struct{ workers, loop, turns, stages int }

// hopperShapes holds the shapes of the forward kernels by their head dimension.
var hopperShapes = map[int]hopperShape{
	64:  {3, 128, 2, 3},
	96:  {2, 128, 2, 3},
	128: {2, 128, 2, 2},
}

// fusedShapes holds the shapes of attention_hopper_fused.cu and attention_hopper_fused64.cu.
var fusedShapes = map[int]hopperShape{
	64:  {2, 64, 2, 4},
	96:  {2, 64, 1, 4},
	128: {2, 64, 1, 3},
}

// hopperDim returns the head dimension of the kernels that handle HeadDim.
func (a Geometry) hopperDim() int {
	switch {
	case a.HeadDim <= 64:
		return 64
	case a.HeadDim <= 96:
		return 96
	}
	return 128
}

// shared returns the shared memory of a block of the forward pass: its own tiles and results, the
// stages, and the barriers.
func (h hopperShape) shared(dim int) int {
	rows := (h.turns+1)*64*h.workers + 2*h.loop*h.stages
	return 2*dim*rows + 32*h.stages + 16*h.turns
}

// sharedFused returns the shared memory of a block of the fused backward pass: k and v, the stages
// with their statistics, two tiles of ds, one of dq, and the barriers. With documents it adds the
// last query of each key. The kernel for head dimension 64 has three tiles of ds, two of dq, and
// room for results.
func (h hopperShape) sharedFused(dim int, documents bool) int {
	own := 64 * h.workers
	if dim == 64 {
		return 2*dim*own*(2*h.turns+1) + h.stages*(4*dim*h.loop+8*h.loop+16) + 6*own*h.loop +
			8*dim*h.loop + 32*h.turns + 112
	}
	if documents {
		return h.sharedFused(dim, false) + 4*own
	}
	return 4*dim*own + h.stages*(4*dim*h.loop+8*h.loop+16) + 4*own*h.loop + 4*dim*h.loop + 56
}

// launchHopper enqueues the forward pass.
func (c *call) launchHopper(heads, readHeads int) {
	dim := c.hopperDim()
	h := hopperShapes[dim]
	section := c.evenSection(heads, kernel.CeilDiv(c.Seq, 64*h.workers), readHeads, true)
	args := c.hopperArgs(section, c.rows[:3])
	l := kernel.Line(c.Info.SMs, 128*(h.workers+1))
	l.Shared = h.shared(dim)
	if c.Documents != 0 {
		l.Shared += 16 * h.turns
	}
	c.run("attention_hopper", fmt.Sprintf("attention_hopper_forward_%d", dim), l, args...)
}

// evenSection returns the number of heads that are worked on together, chosen to balance the load.
// Under a causal mask tiles differ in length, so it tries the numbers from half of section's result
// up to the full result, and picks the one that lets the busiest multiprocessor finish first.
//
// With inTurns, multiprocessors take work in the order of workOf in attention_hopper.cuh; otherwise
// the next idle one takes it.
func (c *call) evenSection(heads, tiles, readHeads int, inTurns bool) int {
	if c.Size > 0 {
		return min(c.Size, heads)
	}

	limit := c.section(heads, readHeads)
	if !c.Causal || !inTurns && heads*tiles > c.Info.SMs*worksToEven {
		return limit
	}

	key := [...]any{heads, tiles, limit, c.Info.SMs, inTurns}
	if best, ok := evenSections.Load(key); ok {
		return best.(int)
	}

	best, shortest := 0, math.MaxInt
	for n := limit; n >= max(limit/2, 1); n -= max(limit/32, 1) {
		if busy := longest(heads, tiles, n, c.Info.SMs, inTurns); busy < shortest {
			best, shortest = n, busy
		}
	}

	evenSections.Store(key, best)
	return best
}

// worksToEven is the number of work items per multiprocessor above which imbalance hardly matters
// when idle multiprocessors take the next item.
const worksToEven = 256

// evenSections caches the results of evenSection, which takes about 100 µs, or milliseconds for
// large problems.
var evenSections sync.Map

// longest returns how long the busiest multiprocessor works, in the order of schedule in
// attention.cuh. The first tile of a head takes as many steps as there are tiles and the last one a
// single step. When idle multiprocessors take the next item, the work outside the loop counts as
// half a step.
func longest(heads, tiles, section, sms int, inTurns bool) int {
	busy := make([]int, sms) // sorted if !inTurns: the first finishes first
	for first, work := 0, 0; first < heads; first += section {
		n := min(section, heads-first)
		for i := range n * tiles {
			length := 2 * (tiles - i/n)
			if !inTurns {
				done := busy[0] + length + 1
				at := sort.SearchInts(busy, done)
				copy(busy, busy[1:at])
				busy[at-1] = done
				continue
			}
			sm := work % sms
			if work/sms%2 == 1 {
				sm = sms - 1 - sm
			}
			busy[sm] += length
			work++
		}
	}

	return slices.Max(busy)
}

// hopperArgs returns the parameters, with the number of heads per section, and the descriptors of the
// inputs: q, k, v and, for the backward pass, g.
func (c *call) hopperArgs(section int, inputs []kernel.Rows) []any {
	args := []any{c.params(section)}
	for i, rows := range inputs {
		args = append(args, c.tensorMap(rows, []int{c.Heads, c.KVHeads, c.KVHeads, c.Heads}[i]))
	}
	return args
}

// tensorMap returns the descriptor of rows of heads. The kernels copy boxes of 64 positions by 64
// elements of one head, or by 32 elements if the kernel's head dimension is not a multiple of 64.
func (c *call) tensorMap(r kernel.Rows, heads int) gpu.TensorMap {
	row := uint64(r.Stride * c.dtype.Size())
	columns := uint32(64)
	if c.hopperDim()%64 != 0 {
		columns = 32
	}

	return c.Tiled(gpu.TiledTensor{
		Type:    c.dtype,
		Address: r.Ptr,
		Dims:    []uint64{uint64(c.HeadDim), uint64(c.Seq), uint64(heads), uint64(c.Batch)},
		Strides: []uint64{row, uint64(c.HeadDim * c.dtype.Size()), row * uint64(c.Seq)},
		Box:     []uint32{columns, 64, 1, 1},
	})
}

// fusedParts returns where the fused backward pass accumulates dq in float32, after the statistics,
// and the n counters of its tiles, which must start at zero.
func (a Geometry) fusedParts(c *kernel.Carve) (dq, counters gpu.Ptr, n int) {
	dim := a.hopperDim()
	tile := fusedShapes[dim].loop
	tiles := a.Batch * a.Heads * kernel.CeilDiv(a.Seq, tile)
	c.Take(a.statsBytes())
	return c.Take(4 * dim * tile * tiles), c.Take(4 * (tiles + 1)), tiles + 1
}

// Counters returns the n counters that a backward pass of the family Hopper has in its workspace.
func (a Geometry) Counters(workspace gpu.Ptr) (counters gpu.Ptr, n int) {
	_, counters, n = a.fusedParts(&kernel.Carve{At: workspace})
	return counters, n
}

// fusedSection is the least number of heads that the fused backward pass works on together. The
// inputs of fewer heads would stay in the cache, but blocks that add to the same dq would then run
// at the same time and wait for each other, which costs more. NOTES.md has the timings.
const fusedSection = 16

// sectionOfFused returns the number of heads per section of the fused backward pass, whose blocks
// own tiles of keys.
func (c *call) sectionOfFused(tiles int) int {
	heads := c.Batch * c.KVHeads
	minimum := min(fusedSection, heads)
	if c.Size == 0 && c.section(heads, c.sharers()) < minimum {
		return minimum
	}
	return c.evenSection(heads, tiles, c.sharers(), false)
}

// sharers returns how much data the blocks of a head share, as a multiple of its keys. They share
// the head's q and g, and the dq accumulated in float32, which is as large as both together.
func (c *call) sharers() int { return 2 * c.Heads / c.KVHeads }

// launchFused enqueues the fused backward pass, assuming that the statistics are in the workspace.
// attention_hopper_fused.cuh describes the rest of the workspace.
func (c *call) launchFused() {
	dim := c.hopperDim()
	h := fusedShapes[dim]
	dq, counters, _ := c.fusedParts(&kernel.Carve{At: c.stats})
	c.Poison(dq, int(counters-dq))
	section := c.sectionOfFused(kernel.CeilDiv(c.Seq, 64*h.workers))
	args := append(c.hopperArgs(section, []kernel.Rows{c.rows[0], c.rows[1], c.rows[2], c.rows[4]}),
		c.Cos, c.Sin)
	l := kernel.Line(c.Info.SMs, 128*(h.workers+1))
	l.Shared = h.sharedFused(dim, c.Documents != 0)
	name := fmt.Sprintf("attention_hopper_backward_fused_%d", dim)
	if dim == 64 { // this kernel has one more warpgroup, which computes dq and finishes it
		l.Block.X += 128
		c.run("attention_hopper_fused64", name, l, args...)
		return
	}

	const unit = "attention_hopper_fused"
	c.run(unit, name, l, args...)
	l = kernel.Line(c.Batch*kernel.CeilDiv(c.Heads, 2)*kernel.CeilDiv(c.Seq, h.loop), 256)
	l.Shared, l.Overlap = 2*2*dim*h.loop, true
	c.Run(unit, fmt.Sprintf("attention_hopper_backward_round_%d%s", dim, kernel.Suffix(c.dtype)),
		l, c.params(section), c.Cos, c.Sin)
}
