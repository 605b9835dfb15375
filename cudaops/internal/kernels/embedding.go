package kernels

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
)

// Embedding copies row IDs[r] of Table [Vocab, D] to row r of Y [Rows, D]. The types are equal, or the table is float32. A
// row whose id is not in [0, Vocab) becomes NaN.
type Embedding struct {
	Y               driver.Ptr
	IDs             Ints
	Table           driver.Ptr
	Rows, Vocab, D  int
	Type, TableType driver.DType
}

// Embedding launches one kernel.
func (k *Kernels) Embedding(s driver.Stream, a Embedding) error {
	name, err := suffixes("Embedding", "", a.Type, a.TableType)
	if err != nil {
		return err
	}
	if a.Type != a.TableType && a.TableType != driver.Float32 {
		return fmt.Errorf("kernels.Embedding: rows are %v and the table %v, want one type or a table of float32", a.Type, a.TableType)
	}
	if empty, err := checkSizes("Embedding", a.Rows, a.Vocab, a.D); err != nil || empty && a.Vocab > 0 {
		return err
	}
	variant := "embedding_elements"
	if packed(a.Type, a.D, a.Y) && packed(a.TableType, a.D, a.Table) {
		variant = "embedding_packs"
	}
	c := driver.LaunchConfig{Grid: driver.Dim{X: ceilDiv(a.Rows, 8)}, Block: driver.Dim{X: 32, Y: 8}}
	l := args().Ptr(a.Y).Ptr(a.IDs.Ptr).Int32(a.IDs.size()).Ptr(a.Table).Int64(int64(a.Rows)).Int64(int64(a.Vocab)).Int32(a.D)
	return k.launch(s, "embedding", variant+name, c, l)
}

// EmbeddingBackward computes the table's gradient DT[v] = Σ_{r: IDs[r] = v} G[r], or adds to it with Accumulate, in the order
// of the rows and in float32. Ids outside [0, Vocab) do not count. The types are equal, or DT is float32. Workspace is memory
// of [EmbeddingWorkspace] bytes.
type EmbeddingBackward struct {
	DT             driver.Ptr
	IDs            Ints
	G              driver.Ptr
	Rows, Vocab, D int
	DTType, GType  driver.DType
	Accumulate     bool
	Workspace      driver.Ptr
}

// EmbeddingWorkspace is the bytes of workspace that an EmbeddingBackward takes.
func EmbeddingWorkspace(rows, vocab int) int { return 4 * (2*(vocab+1) + 2*rows) }

// EmbeddingBackward launches five kernels, four of which group the rows by id.
func (k *Kernels) EmbeddingBackward(s driver.Stream, a EmbeddingBackward) error {
	name, err := suffixes("EmbeddingBackward", "", a.DTType, a.GType)
	if err != nil {
		return err
	}
	if a.DTType != a.GType && a.DTType != driver.Float32 {
		return fmt.Errorf("kernels.EmbeddingBackward: the gradient of the table is %v and that of the rows %v, want one type or "+
			"float32 for the table", a.DTType, a.GType)
	}
	if _, err := checkSizes("EmbeddingBackward", a.Rows, a.Vocab, a.D); err != nil || a.Vocab == 0 || a.D == 0 {
		return err
	}
	if a.Rows >= 1<<31 || a.Vocab >= 1<<31 {
		return fmt.Errorf("kernels.EmbeddingBackward: %d rows and %d ids, want fewer than 2³¹", a.Rows, a.Vocab)
	}
	starts := a.Workspace
	sorted, err := k.groupRows(s, a)
	if err != nil {
		return err
	}
	variant, n := "embedding_backward_elements", 1
	if a.D%4 == 0 && aligned(a.DT, a.G) {
		variant, n = "embedding_backward_packs", 4
	}
	across := min(256, ceilDiv(ceilDiv(a.D, n), 32)*32)
	down := min(8, 512/across)
	c := driver.LaunchConfig{Grid: driver.Dim{X: a.Vocab}, Block: driver.Dim{X: across, Y: down}, Shared: 4 * n * across * down}
	accumulate := 0
	if a.Accumulate {
		accumulate = 1
	}
	l := args().Ptr(a.DT).Ptr(a.G).Ptr(sorted).Ptr(starts).Int32(a.D).Int32(accumulate)
	return k.launch(s, "embedding", variant+name, c, l)
}

// groupRows leaves where each id's group of rows starts, vocab + 1 ints, at the start of the workspace, and returns where the
// rows themselves are.
func (k *Kernels) groupRows(s driver.Stream, a EmbeddingBackward) (sorted driver.Ptr, err error) {
	starts := a.Workspace
	cursors := starts.Offset(4 * (a.Vocab + 1))
	members := cursors.Offset(4 * (a.Vocab + 1))
	sorted = members.Offset(4 * a.Rows)
	if err := k.ctx.Memset32(cursors, 0, a.Vocab, s); err != nil {
		return 0, err
	}
	rows := line(max(1, ceilDiv(a.Rows, 256)), 256)
	ids := func(l *driver.Args) *driver.Args { return l.Ptr(a.IDs.Ptr).Int32(a.IDs.size()) }
	for _, step := range []struct {
		name   string
		config driver.LaunchConfig
		args   *driver.Args
	}{
		{"embedding_count", rows, ids(args().Ptr(cursors)).Int32(a.Rows).Int64(int64(a.Vocab))},
		{"embedding_starts", line(1, 1024), args().Ptr(starts).Ptr(cursors).Ptr(cursors).Int32(a.Vocab)},
		{"embedding_fill", rows, ids(args().Ptr(members).Ptr(cursors)).Int32(a.Rows).Int64(int64(a.Vocab))},
		{"embedding_sort", rows, ids(args().Ptr(sorted).Ptr(members).Ptr(starts)).Int64(int64(a.Vocab))},
	} {
		if err := k.launch(s, "embedding", step.name, step.config, step.args); err != nil {
			return 0, err
		}
	}
	return sorted, nil
}
