package embedding

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Forward copies row IDs[r] of Table [Vocab, D] to row r of Y [Rows, D]. The types are equal, or
// the table is float32. A row whose id is not in [0, Vocab) becomes NaN.
type Forward struct {
	Y               gpu.Ptr
	IDs             kernel.Ints
	Table           gpu.Ptr
	Rows, Vocab, D  int
	Type, TableType gpu.DType
}

// Launch launches one kernel.
func (a Forward) Launch(k *kernel.Set, s gpu.Stream) error {
	variant := "embedding_elements"
	if kernel.Packed(a.Type, a.D, a.Y) && kernel.Packed(a.TableType, a.D, a.Table) {
		variant = "embedding_packs"
	}
	c := gpu.LaunchConfig{Grid: gpu.Dim{X: kernel.CeilDiv(a.Rows, 8)}, Block: gpu.Dim{X: 32, Y: 8}}
	return k.Enqueue(s, "embedding", variant+kernel.Suffixes(a.Type, a.TableType), c, a.Y, a.IDs,
		a.Table, int64(a.Rows), int64(a.Vocab), a.D)
}

// Backward computes the table's gradient DT[v] = Σ_{r: IDs[r] = v} G[r], or adds to it with
// Accumulate, in the order of the rows and in float32. Ids outside [0, Vocab) do not count. The
// types are equal, or DT is float32. Workspace is memory of WorkspaceBytes.
type Backward struct {
	DT             gpu.Ptr
	IDs            kernel.Ints
	G              gpu.Ptr
	Rows, Vocab, D int
	DTType, GType  gpu.DType
	Accumulate     bool
	Workspace      gpu.Ptr
}

// embeddingTile is kTile of embedding.cu.
const embeddingTile = 32

// embeddingParts is the parts of an Backward's workspace, one behind the other, in bytes.
type embeddingParts struct{ starts, cursors, members, sorted, heads, tails int }

func partsOf(rows, vocab, d int) embeddingParts {
	ids, list := 4*(vocab/4*4+4), 4*kernel.CeilDiv(rows, 4)*4
	sums := 4 * kernel.CeilDiv(kernel.CeilDiv(rows, embeddingTile)*d, 4) * 4
	return embeddingParts{ids, ids, list, list, sums, sums}
}

// WorkspaceBytes is the size of Workspace.
func (a Backward) WorkspaceBytes(gpu.DeviceInfo) int {
	p := partsOf(a.Rows, a.Vocab, a.D)
	return p.starts + p.cursors + p.members + p.sorted + p.heads + p.tails
}

// Launch launches six kernels, four of which group the rows by id.
func (a Backward) Launch(k *kernel.Set, s gpu.Stream) error {
	if !a.Accumulate {
		if err := k.Ctx.Memset8(a.DT, 0, a.Vocab*a.D*a.DTType.Size(), s); err != nil {
			return err
		}
	}
	p := partsOf(a.Rows, a.Vocab, a.D)
	starts := a.Workspace
	cursors := starts.Offset(p.starts)
	members := cursors.Offset(p.cursors)
	sorted := members.Offset(p.members)
	heads := sorted.Offset(p.sorted)
	tails := heads.Offset(p.heads)
	if err := k.Ctx.Memset8(cursors, 0, p.cursors, s); err != nil {
		return err
	}
	variant, n := "_elements", 1
	if a.D%4 == 0 && kernel.Aligned(a.DT, a.G) {
		variant, n = "_packs", 4
	}
	rows, vocab := kernel.Line(kernel.CeilDiv(a.Rows, 256), 256), int64(a.Vocab)
	threads := min(256, kernel.CeilDiv(a.D, 32*n)*32)
	tiles := gpu.LaunchConfig{Grid: gpu.Dim{X: kernel.CeilDiv(a.Rows, embeddingTile),
		Y: kernel.CeilDiv(a.D, threads*n)}, Block: gpu.Dim{X: threads}}
	for _, step := range []struct {
		name   string
		config gpu.LaunchConfig
		args   []any
	}{
		{"embedding_count", rows, []any{cursors, a.IDs, a.Rows, vocab}},
		{"embedding_starts", kernel.Line(1, 1024), []any{starts, cursors, a.Vocab}},
		{"embedding_fill", rows, []any{members, cursors, a.IDs, a.Rows, vocab}},
		{"embedding_sort", kernel.Line(kernel.CeilDiv(a.Rows, 8), 256),
			[]any{sorted, members, starts, a.IDs, vocab}},
		{"embedding_tiles" + variant + kernel.Suffixes(a.DTType, a.GType), tiles,
			[]any{a.DT, heads, tails, a.G, sorted, starts, a.IDs, vocab, a.D, a.Accumulate}},
		{"embedding_join" + variant + kernel.Suffix(a.DTType), tiles,
			[]any{a.DT, heads, tails, sorted, starts, a.IDs, vocab, a.D, a.Accumulate}},
	} {
		if err := k.Enqueue(s, "embedding", step.name, step.config, step.args...); err != nil {
			return err
		}
	}
	return nil
}
