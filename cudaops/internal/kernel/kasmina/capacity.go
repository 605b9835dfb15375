package kasmina

import (
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/internal/seed"
)

// Mixing is, on the device, the list of a lattice's seeds whose blueprints mix the features of a
// chunk. See kasmina_capacity.cu for what is where.
type Mixing struct {
	Ptr          gpu.Ptr
	Seeds, Slots int
}

// Bytes is the size of the list, which has room for all seeds.
func (k Mixing) Bytes() int { return 4 * (1 + 2*k.Seeds + k.Slots + 1 + k.Seeds) }

// Mixes reports whether the kernels of this file compute a seed.
func Mixes(s seed.Seed) bool {
	return s.Slot != 0 && (s.Blend || s.Learn) && (s.Kind == blueprints.LowRank ||
		s.Kind == blueprints.ChunkMLP)
}

// Encode writes the list's bytes. It fails, and names the seed, for a slot that does not exist.
func (k Mixing) Encode(dst []byte, at func(i int) seed.Seed) error {
	words := gpu.View[uint32](dst[:k.Bytes()])
	clear(words)
	list, state := words[1:][:k.Seeds], words[1+k.Seeds:][:k.Seeds]
	heads, order := words[1+2*k.Seeds:][:k.Slots+1], words[1+2*k.Seeds+k.Slots+1:]
	n := 0
	for i := range k.Seeds {
		s := at(i)
		if !Mixes(s) {
			continue
		}
		if int(s.Slot) >= k.Slots {
			return fmt.Errorf("seed %d has slot %d, but there are %d slots", i, s.Slot, k.Slots)
		}
		learn := s.Learn && s.Alpha != 0 // at 0 there is nothing to learn
		list[n], state[n] = uint32(i),
			uint32(s.Kind)|kernel.Bit(s.Blend)<<8|kernel.Bit(learn)<<9|uint32(s.Slot)<<16
		n++
	}
	words[0] = uint32(n)
	sortBySlot(heads, order, state[:n])
	return nil
}

// Wide is what a layer has whose slots are wider than its chunks. Its weights are [Slots, Width] of
// float32, instead of those of its Layer, and dweights likewise. Seeds that mix are in its list,
// and are dormant in the layer's state.
type Wide struct {
	Mixing    Mixing
	Width     int
	Workspace gpu.Ptr // of WorkspaceBytes
}

// What kasmina_capacity.cu is written with, and how much memory it gets.
const (
	mixThreads  = 256
	mixSums     = 4096     // floats that groups of threads need to add up their sums
	mixShared   = 96 << 10 // bytes of shared memory at most, which every GPU has
	mixLeast    = 16       // rows at a time for which weights are kept in shared memory
	mixPartials = 16 << 20 // floats of partial sums
	mixLarge    = 1e6      // beyond it the adaptive mode scales
	mixSpread   = 64       // parts of the rows, if a few seeds mix
	mixTile     = 256      // rows at a time at most
	mixUnit     = "kasmina_capacity"
)

// mixGrid is how a layer is cut up.
type mixGrid struct {
	m, tile, parts, shared int
	resident               bool
}

// mixGrid cuts up a layer for the pass that has so many arrays of a chunk's and of m columns in
// shared memory.
func newMixGrid(k *kernel.Set, l Layer, w Wide, arrays int) (g mixGrid) {
	g.m = blueprints.Mixing(l.Chunk, w.Width)
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
		for g.tile = mixTile; g.tile > 1 && size() > mixShared; {
			g.tile /= 2
		}
		if g.tile >= mixLeast && size() <= mixShared {
			break
		}
	}
	g.tile = min(g.tile, powerOfTwo(l.Rows))
	g.shared = size()
	g.parts = min(kernel.CeilDiv(l.Rows, g.tile),
		max(mixSpread, kernel.CeilDiv(4*k.Info.SMs, l.State.Seeds)))
	g.parts = max(1, min(g.parts, mixPartials/(2*l.State.Seeds*l.Chunk*max(g.m, 1))))
	return g
}

// mixPadded is padded of kasmina_capacity.cu.
func mixPadded(n int) int { return kernel.CeilDiv(n, 4) * 4 }

// mixScratch is the workspace of a pass.
type mixScratch struct{ narrow, dweights, dscales, partial, partialScales gpu.Ptr }

func (g mixGrid) scratch(l Layer, at gpu.Ptr, backward bool) (s mixScratch, bytes int) {
	c := carve{at}
	s.narrow = c.take(4 * l.State.Slots * l.Chunk)
	if backward {
		s.dweights, s.dscales = c.take(4*l.State.Slots*l.Chunk), c.take(4*l.State.Slots)
		s.partial = c.take(4 * g.parts * l.State.Seeds * 2 * l.Chunk * g.m)
		s.partialScales = c.take(4 * g.parts * l.State.Seeds)
	}
	return s, int(c.at - at)
}

// workspace is the bytes of workspace that a pass takes beside that of the layer.
func (w Wide) workspace(d gpu.DeviceInfo, l Layer, backward bool) int {
	_, bytes := newMixGrid(kernel.Sized(d), l, w, mixArrays(backward)).scratch(l, 0, backward)
	return bytes
}

// mixArrays is how many arrays of each kind a pass has.
func mixArrays(backward bool) int { return 1 + int(kernel.Bit(backward)) }

// WideForward is Forward for a layer with wide slots.
type WideForward struct {
	Forward
	Wide
}

// Launch launches the kernels of Forward, one that copies weights ahead of them, and one of the
// kinds that mix behind them.
func (p WideForward) Launch(k *kernel.Set, s gpu.Stream) error {
	f := &p.Forward
	g := newMixGrid(k, f.Layer, p.Wide, mixArrays(false))
	scratch, _ := g.scratch(f.Layer, p.Wide.Workspace, false)
	wide := f.Weights
	f.Weights = scratch.narrow
	if err := narrow(k, s, f.Layer, wide, p.Width); err != nil {
		return err
	}
	if err := f.Launch(k, s); err != nil || g.m == 0 {
		return err
	}
	return g.launch(k, s, "kasmina_mix", f.Type, g.fields(f.Layer, p.Wide, wide,
		kernel.Packed(f.Type, f.Chunk, f.X, f.Y), false), f.Y, f.X)
}

// WideBackward is Backward for a layer with wide slots. DX is not G, which the kinds that mix read
// again, and nothing is left.
type WideBackward struct {
	Backward
	Wide
}

// Launch launches the kernels of Backward, one that copies weights ahead of them, and two behind
// them: one of the kinds that mix, and one that adds up over slots.
func (p WideBackward) Launch(k *kernel.Set, s gpu.Stream) error {
	b := &p.Backward
	g := newMixGrid(k, b.Layer, p.Wide, mixArrays(true))
	scratch, _ := g.scratch(b.Layer, p.Wide.Workspace, true)
	wide, dweights, dscales := b.Weights, b.DWeights, b.DScales
	b.Weights, b.DWeights, b.DScales = scratch.narrow, scratch.dweights, scratch.dscales
	if err := narrow(k, s, b.Layer, wide, p.Width); err != nil {
		return err
	}
	if err := b.Launch(k, s); err != nil {
		return err
	}
	layer := g.fields(b.Layer, p.Wide, wide, kernel.Packed(b.Type, b.Chunk, b.X, b.G, b.DX), b.Clip)
	if g.m > 0 {
		if err := g.launch(k, s, "kasmina_mix_backward", b.Type, layer, b.DX, b.G, b.X,
			scratch.partial, scratch.partialScales); err != nil {
			return err
		}
	}
	return k.Enqueue(s, mixUnit, "kasmina_mix_slots", gpu.LaunchConfig{
		Grid:  gpu.Dim{X: b.State.Slots, Y: kernel.CeilDiv(p.Width, mixThreads)},
		Block: gpu.Dim{X: mixThreads},
	}, layer, dweights, dscales, scratch.dweights, scratch.dscales, scratch.partial,
		scratch.partialScales)
}

// narrow copies the weights that kinds use which have as many as a chunk has columns.
func narrow(k *kernel.Set, s gpu.Stream, l Layer, wide gpu.Ptr, width int) error {
	n := l.State.Slots * l.Chunk
	return k.Enqueue(s, mixUnit, "kasmina_narrow",
		kernel.Line(min(kernel.CeilDiv(n, mixThreads), 8*k.Info.SMs), mixThreads), l.Weights, wide,
		int64(n), l.Chunk, width)
}

// launch launches a kernel whose blocks take seeds and parts of the rows in turn: that for where
// the weights are.
func (g mixGrid) launch(k *kernel.Set, s gpu.Stream, name string, t gpu.DType, args ...any) error {
	if g.resident {
		name += "_near"
	} else {
		name += "_far"
	}
	name += kernel.Suffix(t)
	blocks, err := k.Resident(mixUnit, name, mixThreads, g.shared)
	if err != nil {
		return err
	}
	c := kernel.Line(blocks, mixThreads)
	c.Shared = g.shared
	return k.Enqueue(s, mixUnit, name, c, args...)
}

// fields are those of Mixing of kasmina_capacity.cu.
func (g mixGrid) fields(l Layer, w Wide, weights gpu.Ptr, vectors, clip bool) kernel.Struct {
	large := math.Inf(1)
	if l.Stability == seed.Adaptive {
		large = mixLarge
	}
	var limit gpu.Ptr
	if clip {
		limit = l.State.field(4)
	}
	return kernel.Struct{w.Mixing.Ptr, l.State.field(1), l.State.field(2), l.State.field(3), limit,
		weights, l.Scales, int64(l.Rows), l.State.Seeds, l.State.Slots, l.Chunk, g.m, w.Width,
		g.tile, g.parts, l.Stability == seed.Strict, vectors, l.Eps, large}
}

// WorkspaceBytes is the size of Wide's Workspace.
func (f WideForward) WorkspaceBytes(d gpu.DeviceInfo) int {
	return f.Wide.workspace(d, f.Layer, false)
}

// WorkspaceBytes is the size of Wide's Workspace.
func (b WideBackward) WorkspaceBytes(d gpu.DeviceInfo) int {
	return b.Wide.workspace(d, b.Layer, true)
}
