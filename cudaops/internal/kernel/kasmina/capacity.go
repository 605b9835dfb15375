package kasmina

import (
	"errors"
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

// name is that of a kernel for where the weights are.
func (g mixGrid) name(symbol, suffix string) string {
	if g.resident {
		return symbol + "_near" + suffix
	}
	return symbol + "_far" + suffix
}

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

// Launch is Forward for a layer with wide slots.
func (p WideForward) Launch(k *kernel.Set, s gpu.Stream) error {
	suf, empty, err := p.Forward.checkWide("KasminaWideForward", p.Forward.Reduction, p.Wide)
	if empty || err != nil {
		return err
	}
	g := newMixGrid(k, p.Forward.Layer, p.Wide, mixArrays(false))
	scratch, _ := g.scratch(p.Forward.Layer, p.Wide.Workspace, false)
	wide := p.Forward.Weights
	p.Forward.Weights = scratch.narrow
	if err := narrow(k, s, p.Forward.Layer, wide, p.Wide.Width); err != nil {
		return err
	}
	if err := p.Forward.Launch(k, s); err != nil || g.m == 0 {
		return err
	}
	a := kernel.Args().Struct(g.bytes(p.Forward.Layer, p.Wide, wide, kernel.Packed(p.Forward.Type,
		p.Forward.Chunk, p.Forward.X, p.Forward.Y), false), 8).Ptr(p.Forward.Y).Ptr(p.Forward.X)
	return mix(k, s, g.name("kasmina_mix", suf), g, a)
}

// Launch is Backward for a layer with wide slots. DX must not be G.
func (p WideBackward) Launch(k *kernel.Set, s gpu.Stream) error {
	if p.Backward.Parts != nil { // what follows needs the gradients
		*p.Backward.Parts, p.Backward.Parts = Parts{}, nil
	}
	suf, empty, err := p.Backward.checkWide("KasminaWideBackward", p.Backward.Reduction, p.Wide)
	if err != nil {
		return err
	}
	if empty {
		p.Backward.Chunk = p.Wide.Width
		p.Backward.Rows = 0
		return p.Backward.Launch(k, s)
	}
	if p.Backward.DX == p.Backward.G {
		return errors.New("kernels.KasminaWideBackward: DX is G, which the kernels of the kinds " +
			"that mix read again")
	}
	g := newMixGrid(k, p.Backward.Layer, p.Wide, mixArrays(true))
	scratch, _ := g.scratch(p.Backward.Layer, p.Wide.Workspace, true)
	wide, dweights, dscales := p.Backward.Weights, p.Backward.DWeights, p.Backward.DScales
	p.Backward.Weights, p.Backward.DWeights, p.Backward.DScales = scratch.narrow,
		scratch.dweights, scratch.dscales
	if err := narrow(k, s, p.Backward.Layer, wide, p.Wide.Width); err != nil {
		return err
	}
	if err := p.Backward.Launch(k, s); err != nil {
		return err
	}
	layer := g.bytes(p.Backward.Layer, p.Wide, wide, kernel.Packed(p.Backward.Type,
		p.Backward.Chunk, p.Backward.X, p.Backward.G, p.Backward.DX), p.Backward.Clip)
	if g.m > 0 {
		a := kernel.Args().Struct(layer,
			8).Ptr(p.Backward.DX).Ptr(p.Backward.G).Ptr(p.Backward.X).Ptr(scratch.partial).Ptr(
			scratch.partialScales)
		if err := mix(k, s, g.name("kasmina_mix_backward", suf), g, a); err != nil {
			return err
		}
	}
	return k.Enqueue(s, mixUnit, "kasmina_mix_slots", gpu.LaunchConfig{
		Grid:  gpu.Dim{X: p.Backward.State.Slots, Y: kernel.CeilDiv(p.Wide.Width, mixThreads)},
		Block: gpu.Dim{X: mixThreads},
	},
		kernel.Args().Struct(layer,
			8).Ptr(dweights).Ptr(dscales).Ptr(scratch.dweights).Ptr(scratch.dscales).Ptr(
			scratch.partial).Ptr(scratch.partialScales))
}

func (l Layer) checkWide(op string, r seed.Reduction, w Wide) (suf string, empty bool, err error) {
	if suf, empty, err = l.check(op, r); err != nil {
		return "", false, err
	}
	if w.Width < l.Chunk || int64(w.Width)*int64(l.State.Slots) > math.MaxInt32 ||
		w.Width > math.MaxUint16*mixThreads {
		return "", false, fmt.Errorf("kernels.%s: %d slots of %d weights for chunks of %d columns",
			op, l.State.Slots, w.Width, l.Chunk)
	}
	return suf, empty, nil
}

// narrow copies the weights that kinds use which have as many as a chunk has columns.
func narrow(k *kernel.Set, s gpu.Stream, l Layer, wide gpu.Ptr, width int) error {
	n := l.State.Slots * l.Chunk
	a := kernel.Args().Ptr(l.Weights).Ptr(wide).Int64(int64(n)).Int32(l.Chunk).Int32(width)
	return k.Enqueue(s, mixUnit, "kasmina_narrow",
		kernel.Line(min(kernel.CeilDiv(n, mixThreads), 8*k.Info.SMs), mixThreads), a)
}

// mix launches a kernel whose blocks take seeds and parts of the rows in turn.
func mix(k *kernel.Set, s gpu.Stream, name string, g mixGrid, a *gpu.Args) error {
	blocks, err := k.Resident(mixUnit, name, mixThreads, g.shared)
	if err != nil {
		return err
	}
	c := kernel.Line(blocks, mixThreads)
	c.Shared = g.shared
	return k.Enqueue(s, mixUnit, name, c, a)
}

// bytes is Mixing of kasmina_capacity.cu.
func (g mixGrid) bytes(l Layer, w Wide, weights gpu.Ptr, vectors, clip bool) []byte {
	large := float32(math.Inf(1))
	if l.Stability == seed.Adaptive {
		large = mixLarge
	}
	var limit gpu.Ptr
	if clip {
		limit = l.State.field(4)
	}
	return kernel.Args().Ptr(w.Mixing.Ptr).Ptr(l.State.field(1)).Ptr(l.State.field(2)).Ptr(
		l.State.field(3)).Ptr(limit).
		Ptr(weights).Ptr(l.Scales).Int64(int64(l.Rows)).
		Int32(l.State.Seeds).Int32(l.State.Slots).Int32(l.Chunk).Int32(g.m).Int32(w.Width).Int32(
		g.tile).Int32(g.parts).
		Int32(int(kernel.Bit(l.Stability == seed.Strict))).Int32(int(kernel.Bit(vectors))).Float32(
		float32(l.Eps)).Float32(large).
		Int32(0).Packed() // to a multiple of 8 bytes
}

// WideForward is Forward for a layer with wide slots.
type WideForward struct {
	Forward
	Wide
}

// WideBackward is Backward for a layer with wide slots.
type WideBackward struct {
	Backward
	Wide
}

// WorkspaceBytes is the size of Wide's Workspace.
func (f WideForward) WorkspaceBytes(d gpu.DeviceInfo) int {
	return f.Wide.workspace(d, f.Layer, false)
}

// WorkspaceBytes is the size of Wide's Workspace.
func (b WideBackward) WorkspaceBytes(d gpu.DeviceInfo) int {
	return b.Wide.workspace(d, b.Layer, true)
}
