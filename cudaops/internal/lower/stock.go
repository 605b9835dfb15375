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

// Gorgonia doesn't export the types of its ops. They are recognized by the name of their type and by
// their string representation, and sizes are taken from the shapes of nodes. If shapes and string don't
// agree, the node isn't lowered to kernels, and the op itself computes it on the host.

// stockOp describes how to compile one of Gorgonia's ops.
type stockOp struct {
	find func(n *gorgonia.Node) lowering // returns nil if the node can't be lowered

	// scaled determines whether the result carries the loss scale that inputs carry. It is nil if the op is
	// not linear in any input.
	scaled linearity
}

// stockOps maps type names to ops. Gradient ops are listed next to their forward ops. Most gradients, and
// functions such as Rectify and Mean, have no entry because they are composed of other ops.
//
// The map is filled in init, because some of its functions refer to the map.
var stockOps map[string]stockOp

func init() {
	stockOps = map[string]stockOp{
		"gorgonia.elemUnaryOp":    {stockUnary, linearIfNegation},
		"gorgonia.elemBinOp":      {stockBinary, linearInOperands},
		"gorgonia.minBetween":     {stockBinary, nil},
		"gorgonia.maxBetween":     {stockBinary, nil},
		"gorgonia.linAlgBinOp":    {stockProduct, linearInEach},
		"gorgonia.sumOp":          {stockReduction, linearInAll},
		"*gorgonia.maxOp":         {stockReduction, nil},
		"*gorgonia.softmaxOp":     {stockSoftmax, nil},
		"*gorgonia.softmaxDiffOp": {stockSoftmax, linearIn(2)},
		"gorgonia.reshapeOp":      {stockMoves(reshaped), linearInAll},
		"gorgonia.transposeOp":    {stockMoves(transposed), linearInAll},
		"*gorgonia.sliceOp":       {stockMoves(sliced), linearInAll},
		"gorgonia.sliceIncrOp":    {stockMoves(sliced), linearInSecond},
		"gorgonia.concatOp":       {stockMoves(concatenated), linearInAll},
		"*gorgonia.repeatOp":      {stockMoves(repeats), linearIn(0)},
		"gorgonia.sizeOp":         {stockSize, sizeOnly},
	}
}

// floats reports whether a node and all its inputs have type float32.
func floats(n *gorgonia.Node) bool {
	return !slices.ContainsFunc(append(graph.Children(n), n), func(n *gorgonia.Node) bool {
		return n.Dtype() != tensor.Float32
	})
}

// integers returns the nonnegative integers that appear in s.
func integers(s string) []int {
	var all []int
	for _, digits := range strings.FieldsFunc(s, func(r rune) bool { return !unicode.IsDigit(r) }) {
		if v, err := strconv.Atoi(digits); err == nil {
			all = append(all, v)
		}
	}
	return all
}

// splitAt returns the product of the dimensions before an axis, the dimension of the axis, and the
// product of the dimensions after it.
func splitAt(s tensor.Shape, axis int) (outer, n, inner int) {
	return opbase.Size(s[:axis]), s[axis], opbase.Size(s[axis+1:])
}

// inputAsActivation returns a converted to the activation type if a is an input of the graph and does not
// hold integers. Otherwise it returns a itself.
func (c *compiler) inputAsActivation(n *gorgonia.Node, a *program.Array) *program.Array {
	if c.inputOf[a.Buffer] != nil && a.Type != gpu.Int64 {
		return c.asActivation(n, a)
	}
	return a
}
