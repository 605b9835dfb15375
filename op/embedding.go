// The parts of Embedding:
//   - shapes and gradients: this file
//   - CPU: internal/cpu/layer/embedding.go
//   - GPU: cudaops/internal/lower/linear.go,
//     cudaops/internal/kernel/embedding
//   - test cases and benchmark: internal/opcase/embedding.go

package op

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// EmbeddingOp is the op that [Embedding] applies.
type EmbeddingOp struct{ opbase.Base }

// Embedding looks up rows of a table:
//
//	y[r] = table[ids[r]]
//
// ids is [rows] of type int, table is [V, D] of float32 or float64, and y is [rows, D]. The run
// returns an error if an id is outside [0, V). The gradient of the table is dense. ids has no
// gradient.
func Embedding(ids, table *gorgonia.Node) (*gorgonia.Node, error) {
	const name = "Embedding"
	ai, at := arg{"ids", ids}, arg{"table", table}
	if err := checkGraph(name, ai, at); err != nil {
		return nil, err
	}

	if err := checkInts(name, ai, -1, ""); err != nil {
		return nil, err
	}

	if err := checkFloats(name, at); err != nil {
		return nil, err
	}

	if err := checkDims(name, at, 2, "[V, D]"); err != nil {
		return nil, err
	}

	o := &EmbeddingOp{}
	opbase.Init(&o.Base, o, name, "", gorgonia.Nodes{ids, table}, table.Dtype(),
		tensor.Shape{ids.Shape()[0], table.Shape()[1]},
		embedding[float32], embedding[float64])
	return gorgonia.ApplyOp(o, ids, table)
}

func embedding[T cpu.Float](o *EmbeddingOp, y []T, in opbase.Args) error {
	ids := opbase.Slice[int](in, 0)
	v, d := o.InputShape(1)[0], o.InputShape(1)[1]
	if err := opbase.CheckIDs("ids", ids, v, false); err != nil {
		return err
	}
	if w := in.CompactWeights(1); w != nil {
		layer.EmbeddingCompact(any(y).([]float32), ids, w)
		return nil
	}
	layer.Embedding(y, ids, opbase.Slice[T](in, 1), d)
	return nil
}

// ReadsCompact reports that the op can read a compact table.
func (o *EmbeddingOp) ReadsCompact(input int) bool { return input == 1 }

// DiffWRT reports that the op is differentiable in the table.
func (o *EmbeddingOp) DiffWRT(int) []bool { return []bool{false, true} }

// SymDiff returns the gradient of the table.
func (o *EmbeddingOp) SymDiff(in gorgonia.Nodes,
	output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, in, output, grad); err != nil {
		return nil, err
	}

	b := &EmbeddingGradOp{}
	inputs := gorgonia.Nodes{in[0], grad}
	opbase.Init(&b.Base, b, "EmbeddingGrad", fmt.Sprint(in[1].Shape()), inputs,
		grad.Dtype(), in[1].Shape(),
		embeddingGrad[float32], embeddingGrad[float64])
	dt, err := gorgonia.ApplyOp(b, inputs...)
	if err != nil {
		return nil, err
	}

	return gorgonia.Nodes{nil, dt}, nil
}

// EmbeddingGradOp computes the gradient of the table from the ids and the output's gradient.
type EmbeddingGradOp struct{ opbase.Base }

func embeddingGrad[T cpu.Float](o *EmbeddingGradOp, dt []T, in opbase.Args) error {
	layer.EmbeddingBackward(dt, opbase.Slice[int](in, 0),
		opbase.Slice[T](in, 1), o.InputShape(1)[1])
	return nil
}
