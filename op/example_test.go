package op_test

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/op"
)

// matrixNode returns an input node of g.
func matrixNode(g *gorgonia.ExprGraph, name string, rows, cols int, data ...float64) *gorgonia.Node {
	value := tensor.New(tensor.WithShape(rows, cols), tensor.WithBacking(data))
	return gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithName(name), gorgonia.WithShape(rows, cols), gorgonia.WithValue(value))
}

// Two sequences of three positions, one head with two features. All keys are alike, so every position sees the average of
// the values up to its own.
func ExampleAttention() {
	g := gorgonia.NewGraph()
	q := matrixNode(g, "q", 6, 2, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6)
	k := matrixNode(g, "k", 6, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
	v := matrixNode(g, "v", 6, 2, 0, 6, 2, 2, 4, 1, 8, 0, 0, 0, 1, 9)
	y, err := op.Attention(q, k, v, op.AttentionConfig{Seq: 3, Heads: 1, HeadDim: 2, Causal: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	var out gorgonia.Value
	gorgonia.Read(y, &out)

	machine := gorgonia.NewTapeMachine(g)
	defer machine.Close()
	if err := machine.RunAll(); err != nil {
		fmt.Println(err)
		return
	}
	for row := range 6 {
		fmt.Printf("%.1f\n", out.Data().([]float64)[2*row:][:2])
	}
	// Output:
	// [0.0 6.0]
	// [1.0 4.0]
	// [2.0 3.0]
	// [8.0 0.0]
	// [4.0 0.0]
	// [3.0 3.0]
}

// Two documents share a sequence. All keys are alike, so every position sees the average of its document's values up to its own.
func ExampleDocumentAttention() {
	g := gorgonia.NewGraph()
	q := matrixNode(g, "q", 5, 1, 1, 2, 3, 4, 5)
	k := matrixNode(g, "k", 5, 1, 1, 1, 1, 1, 1)
	v := matrixNode(g, "v", 5, 1, 2, 4, 6, 10, 20)
	starts := gorgonia.NewVector(g, tensor.Int, gorgonia.WithName("starts"), gorgonia.WithShape(5),
		gorgonia.WithValue(tensor.New(tensor.WithBacking([]int{0, 0, 0, 3, 3}))))
	y, err := op.DocumentAttention(q, k, v, starts, op.AttentionConfig{Seq: 5, Heads: 1, HeadDim: 1, Causal: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	var out gorgonia.Value
	gorgonia.Read(y, &out)

	machine := gorgonia.NewTapeMachine(g)
	defer machine.Close()
	if err := machine.RunAll(); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(out.Data())
	// Output:
	// [2 3 4 10 15]
}

// The output layer and loss of a language model with four words: the first position scores them all alike and should say
// word 2, the second is sure of word 1, and rightly so. The third has no target.
func ExampleLinearCrossEntropy() {
	g := gorgonia.NewGraph()
	x := matrixNode(g, "x", 3, 2, 0, 0, 0, 50, 1, 1)
	w := matrixNode(g, "w", 4, 2, 1, 0, 0, 1, -1, 0, 0, -1) // a row for each word
	targets := gorgonia.NewVector(g, tensor.Int, gorgonia.WithName("targets"), gorgonia.WithShape(3),
		gorgonia.WithValue(tensor.New(tensor.WithBacking([]int{2, 1, -1}))))
	loss, err := op.LinearCrossEntropy(x, w, targets)
	if err != nil {
		fmt.Println(err)
		return
	}
	grads, err := gorgonia.Grad(loss, x)
	if err != nil {
		fmt.Println(err)
		return
	}
	var mean, dx gorgonia.Value
	gorgonia.Read(loss, &mean)
	gorgonia.Read(grads[0], &dx)

	machine := gorgonia.NewTapeMachine(g)
	defer machine.Close()
	if err := machine.RunAll(); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("loss %.4f, which is (ln 4 + 0)/2\n", mean.Data())
	fmt.Printf("dx of the first position %.3f\n", dx.Data().([]float64)[:2])
	fmt.Printf("dx of the third %.3f\n", dx.Data().([]float64)[4:])
	// Output:
	// loss 0.6931, which is (ln 4 + 0)/2
	// dx of the first position [0.500 0.000]
	// dx of the third [0.000 0.000]
}
