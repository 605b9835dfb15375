package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/embedding"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

func lowerEmbedding(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	ids, table := in[0], c.act(n, in[1])
	c.bound(ids, program.IDRange{Op: "Embedding", Argument: "ids", Vocab: table.Shape[0]})
	y := c.NewArray(table.Type, n.Shape()...)
	c.call(n, embedding.Forward{IDs: ints(), Rows: y.Shape[0],
		Vocab: table.Shape[0], D: table.Shape[1],
		Type: y.Type, TableType: table.Type},
		program.Reads("IDs", ids), program.Reads("Table", table), program.Writes("Y", y))
	return y, nil
}

func lowerEmbeddingGrad(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array,
	error) {
	dt := c.aux(n.Shape()...)
	c.embeddingGrad(n, in[0], c.act(n, in[1]), program.Writes("DT", dt))
	return dt, nil
}

// embeddingGrad adds the gradient of a table, which is written to dt, or added to what is there
// where dt is updated.
func (c *compiler) embeddingGrad(n *gorgonia.Node, ids, g *program.Array, dt program.Arg) {
	a := embedding.Backward{IDs: ints(), Rows: g.Shape[0], Vocab: dt.Shape[0], D: dt.Shape[1],
		DTType: gpu.Float32, GType: g.Type, Accumulate: dt.Role == program.Update}
	c.call(n, a, program.Reads("IDs", ids), program.Reads("G", g), dt,
		program.Uses("Workspace", c.bytes(a.WorkspaceBytes(c.o.Device))))
}
