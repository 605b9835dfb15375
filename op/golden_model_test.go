package op_test

import (
	"fmt"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/op"
)

// TestGoldenModel compares the loss and all gradients of a whole model with PyTorch's: a Llama of two blocks with a Kasmina
// layer between them.
func TestGoldenModel(t *testing.T) {
	for _, c := range loadGolden(t, "model") {
		for _, e := range goldenErrors {
			t.Run(fmt.Sprintf("%s/%v", c.name, e.dtype), func(t *testing.T) {
				c.check(t, e.dtype, e.forward, e.backward, func(c *goldenCase, in gorgonia.Nodes) (*gorgonia.Node, error) {
					return goldenModel(t, c, in), nil
				})
			})
		}
	}
}

// goldenModel returns the model's loss.
func goldenModel(t *testing.T, c *goldenCase, in gorgonia.Nodes) *gorgonia.Node {
	s := settings[struct {
		Seq, Heads, KVHeads, HeadDim, Blocks int
		Eps                                  float64
		Seeds                                []seedSetting
	}](c)
	nodes := make(map[string]*gorgonia.Node)
	for _, n := range in {
		nodes[n.Name()] = n
	}
	must := must(t)
	x := must(op.Embedding(nodes["ids"], nodes["embedding"]))
	for i := range s.Blocks {
		w := func(name string) *gorgonia.Node { return nodes[fmt.Sprintf("block%d.%s", i, name)] }
		h := must(op.RMSNorm(x, w("norm1"), s.Eps))
		q := must(op.RoPE(must(op.Linear(h, w("q"))), op.RoPEConfig{Seq: s.Seq, Heads: s.Heads, HeadDim: s.HeadDim}))
		k := must(op.RoPE(must(op.Linear(h, w("k"))), op.RoPEConfig{Seq: s.Seq, Heads: s.KVHeads, HeadDim: s.HeadDim}))
		a := must(op.Attention(q, k, must(op.Linear(h, w("v"))),
			op.AttentionConfig{Seq: s.Seq, Heads: s.Heads, KVHeads: s.KVHeads, HeadDim: s.HeadDim, Causal: true}))
		x = must(gorgonia.Add(x, must(op.Linear(a, w("o")))))
		h = must(op.RMSNorm(x, w("norm2"), s.Eps))
		x = must(gorgonia.Add(x, must(op.SiLUMLP(h, w("gate"), w("up"), w("down")))))
		if i == 0 {
			x = must(op.Kasmina(x, nodes["weights"], nodes["scales"], newLattice(t, x.Shape()[1], s.Seeds)))
		}
	}
	x = must(op.RMSNorm(x, nodes["norm"], s.Eps))
	return must(op.LinearCrossEntropy(x, nodes["head"], nodes["targets"]))
}
