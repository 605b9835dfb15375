package lower

import (
	"slices"
	"strconv"
	"strings"
	"unicode"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// Gorgonia does not export the types of its ops. They are told apart by their type's name and by
// what String says. Sizes come from the shapes of nodes. Where these do not fit what String says,
// there is no lowering, and the op itself computes.

// stockOp is what the compiler knows of an op of Gorgonia's.
type stockOp struct {
	find   func(n *gorgonia.Node) lowering // nil if there is none for the node
	scaled linearity                       // nil for an op that is not linear in anything
}

// stockOps holds them by the name of the op's type. The types of gradients stand beside those of
// their ops; most gradients, and functions such as Rectify and Mean, are made of other ops.
var stockOps map[string]stockOp

func init() {
	stockOps = map[string]stockOp{
		"gorgonia.elemUnaryOp":    {stockUnary, inNegated},
		"gorgonia.elemBinOp":      {stockBinary, inOperands},
		"gorgonia.minBetween":     {stockBinary, nil},
		"gorgonia.maxBetween":     {stockBinary, nil},
		"gorgonia.linAlgBinOp":    {stockProduct, inOne},
		"gorgonia.sumOp":          {stockReduction, inAll},
		"*gorgonia.maxOp":         {stockReduction, nil},
		"*gorgonia.softmaxOp":     {stockSoftmax, nil},
		"*gorgonia.softmaxDiffOp": {stockSoftmax, inInput(2)},
		"gorgonia.reshapeOp":      {stockMoves(reshaped), inAll},
		"gorgonia.transposeOp":    {stockMoves(transposed), inAll},
		"*gorgonia.sliceOp":       {stockMoves(sliced), inAll},
		"gorgonia.sliceIncrOp":    {stockMoves(sliced), inAdded},
		"gorgonia.concatOp":       {stockMoves(concatenated), inAll},
		"*gorgonia.repeatOp":      {stockMoves(repeats), inInput(0)},
		"gorgonia.sizeOp":         {stockSize, sizeOnly},
	}
}

// floats reports whether a node and its inputs hold floats.
func floats(n *gorgonia.Node) bool {
	return !slices.ContainsFunc(append(graph.Children(n), n), func(n *gorgonia.Node) bool {
		return n.Dtype() != tensor.Float32
	})
}

// integers returns the numbers that stand in s, which has no negative ones.
func integers(s string) []int {
	var all []int
	for _, digits := range strings.FieldsFunc(s, func(r rune) bool { return !unicode.IsDigit(r) }) {
		if v, err := strconv.Atoi(digits); err == nil {
			all = append(all, v)
		}
	}
	return all
}

// around cuts a shape at an axis: the sizes of what is before it, of itself, and of what is behind.
func around(s tensor.Shape, axis int) (outer, n, inner int) {
	return opbase.Size(s[:axis]), s[axis], opbase.Size(s[axis+1:])
}

// fed returns an input of the graph as activations, and anything else as it is.
func (c *compiler) fed(n *gorgonia.Node, a *program.Array) *program.Array {
	if c.inputOf[a.Buffer] != nil && a.Type != gpu.Int64 {
		return c.act(n, a)
	}
	return a
}
