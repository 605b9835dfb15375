package kasmina

import (
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// kasminaSumsMost is how many passes one launch serves, AllLeft of the kernels.
const kasminaSumsMost = 32

// Records is what a forward pass leaves of Figures: records [Parts, Units] of its blocks. The zero
// value is nothing.
type Records struct {
	Figures, Records    gpu.Ptr
	Parts, Units, Seeds int
	Share               int // threads that merge those of a seed
	Eps                 float64
}

// left is what the pass leaves of figures.
func (p *kasminaPass) left(f Forward) Records {
	if !f.Telemetry || p.family == Tile {
		return Records{}
	}
	return Records{f.Figures, p.records, p.rowParts(), p.units, p.State.Seeds, p.merging(), f.Eps}
}

// mergeRecords makes figures of what forward passes have left, in one launch for up to 32 of them.
func mergeRecords(k *kernel.Set, s gpu.Stream, left []Records) error {
	left = slices.DeleteFunc(slices.Clone(left), func(r Records) bool { return r.Seeds == 0 })
	for some := range slices.Chunk(left, kasminaSumsMost) {
		a, across := kernel.Args(), 0
		for _, r := range some {
			a.Ptr(r.Figures).Ptr(r.Records).Int32(r.Parts).Int32(r.Units).Int32(r.Seeds).Int32(
				r.Share).Float32(float32(r.Eps)).Int32(0)
			across = max(across, kasminaMergers(r.Seeds, r.Share))
		}
		err := kasminaSum(k, s, "kasmina", "kasmina_merge", gpu.Dim{X: across, Y: len(some)},
			gpu.Dim{X: kasminaMergeThreads}, a, len(some))
		if err != nil {
			return err
		}
	}
	return nil
}

// kasminaMergers is how many blocks merge the records of a pass.
func kasminaMergers(seeds, share int) int {
	return kernel.CeilDiv(seeds, kasminaMergeThreads/share)
}

// kasminaSum launches a kernel that finishes n passes, which awaits the kernel before it by itself,
// where GPUs can do that.
func kasminaSum(k *kernel.Set, s gpu.Stream, unit, name string, grid, block gpu.Dim,
	a *gpu.Args, n int) error {
	return k.Enqueue(s, unit, name, gpu.LaunchConfig{Grid: grid, Block: block,
		Overlap: k.Overlaps()}, kernel.Table(a, n, kasminaSumsMost))
}

// Parts is what a backward pass over Layer leaves of Figures, DWeights and DScales: Sums and
// Records of its Parts blocks, the former to be added up in Total. The zero value is nothing.
type Parts struct {
	Layer             Layer
	DWeights, DScales gpu.Ptr
	Sums, Total       gpu.Ptr // Sums are null where Total is there
	Figures, Records  gpu.Ptr // null where nothing is measured
	Parts, Units      int
	Share             int  // threads that merge the records of a seed
	Norms             bool // are in the records
}

// parts is what the pass leaves.
func (p *kasminaPass) parts(b Backward) Parts {
	left := Parts{Layer: b.Layer, Total: p.total, DWeights: b.DWeights,
		DScales: b.DScales, Units: p.units}
	if p.family == Tile {
		return left
	}
	left.Sums, left.Parts, left.Share, left.Norms = p.sums, p.rowParts(), p.merging(), p.sharing > 0
	if b.Telemetry {
		left.Figures, left.Records = b.Figures, p.records
	}
	return left
}

// SumParts makes gradients and figures of what backward passes have left, in two launches for up to
// 32 of them.
func addParts(k *kernel.Set, s gpu.Stream, left []Parts) error {
	left = slices.DeleteFunc(slices.Clone(left), func(p Parts) bool { return p.Units == 0 })
	for some := range slices.Chunk(left, kasminaSumsMost) {
		if err := gatherKasmina(k, s, some); err != nil {
			return err
		}
		if err := kasminaSlots(k, s, some); err != nil {
			return err
		}
	}
	return nil
}

// gatherKasmina adds up sums and merges records over the blocks.
func gatherKasmina(k *kernel.Set, s gpu.Stream, left []Parts) error {
	a, n, across := kernel.Args(), 0, 0
	for _, p := range left {
		if p.Sums == 0 {
			continue
		}
		seeds := p.Layer.State.Seeds
		columns := seeds*p.Layer.Chunk + 2*p.Units
		adding, merging := kernel.CeilDiv(columns, 32), 0
		if p.Records != 0 {
			merging = kasminaMergers(seeds, p.Share)
		}
		a.Ptr(p.Total).Ptr(p.Sums).Ptr(p.Figures).Ptr(p.Records).Int64(int64(columns)).Int32(
			adding).Int32(p.Parts).Int32(p.Units).
			Int32(seeds).Int32(p.Share).Int32(int(kernel.Bit(p.Norms)))
		n, across = n+1, max(across, adding+merging)
	}
	if n == 0 {
		return nil
	}
	return kasminaSum(k, s, "kasmina_backward", "kasmina_gather", gpu.Dim{X: across, Y: n},
		gpu.Dim{X: kasminaMergeThreads}, a, n)
}

// kasminaSlots adds up over the seeds of slots.
func kasminaSlots(k *kernel.Set, s gpu.Stream, left []Parts) error {
	var grid gpu.Dim
	a, most := kernel.Args(), 0
	for _, p := range left {
		st := p.Layer.State
		down := min(max(powerOfTwo(st.Seeds/st.Slots), 4), 32)
		a.Ptr(st.field(0)).Ptr(st.field(1)).Ptr(p.Layer.Weights).Ptr(p.Layer.Scales).Ptr(
			p.Total).Ptr(st.heads()).Ptr(st.order()).
			Ptr(p.DWeights).Ptr(p.DScales).Int32(st.Slots).Int32(st.Seeds).Int32(
			p.Layer.Chunk).Int32(p.Units).Int32(down).Int32(0)
		grid.X, grid.Y, most = max(grid.X, st.Slots),
			max(grid.Y, kernel.CeilDiv(p.Layer.Chunk, 32)), max(most, down)
	}
	grid.Z = len(left)
	return kasminaSum(k, s, "kasmina_backward", "kasmina_slots", grid, gpu.Dim{X: 32, Y: most}, a,
		len(left))
}

// MergeRecords makes figures of what forward passes have left.
type MergeRecords struct{ All []*Records }

// SumParts makes gradients and figures of what backward passes have left.
type SumParts struct{ All []*Parts }

// Join returns one launch for both.
func (p MergeRecords) Join(other any) (any, bool) {
	o, ok := other.(MergeRecords)
	return MergeRecords{slices.Concat(p.All, o.All)}, ok
}

// Join returns one launch for both.
func (p SumParts) Join(other any) (any, bool) {
	o, ok := other.(SumParts)
	return SumParts{slices.Concat(p.All, o.All)}, ok
}

// Launch enqueues it.
func (a MergeRecords) Launch(k *kernel.Set, s gpu.Stream) error {
	return mergeRecords(k, s, kernel.Values(a.All))
}

// Launch enqueues it.
func (a SumParts) Launch(k *kernel.Set, s gpu.Stream) error {
	return addParts(k, s, kernel.Values(a.All))
}
