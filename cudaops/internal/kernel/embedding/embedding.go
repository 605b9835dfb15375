package embedding

import (
	"fmt"

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
	name, err := kernel.Suffixes("Embedding", "", a.Type, a.TableType)
	if err != nil {
		return err
	}
	if a.Type != a.TableType && a.TableType != gpu.Float32 {
		return fmt.Errorf("kernels.Embedding: rows are %v and the table %v, want one type or a "+
			"table of float32", a.Type, a.TableType)
	}
	if empty, err := kernel.CheckInts("Embedding", a.Rows, a.Vocab, a.D); err != nil ||
		empty && a.Vocab > 0 {
		return err
	}
	variant := "embedding_elements"
	if kernel.Packed(a.Type, a.D, a.Y) && kernel.Packed(a.TableType, a.D, a.Table) {
		variant = "embedding_packs"
	}
	c := gpu.LaunchConfig{Grid: gpu.Dim{X: kernel.CeilDiv(a.Rows, 8)}, Block: gpu.Dim{X: 32, Y: 8}}
	l := kernel.Args().Ptr(a.Y).Ptr(a.IDs.Ptr).Int32(a.IDs.Size()).Ptr(a.Table).Int64(
		int64(a.Rows)).Int64(int64(a.Vocab)).Int32(a.D)
	return k.Enqueue(s, "embedding", variant+name, c, l)
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
	name, err := kernel.Suffixes("EmbeddingBackward", "", a.DTType, a.GType)
	if err != nil {
		return err
	}
	if a.DTType != a.GType && a.DTType != gpu.Float32 {
		return fmt.Errorf("kernels.EmbeddingBackward: the gradient of the table is %v and that "+
			"of the rows %v, want one type or float32 for the table", a.DTType, a.GType)
	}
	if _, err := kernel.CheckInts("EmbeddingBackward", a.Rows, a.Vocab, a.D); err != nil ||
		a.Vocab == 0 || a.D == 0 {
		return err
	}
	if !a.Accumulate {
		if err := k.Ctx.Memset8(a.DT, 0, a.Vocab*a.D*a.DTType.Size(), s); err != nil {
			return err
		}
	}
	if a.Rows == 0 {
		return nil
	}
	return sumGroups(k, s, a, name)
}

func sumGroups(k *kernel.Set, s gpu.Stream, a Backward, types string) error {
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
	variant, n, accumulate := "_elements", 1, 0
	if a.D%4 == 0 && kernel.Aligned(a.DT, a.G) {
		variant, n = "_packs", 4
	}
	if a.Accumulate {
		accumulate = 1
	}
	rows := kernel.Line(kernel.CeilDiv(a.Rows, 256), 256)
	threads := min(256, kernel.CeilDiv(a.D, 32*n)*32)
	tiles := gpu.LaunchConfig{Grid: gpu.Dim{X: kernel.CeilDiv(a.Rows, embeddingTile),
		Y: kernel.CeilDiv(a.D, threads*n)},
		Block: gpu.Dim{X: threads}}
	ids := func(l *gpu.Args) *gpu.Args { return l.Ptr(a.IDs.Ptr).Int32(a.IDs.Size()) }
	last := func(l *gpu.Args) *gpu.Args {
		return ids(l.Ptr(sorted).Ptr(starts)).Int64(int64(a.Vocab)).Int32(a.D).Int32(accumulate)
	}
	dt, err := kernel.Suffix("EmbeddingBackward", a.DTType)
	if err != nil {
		return err
	}
	for _, step := range []struct {
		name   string
		config gpu.LaunchConfig
		args   *gpu.Args
	}{
		{"embedding_count", rows,
			ids(kernel.Args().Ptr(cursors)).Int32(a.Rows).Int64(int64(a.Vocab))},
		{"embedding_starts", kernel.Line(1, 1024),
			kernel.Args().Ptr(starts).Ptr(cursors).Int32(a.Vocab)},
		{"embedding_fill", rows,
			ids(kernel.Args().Ptr(members).Ptr(cursors)).Int32(a.Rows).Int64(int64(a.Vocab))},
		{"embedding_sort", kernel.Line(kernel.CeilDiv(a.Rows, 8), 256),
			ids(kernel.Args().Ptr(sorted).Ptr(members).Ptr(starts)).Int64(int64(a.Vocab))},
		{"embedding_tiles" + variant + types, tiles,
			last(kernel.Args().Ptr(a.DT).Ptr(heads).Ptr(tails).Ptr(a.G))},
		{"embedding_join" + variant + dt, tiles,
			last(kernel.Args().Ptr(a.DT).Ptr(heads).Ptr(tails))},
	} {
		if err := k.Enqueue(s, "embedding", step.name, step.config, step.args); err != nil {
			return err
		}
	}
	return nil
}
