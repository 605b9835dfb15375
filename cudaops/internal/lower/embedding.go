package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/embedding"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

func lowerEmbedding(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	ids, table := in[0], c.act(n, in[1])
	c.bound(ids, program.IDRange{Op: "Embedding", Argument: "ids", Vocab: table.Shape[0]})
	y := c.NewArray(table.Type, n.Shape()...)
	c.call(n, embedding.Forward{IDs: ints(), Rows: y.Shape[0],
		Vocab: table.Shape[0], D: table.Shape[1],
		Type: y.Type, TableType: table.Type},
		program.Reads("IDs", ids), program.Reads("Table", table), program.Writes("Y", y))
	return y
}

// lowerEmbeddingGrad adds the gradient of a table to that of the output layer, if they are one.
func lowerEmbeddingGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	g, dt := c.act(n, in[1]), program.Updates("DT", c.tied(n))
	if dt.Array == nil {
		dt = program.Writes("DT", c.aux(n.Shape()...))
	}
	a := embedding.Backward{IDs: ints(), Rows: g.Shape[0], Vocab: dt.Shape[0], D: dt.Shape[1],
		DTType: gpu.Float32, GType: g.Type, Accumulate: dt.Role == program.Update}
	c.call(n, a, program.Reads("IDs", in[0]), program.Reads("G", g), dt,
		program.Uses("Workspace", c.bytes(a.WorkspaceBytes(c.o.Device))))
	return dt.Array
}
