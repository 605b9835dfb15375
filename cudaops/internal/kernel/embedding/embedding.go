// Package embedding has the kernels that look up rows of a table by ID, and compute the table's
// gradient in a fixed order.
package embedding

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Forward copies row IDs[r] of Table [Vocab, D] to row r of Y [Rows, D]. The types are equal, or
// the table is float32. If an ID is not in [0, Vocab), the row becomes NaN.
type Forward struct {
	Y               gpu.Ptr
	IDs             gpu.Ptr // int64
	Table           gpu.Ptr
	Rows, Vocab, D  int
	Type, TableType gpu.DType
}

// Launch enqueues one kernel.
func (a Forward) Launch(q *kernel.Queue) {
	variant := "embedding_elements"
	if kernel.Packed(a.Type, a.D, a.Y) && kernel.Packed(a.TableType, a.D, a.Table) {
		variant = "embedding_packs"
	}
	q.Run("embedding", variant+kernel.Suffix(a.Type, a.TableType),
		kernel.Grid(kernel.CeilDiv(a.Rows, 8), 1, 32, 8), a.Y, a.IDs, a.Table, int64(a.Rows),
		int64(a.Vocab), a.D)
}

// Backward computes the table's gradient DT[v] = Σ_{r: IDs[r] = v} G[r] or, with Accumulate, adds
// to it. Rows are added in order, and IDs outside [0, Vocab) don't count. DT is float32, and G is
// of Type. Workspace has WorkspaceBytes bytes.
type Backward struct {
	DT             gpu.Ptr
	IDs            gpu.Ptr // int64
	G              gpu.Ptr
	Rows, Vocab, D int
	Type           gpu.DType
	Accumulate     bool
	Workspace      gpu.Ptr
}

// tile must match kTile in embedding.cu.
const tile = 32

// scratch holds the parts of a Backward's workspace.
type scratch struct{ starts, cursors, members, sorted, heads, tails gpu.Ptr }

// idBytes returns the size of a 32-bit number per ID, with room up to the next multiple of four
// numbers.
func (a Backward) idBytes() int { return 4 * (a.Vocab/4*4 + 4) }

func (a Backward) scratch(c *kernel.Carve) (s scratch) {
	ids, list := a.idBytes(), 4*a.Rows
	sums := 4 * kernel.CeilDiv(a.Rows, tile) * a.D
	s.starts, s.cursors = c.Take(ids), c.Take(ids)
	s.members, s.sorted = c.Take(list), c.Take(list)
	s.heads, s.tails = c.Take(sums), c.Take(sums)
	return s
}

// WorkspaceBytes returns the size of Workspace.
func (a Backward) WorkspaceBytes(gpu.DeviceInfo) int {
	var c kernel.Carve
	a.scratch(&c)
	return int(c.At)
}

// Launch enqueues six kernels. The first four group the rows by ID.
func (a Backward) Launch(q *kernel.Queue) {
	p := a.scratch(&kernel.Carve{At: a.Workspace})
	if !a.Accumulate {
		q.Fill(a.DT, 0, 4*a.Vocab*a.D)
	}

	q.Fill(p.cursors, 0, a.idBytes())
	variant, n := "_elements", 1
	if a.D%4 == 0 && kernel.Aligned(a.DT, a.G) {
		variant, n = "_packs", 4
	}

	rows, vocab := kernel.Cover(a.Rows, 256, 256), int64(a.Vocab)
	threads := min(256, kernel.CeilDiv(a.D, 32*n)*32)
	tiles := kernel.Grid(kernel.CeilDiv(a.Rows, tile), kernel.CeilDiv(a.D, threads*n),
		threads, 1)
	q.Run("embedding", "embedding_count", rows, p.cursors, a.IDs, a.Rows, vocab)
	q.Run("embedding", "embedding_starts", kernel.Line(1, 1024), p.starts, p.cursors, a.Vocab)
	q.Run("embedding", "embedding_fill", rows, p.members, p.cursors, a.IDs, a.Rows, vocab)
	q.Run("embedding", "embedding_sort", kernel.Cover(a.Rows, 8, 256), p.sorted,
		p.members, p.starts, a.IDs, vocab)
	q.Run("embedding", "embedding_tiles"+variant+kernel.Suffix(gpu.Float32, a.Type), tiles, a.DT,
		p.heads, p.tails, a.G, p.sorted, p.starts, a.IDs, vocab, a.D, a.Accumulate)
	q.Run("embedding", "embedding_join"+variant+"_f32", tiles, a.DT, p.heads,
		p.tails, p.sorted, p.starts, a.IDs, vocab, a.D, a.Accumulate)
}

// WorkspaceField implements [kernel.Workspaced].
func (a *Backward) WorkspaceField() *gpu.Ptr { return &a.Workspace }
