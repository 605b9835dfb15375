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
	if !f.Telemetry {
		return Records{}
	}
	return Records{f.Figures, p.records, p.rowParts(), p.units, p.State.Seeds, p.merging(), f.Eps}
}

// mergeRecords makes figures of what forward passes have left, in one launch for up to 32 of them.
func mergeRecords(k *kernel.Set, s gpu.Stream, left []Records) error {
	left = slices.DeleteFunc(slices.Clone(left), func(r Records) bool { return r.Seeds == 0 })
	for some := range slices.Chunk(left, kasminaSumsMost) {
		var rows []kernel.Struct
		across := 0
		for _, r := range some {
			rows = append(rows, kernel.Struct{r.Figures, r.Records, r.Parts, r.Units, r.Seeds,
				r.Share, r.Eps})
			across = max(across, kasminaMergers(r.Seeds, r.Share))
		}
		if err := kasminaSum(k, s, "kasmina", "kasmina_merge", gpu.Dim{X: across, Y: len(some)},
			gpu.Dim{X: kasminaMergeThreads}, rows); err != nil {
			return err
		}
	}
	return nil
}

// kasminaMergers is how many blocks merge the records of a pass.
func kasminaMergers(seeds, share int) int {
	return kernel.CeilDiv(seeds, kasminaMergeThreads/share)
}

// kasminaSum launches a kernel that finishes passes, which awaits the kernel before it by itself,
// where GPUs can do that.
func kasminaSum(k *kernel.Set, s gpu.Stream, unit, name string, grid, block gpu.Dim,
	rows []kernel.Struct) error {
	return k.Enqueue(s, unit, name, gpu.LaunchConfig{Grid: grid, Block: block,
		Overlap: k.Overlaps()}, kernel.Table{Rows: rows, Room: kasminaSumsMost})
}

// Parts is what a backward pass over Layer leaves of Figures, DWeights and DScales: Sums and
// Records of its Parts blocks, the former to be added up in Total. The zero value is nothing.
type Parts struct {
	Layer             Layer
	DWeights, DScales gpu.Ptr
	Sums, Total       gpu.Ptr
	Figures, Records  gpu.Ptr // null where nothing is measured
	Parts, Units      int
	Share             int  // threads that merge the records of a seed
	Norms             bool // are in the records
}

// parts is what the pass leaves.
func (p *kasminaPass) parts(b Backward) Parts {
	left := Parts{Layer: b.Layer, Sums: p.sums, Total: p.total, DWeights: b.DWeights,
		DScales: b.DScales, Parts: p.rowParts(), Units: p.units, Share: p.merging(),
		Norms: p.sharing > 0}
	if b.Telemetry {
		left.Figures, left.Records = b.Figures, p.records
	}
	return left
}

// addParts makes gradients and figures of what backward passes have left, in two launches for up to
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
	var rows []kernel.Struct
	across := 0
	for _, p := range left {
		seeds := p.Layer.State.Seeds
		columns := seeds*p.Layer.Chunk + 2*p.Units
		adding, merging := kernel.CeilDiv(columns, 32), 0
		if p.Records != 0 {
			merging = kasminaMergers(seeds, p.Share)
		}
		rows = append(rows, kernel.Struct{p.Total, p.Sums, p.Figures, p.Records, int64(columns),
			adding, p.Parts, p.Units, seeds, p.Share, p.Norms})
		across = max(across, adding+merging)
	}
	return kasminaSum(k, s, "kasmina_backward", "kasmina_gather", gpu.Dim{X: across, Y: len(rows)},
		gpu.Dim{X: kasminaMergeThreads}, rows)
}

// kasminaSlots adds up over the seeds of slots.
func kasminaSlots(k *kernel.Set, s gpu.Stream, left []Parts) error {
	grid, block := gpu.Dim{Z: len(left)}, gpu.Dim{X: 32}
	var rows []kernel.Struct
	for _, p := range left {
		st := p.Layer.State
		down := min(max(powerOfTwo(st.Seeds/st.Slots), 4), 32)
		rows = append(rows, kernel.Struct{st.field(0), st.field(1), p.Layer.Weights, p.Layer.Scales,
			p.Total, st.heads(), st.order(), p.DWeights, p.DScales, st.Slots, st.Seeds,
			p.Layer.Chunk, p.Units, down})
		grid.X, grid.Y = max(grid.X, st.Slots), max(grid.Y, kernel.CeilDiv(p.Layer.Chunk, 32))
		block.Y = max(block.Y, down)
	}
	return kasminaSum(k, s, "kasmina_backward", "kasmina_slots", grid, block, rows)
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
