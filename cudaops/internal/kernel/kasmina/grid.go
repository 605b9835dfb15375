package kasmina

import (
	"math/bits"

	"github.com/kasmina-go/kasmina/internal/seed"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// What kasmina.cu and kasmina_backward.cu leave in records, and RowPartial of kasmina_rows.cu, in
// bytes.
const (
	forwardRecord  = 32
	backwardRecord = 48
	rowPartial     = 72
	blockThreads   = 256
	mostBlocks     = 4 // a multiprocessor at most
	mergeThreads   = 256
	mostRowParts   = 1024 // of the rows for kasmina_rows.cu at most
	ringAhead      = 3
)

// grid is how a layer is cut up for a launch.
type grid struct {
	shape       string // of those in kasmina_feed.cuh
	ring        bool   // rows come through shared memory, each thread's own
	arrays      int    // that are read
	batch       int    // rows
	perThread   int    // columns
	each, units int    // columns of a unit, and how many there are
	use         usage
	// threads that share a chunk, and form its norm; 0 where they are not all in one warp
	sharing      int
	used         int // threads of a warp that have columns, in each of its rows
	tiles        int // blocks for the columns of a row
	across, down int // threads of a block
	rowBlocks    int // blocks for the rows, that take batches in turn
	late, ending int // and those behind them that each take a run of batches, and a short one
	run, tail    int // batches in a run and in a short one
	rows         rowGrid
}

// rowGrid is how a layer is cut up for kasmina_rows.cu. Lanes share a row of a chunk. A block
// has seeds across and parts of the rows down.
type rowGrid struct{ lanes, across, down, tiles, blocks int }

func (r rowGrid) parts() int { return r.blocks * r.down }

func newRowGrid(d gpu.DeviceInfo, l Layer) (r rowGrid) {
	r.lanes = min(32, powerOfTwo(kernel.CeilDiv(l.Chunk, 8)))
	groups := blockThreads / r.lanes
	r.across = min(groups, powerOfTwo(l.State.Seeds))
	r.down = groups / r.across
	r.tiles = kernel.CeilDiv(l.State.Seeds, r.across)
	r.blocks = min(kernel.CeilDiv(l.Rows, r.down), mostRowParts/r.down,
		max(1, 4*d.SMs/r.tiles))
	return r
}

// usage is what is wanted of a pass, as far as it matters to how a layer is cut up.
type usage struct{ backward, telemetry, clip, inPlace bool }

// joined is whether the threads of a chunk are to be of one warp. They are where norms of its rows
// are wanted, or where each of them must have read what the others replace.
func (u usage) joined() bool { return u.backward && (u.telemetry || u.clip || u.inPlace) }

// shared is the dynamic shared memory: what the feed takes, or where that is more, what the lanes
// of a block leave there.
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

// rowParts is how many records each unit gets.
func (g grid) rowParts() int { return g.rowBlocks + g.late + g.ending }

// share is Share of kasmina_feed.cuh.
func (g grid) share() kernel.Struct {
	return kernel.Struct{uint32(g.rowBlocks*g.down | g.run<<24),
		uint32(g.ending*g.down | g.tail<<18 | g.used<<26)}
}

// newGrid cuts up the columns of a layer, where the arrays of its shape are aligned or not.
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

// over cuts up the rows for at most so many blocks in flight, and others behind those.
func (g grid) over(l Layer, blocks int) grid {
	batches := kernel.CeilDiv(l.Rows, g.batch)
	g.rowBlocks = min(max(1, blocks/g.tiles), kernel.CeilDiv(batches, g.down), 1<<16-1)
	g.spreadLate(l, batches)
	return g
}

// spreadLate has blocks that start late take the last batches of a long layer, so that they even
// out what multiprocessors differ in speed. Most take runs, and those that end the pass take runs
// of half the length. The beginning of a block costs a pass that reads two arrays more; without
// records, which each lane adds to, more and shorter runs pay.
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

// spread is how many threads a row takes. Where those of a chunk are to be of one warp and cannot
// fill it all of its warps get the same.
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

// acrossOf is how many threads of a block, a power of two, have different columns, of so many that
// a row takes. Where lanes leave records they are a warp's, so that a block has many lanes and
// merges most of the records by itself. Else they are as many as possible, of which few are idle.
// With few batches there are more, to keep all warps busy.
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

// powerOfTwo is the least that is not less than n.
func powerOfTwo(n int) int { return 1 << bits.Len(uint(max(n, 1)-1)) }

// scratch is the workspace of a pass; what it does not need is null.
type scratch struct{ gates, records, partial, sums, total, scale gpu.Ptr }

func (g grid) scratch(l Layer, c *kernel.Carve) (s scratch) {
	// A kernel of its own prepares the softmax of slots where a chunk is so many threads' that each
	// going through all of a slot's weights would take longer.
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

// WorkspaceBytes is the size of Workspace.
func (f Forward) WorkspaceBytes(d gpu.DeviceInfo) int { return f.workspace(d, usage{}) }

// WorkspaceBytes is the size of Workspace.
func (b Backward) WorkspaceBytes(d gpu.DeviceInfo) int {
	return b.workspace(d, usage{backward: true, clip: b.Clip})
}

// workspace is what a pass takes at most, measured or not.
func (l Layer) workspace(d gpu.DeviceInfo, use usage) (bytes int) {
	for i := range 4 {
		use.telemetry = i/2 == 0
		g := newGrid(d, l, i%2 == 0, use)
		few := g.over(l, 1)
		g = g.over(l, mostBlocks*d.SMs)
		g.late, g.ending = few.late, few.ending // as many as follow fewer blocks
		var c kernel.Carve
		g.scratch(l, &c)
		if l.State.Wide {
			newMixing(d, l, use.backward, &c)
		}
		bytes = max(bytes, int(c.At))
	}

	return bytes
}
