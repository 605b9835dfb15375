package kasmina

import (
	"math/bits"

	"github.com/kasmina-go/kasmina/internal/seed"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Sizes in bytes of the records of kasmina.cu and kasmina_backward.cu and of RowPartial in
// kasmina_rows.cu, and constants of these files.
const (
	forwardRecord  = 32
	backwardRecord = 48
	rowPartial     = 72
	blockThreads   = 256
	maxBlocks      = 4 // limit on blocks per multiprocessor
	mergeThreads   = 256
	maxRowParts    = 1024 // limit on parts of the rows in kasmina_rows.cu
	ringAhead      = 3
)

// grid describes how a pass of a layer is divided among threads and blocks.
type grid struct {
	shape       string // one of the shapes in kasmina_feed.cuh
	ring        bool   // rows pass through each thread's own part of shared memory
	arrays      int    // number of arrays read
	batch       int    // rows per batch
	perThread   int    // columns per thread
	each, units int    // columns per unit, and number of units
	use         usage
	// threads that share a chunk and compute its norm; 0 if they are not all in one warp
	sharing      int
	used         int // threads with columns in each row of a warp
	tiles        int // blocks that cover the columns of a row
	across, down int // threads per block
	rowBlocks    int // blocks that divide the rows, taking batches in turn
	late, ending int // numbers of blocks that start later; each computes a run or a short run of batches
	run, tail    int // consecutive batches in a run and in a short run
	rows         rowGrid
}

// rowGrid describes how kasmina_rows.cu divides a layer. A row of a chunk is shared by `lanes`
// threads, and a block handles `across` seeds by `down` parts of the rows.
type rowGrid struct{ lanes, across, down, tiles, blocks int }

func (r rowGrid) parts() int { return r.blocks * r.down }

func newRowGrid(d gpu.DeviceInfo, l Layer) (r rowGrid) {
	r.lanes = min(32, powerOfTwo(kernel.CeilDiv(l.Chunk, 8)))
	groups := blockThreads / r.lanes
	r.across = min(groups, powerOfTwo(l.State.Seeds))
	r.down = groups / r.across
	r.tiles = kernel.CeilDiv(l.State.Seeds, r.across)
	r.blocks = min(kernel.CeilDiv(l.Rows, r.down), maxRowParts/r.down,
		max(1, 4*d.SMs/r.tiles))
	return r
}

// usage describes those requirements of a pass that affect how the layer is divided.
type usage struct{ backward, telemetry, clip, inPlace bool }

// joined reports whether the threads of a chunk must belong to one warp. That is necessary to
// compute norms of its rows, and to read a row completely before overwriting it.
func (u usage) joined() bool { return u.backward && (u.telemetry || u.clip || u.inPlace) }

// shared returns the size of the dynamic shared memory, which first holds the rows being read and later the results of
// the block's threads.
func (g grid) shared() int {
	units := blockThreads * max(1, g.perThread/g.each)
	left := 0
	if g.use.telemetry {
		left = forwardRecord * units
	}

	if g.use.backward {
		left = left/forwardRecord*backwardRecord + 4*(blockThreads*g.perThread+2*units)
	}

	if g.ring {
		return max(left, ringAhead*g.arrays*g.batch*blockThreads*16)
	}

	return left
}

// rowParts returns the number of records of each unit.
func (g grid) rowParts() int { return g.rowBlocks + g.late + g.ending }

// share returns a Share of kasmina_feed.cuh.
func (g grid) share() kernel.Struct {
	return kernel.Struct{uint32(g.rowBlocks*g.down | g.run<<24),
		uint32(g.ending*g.down | g.tail<<18 | g.used<<26)}
}

// newGrid divides the columns of a layer. aligned reports whether all arrays are aligned to 16
// bytes.
func newGrid(device gpu.DeviceInfo, l Layer, aligned bool, use usage) grid {
	d, n := l.State.Seeds*l.Chunk, kernel.Vector(l.Type)
	g := grid{arrays: 1, batch: 4, use: use, shape: "single", perThread: 1, each: 1, units: d,
		rows: newRowGrid(device, l)}
	if g.use.backward {
		g.arrays, g.batch = 2, 2
	}

	switch {
	case aligned && l.Chunk == 4 && d%n == 0:
		g.shape, g.perThread, g.each, g.units = "quad", n, 4, l.State.Seeds
	case aligned && l.Chunk%n == 0:
		g.shape, g.perThread, g.each, g.units = "part", n, n, d/n
	}

	g.ring = g.shape != "single" && l.Stability != seed.Strict
	threads := g.spread(l)
	g.across = g.acrossOf(threads, kernel.CeilDiv(l.Rows, g.batch))
	if g.used == 0 {
		g.used = min(32, g.across)
	}

	g.down = blockThreads / g.across
	g.tiles = kernel.CeilDiv(threads, g.across)
	return g
}

// divideRows divides the rows for the given number of blocks in flight, plus the later blocks that
// replace these.
func (g grid) divideRows(l Layer, blocks int) grid {
	batches := kernel.CeilDiv(l.Rows, g.batch)
	g.rowBlocks = min(max(1, blocks/g.tiles), kernel.CeilDiv(batches, g.down), 1<<16-1)
	g.spreadLate(l, batches)
	return g
}

// spreadLate assigns the last batches of a long layer to blocks that start late, to even out
// differences in the speed of multiprocessors. Most of these blocks take runs of batches; the last
// ones take runs of half the length.
//
// The percentages depend on the pass. Starting a block costs more in a backward pass, which reads
// two arrays. Without records, which every lane must merge, more and shorter runs pay off.
func (g *grid) spreadLate(l Layer, batches int) {
	percent, rows, ending := 35, 40, 14
	switch {
	case g.use.backward:
		percent, rows, ending = 20, 32, 10
	case !g.use.telemetry:
		percent, rows, ending = 50, 16, 10
	}

	g.run, g.tail = rows/g.batch, rows/2/g.batch
	if l.Rows < 4*rows*g.rowBlocks*g.down {
		return
	}

	g.late = min(batches*percent/100/g.run/g.down, 1<<15-g.rowBlocks)
	g.ending = min(batches*ending/100/g.tail/g.down, (1<<18-1)/g.down, 1<<14)
}

// spread returns the number of threads that a row takes. If the threads of a chunk must belong to
// one warp but can't fill it, all warps get the same number of threads.
func (g *grid) spread(l Layer) int {
	threads := kernel.CeilDiv(l.State.Seeds*l.Chunk, g.perThread)
	switch g.sharing = max(1, l.Chunk/g.perThread); {
	case g.sharing > 32:
		g.sharing = 0
	case g.sharing&(g.sharing-1) == 0:
	case !g.use.joined():
		g.sharing = 0
	default:
		warps := kernel.CeilDiv(l.State.Seeds, 32/g.sharing)
		g.used = kernel.CeilDiv(l.State.Seeds, warps) * g.sharing
		if warps > 1 {
			return 32 * warps
		}
	}

	return threads
}

// acrossOf returns the number of threads of a block that divide a row's columns, a power of two. threads is the number of
// threads that a whole row needs; the remaining threads of a block process other rows.
//
// If threads produce records, the result is a single warp, so that a block can merge most records itself. Otherwise it is
// as large as possible without leaving many threads idle. With few batches it is larger, to keep all warps busy.
func (g *grid) acrossOf(threads, batches int) int {
	n, records := min(blockThreads, powerOfTwo(threads)), g.use.backward || g.use.telemetry
	for n > 32 && (records || 8*(kernel.CeilDiv(threads, n)*n-threads) > threads) {
		n /= 2
	}
	for n < min(blockThreads, threads) && blockThreads/n > batches {
		n *= 2
	}
	return n
}

// powerOfTwo returns the smallest power of two that is at least n.
func powerOfTwo(n int) int { return 1 << bits.Len(uint(max(n, 1)-1)) }

// scratch holds the addresses of a pass's workspace. Addresses that the pass does not need are
// null.
type scratch struct{ gates, records, partial, sums, total, scale gpu.Ptr }

func (g grid) scratch(l Layer, c *kernel.Carve) (s scratch) {
	// If many threads share a chunk, a separate kernel prepares the softmax of slots. It would take
	// longer for each thread to read all weights of a slot.
	if l.Chunk/g.perThread > 32 {
		s.gates = c.Take(8 * l.State.Slots)
	}

	columns, parts := l.State.Seeds*l.Chunk+2*g.units, g.rowParts()
	s.partial = c.Take(rowPartial * g.rows.parts() * l.State.Seeds)
	if g.use.telemetry {
		record := forwardRecord
		if g.use.backward {
			record = backwardRecord
		}
		s.records = c.Take(record * parts * g.units)
	}

	if g.use.backward {
		s.sums, s.total = c.Take(4*parts*columns), c.Take(4*columns)
		if g.use.clip && g.sharing == 0 {
			s.scale = c.Take(4 * l.Rows * l.State.Seeds)
		}
	}

	return s
}

// WorkspaceBytes returns the size of Workspace.
func (f Forward) WorkspaceBytes(d gpu.DeviceInfo) int { return f.workspace(d, usage{}) }

// WorkspaceBytes returns the size of Workspace.
func (b Backward) WorkspaceBytes(d gpu.DeviceInfo) int {
	return b.workspace(d, usage{backward: true, clip: b.Clip})
}

// workspace returns the largest workspace of a pass, with or without telemetry.
func (l Layer) workspace(d gpu.DeviceInfo, use usage) (bytes int) {
	for i := range 4 {
		use.telemetry = i/2 == 0
		g := newGrid(d, l, i%2 == 0, use)
		few := g.divideRows(l, 1)
		g = g.divideRows(l, maxBlocks*d.SMs)
		g.late, g.ending = few.late, few.ending // which are largest with the fewest blocks
		var c kernel.Carve
		g.scratch(l, &c)
		if l.State.Wide {
			newMixing(d, l, use.backward, &c)
		}
		bytes = max(bytes, int(c.At))
	}

	return bytes
}
