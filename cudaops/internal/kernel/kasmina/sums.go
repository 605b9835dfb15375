package kasmina

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// merging is how many threads merge the records of a seed, so that none has many.
func (p *kasminaPass) merging() int {
	records := 4 // of a thread, at most
	if p.use.backward {
		records = 2
	}
	return min(max(powerOfTwo(p.rowParts()*p.units/p.State.Seeds/records), 8), kasminaMergeThreads)
}

// mergers is how many blocks merge records.
func (p *kasminaPass) mergers() int {
	return kernel.CeilDiv(p.State.Seeds, kasminaMergeThreads/p.merging())
}

// finish launches a kernel that adds up what the blocks of a pass have left. It awaits the kernel
// before it by itself, where GPUs can do that.
func (p *kasminaPass) finish(name string, grid, block gpu.Dim, args ...any) {
	p.Run(p.unit, name, gpu.LaunchConfig{Grid: grid, Block: block, Overlap: p.Overlaps()},
		kernel.Struct(args))
}

// merge makes figures of the records of a forward pass.
func (p *kasminaPass) merge(figures gpu.Ptr) {
	p.finish("kasmina_merge", gpu.Dim{X: p.mergers()}, gpu.Dim{X: kasminaMergeThreads},
		figures, p.records, p.rowParts(), p.units, p.State.Seeds, p.merging(), p.Eps)
}

// sumUp makes gradients of slots, and figures, of the sums and records of a backward pass. The
// first kernel adds up over the blocks, the second over the seeds of slots.
func (p *kasminaPass) sumUp(dweights, dscales, figures gpu.Ptr) {
	st, seeds := p.State, p.State.Seeds
	columns := seeds*p.Chunk + 2*p.units
	adding, merging := kernel.CeilDiv(columns, 32), 0
	if p.use.telemetry {
		merging = p.mergers()
	}
	p.finish("kasmina_gather", gpu.Dim{X: adding + merging}, gpu.Dim{X: kasminaMergeThreads},
		p.total, p.sums, figures, p.records, int64(columns), adding, p.rowParts(), p.units, seeds,
		p.merging(), p.sharing > 0)
	p.finish("kasmina_slots", gpu.Dim{X: st.Slots, Y: kernel.CeilDiv(p.Chunk, 32)},
		gpu.Dim{X: 32, Y: min(max(powerOfTwo(seeds/st.Slots), 4), 32)}, st.field(0), st.field(1),
		p.Weights, p.Scales, p.total, st.heads(), st.order(), dweights, dscales, seeds, p.Chunk,
		p.units)
}
