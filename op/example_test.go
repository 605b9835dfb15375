package op_test

import (
	"fmt"
	"log"
	"math"
	"math/rand/v2"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/graft"
)

// matrixNode returns an input node of g.
func matrixNode(g *gorgonia.ExprGraph, name string, rows, cols int,
	data ...float64) *gorgonia.Node {
	value := tensor.New(tensor.WithShape(rows, cols), tensor.WithBacking(data))
	return gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithName(name),
		gorgonia.WithShape(rows, cols), gorgonia.WithValue(value))
}

// This example builds a model of one Llama block and computes its loss and gradients for two
// sequences of four tokens. The model consists of an embedding, attention with rotary position
// embeddings, a SiLU-gated MLP, norms, and an output layer with the loss. It is untrained, so its
// loss is close to that of guessing, ln 16 ≈ 2.8.
func Example() {
	const seq, vocab, dim, heads, ff = 4, 16, 8, 2, 24
	g := gorgonia.NewGraph()
	var params gorgonia.Nodes
	r := rand.New(rand.NewPCG(1, 1))
	param := func(name string, rows, cols int) *gorgonia.Node {
		data := make([]float64, rows*cols)
		for i := range data {
			data[i] = 0.1 * r.NormFloat64()
		}
		n := matrixNode(g, name, rows, cols, data...)
		params = append(params, n)
		return n
	}

	ids := func(name string, data ...int) *gorgonia.Node {
		return gorgonia.NewVector(g, tensor.Int, gorgonia.WithName(name),
			gorgonia.WithShape(len(data)),
			gorgonia.WithValue(tensor.New(tensor.WithBacking(data))))
	}
	norm := func(name string, x *gorgonia.Node) *gorgonia.Node {
		w := gorgonia.NewVector(g, tensor.Float64, gorgonia.WithName(name), gorgonia.WithShape(dim),
			gorgonia.WithInit(gorgonia.Ones()))
		params = append(params, w)
		return gorgonia.Must(op.RMSNorm(x, w, 1e-5))
	}

	turned := func(x *gorgonia.Node) *gorgonia.Node {
		return gorgonia.Must(op.RoPE(x, op.RoPEConfig{Seq: seq, Heads: heads,
			HeadDim: dim / heads}))
	}

	embedding := param("embedding", vocab, dim) // which is the output layer too
	x := gorgonia.Must(op.Embedding(ids("tokens", 1, 2, 3, 4, 9, 8, 7, 6), embedding))
	h := norm("norm of attention", x)
	q := turned(gorgonia.Must(op.Linear(h, param("q", dim, dim))))
	k := turned(gorgonia.Must(op.Linear(h, param("k", dim, dim))))
	v := gorgonia.Must(op.Linear(h, param("v", dim, dim)))
	a := gorgonia.Must(op.Attention(q, k, v, op.AttentionConfig{Seq: seq, Heads: heads,
		HeadDim: dim / heads, Causal: true}))
	x = gorgonia.Must(gorgonia.Add(x, gorgonia.Must(op.Linear(a, param("o", dim, dim)))))
	mlp := gorgonia.Must(op.SiLUMLP(norm("norm of mlp", x), param("gate", ff, dim),
		param("up", ff, dim), param("down", dim, ff)))
	x = gorgonia.Must(gorgonia.Add(x, mlp))
	loss := gorgonia.Must(op.LinearCrossEntropy(norm("last norm", x), embedding,
		ids("targets", 2, 3, 4, 5, 8, 7, 6, 5)))
	grads, err := gorgonia.Grad(loss, params...)
	if err != nil {
		fmt.Println(err)
		return
	}

	machine := gorgonia.NewTapeMachine(g)
	defer machine.Close()
	if err := machine.RunAll(); err != nil {
		fmt.Println(err)
		return
	}

	fmt.Printf("loss %.1f, gradients of %d parameters, those of %v %v\n", loss.Value().Data(),
		len(grads), params[0].Name(), grads[0].Shape())
	// Output: loss 3.0, gradients of 11 parameters, those of embedding (16, 8)
}

// This example runs causal attention over two sequences of three positions, with one head of two
// features. All keys are equal, so the output at every position is the average of the values up to
// and including that position.
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

// In this example, two documents share a sequence. All keys are equal, so the output at every
// position is the average of its document's values up to and including that position.
func ExampleDocumentAttention() {
	g := gorgonia.NewGraph()
	q := matrixNode(g, "q", 5, 1, 1, 2, 3, 4, 5)
	k := matrixNode(g, "k", 5, 1, 1, 1, 1, 1, 1)
	v := matrixNode(g, "v", 5, 1, 2, 4, 6, 10, 20)
	starts := gorgonia.NewVector(g, tensor.Int, gorgonia.WithName("starts"), gorgonia.WithShape(5),
		gorgonia.WithValue(tensor.New(tensor.WithBacking([]int{0, 0, 0, 3, 3}))))
	y, err := op.DocumentAttention(q, k, v, starts, op.AttentionConfig{Seq: 5, Heads: 1,
		HeadDim: 1, Causal: true})
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

// This example computes the output layer and the loss of a language model with four words. The first
// position gives all words the same score, and its target is word 2. The second is certain of word
// 1, which is its target. The third has no target.
func ExampleLinearCrossEntropy() {
	g := gorgonia.NewGraph()
	x := matrixNode(g, "x", 3, 2, 0, 0, 0, 50, 1, 1)
	w := matrixNode(g, "w", 4, 2, 1, 0, 0, 1, -1, 0, 0, -1) // a row for each word
	targets := gorgonia.NewVector(g, tensor.Int, gorgonia.WithName("targets"),
		gorgonia.WithShape(3),
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

// This example runs a layer of two seeds over four features. Seed 0 is dormant. Seed 1 fine-tunes a
// Residual blueprint in slot 1, which adds 10 to the two features of the seed.
func ExampleKasmina() {
	lattice, err := state.NewLattice(2, 4, state.WithoutGates())
	if err != nil {
		fmt.Println(err)
		return
	}

	if err := lattice.RequestGermination(1, state.GerminationRequest{Slot: 1,
		Kind: blueprints.Residual}); err != nil {
		fmt.Println(err)
		return
	}

	for _, stage := range []state.Stage{state.Training, state.Grafting, state.Stabilization,
		state.Evaluating, state.FineTuning} {
		if err := lattice.Transition(1, stage); err != nil {
			fmt.Println(err)
			return
		}
	}

	g := gorgonia.NewGraph()
	input := func(name string, data []float64, shape ...int) *gorgonia.Node {
		value := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
		return gorgonia.NewTensor(g, tensor.Float64, len(shape), gorgonia.WithName(name),
			gorgonia.WithShape(shape...), gorgonia.WithValue(value))
	}
	x := input("x", []float64{1, 2, 3, 4}, 1, 4)
	weights := input("weights", []float64{0, 0, 10, 10}, 2, 2) // row 0 is never used
	scales := input("scales", []float64{0, 1}, 2)
	y, err := op.Kasmina(x, weights, scales, lattice)
	if err != nil {
		fmt.Println(err)
		return
	}

	grads, err := gorgonia.Grad(gorgonia.Must(gorgonia.Sum(y)), x, weights, scales)
	if err != nil {
		fmt.Println(err)
		return
	}

	var out, dweights, dscales gorgonia.Value
	gorgonia.Read(y, &out)
	gorgonia.Read(grads[1], &dweights)
	gorgonia.Read(grads[2], &dscales)

	machine := gorgonia.NewTapeMachine(g)
	defer machine.Close()
	if err := machine.RunAll(); err != nil {
		fmt.Println(err)
		return
	}

	fmt.Println("y", out.Data())
	fmt.Println("dweights", dweights.Data())
	fmt.Println("dscales", dscales.Data())
	fmt.Println("mean of seed 1's input", lattice.Report().Seeds[1].Health.Mean)
	// Output:
	// y [1 2 13 14]
	// dweights [0 0 1 1]
	// dscales [0 20]
	// mean of seed 1's input 3.5
}

// This example trains a small classifier on XOR. It consists of Gorgonia's own ops, with a Kasmina
// layer after the hidden features. During the training, seed 0 passes through its whole life cycle.
// The example omits the gates. In a real run, gates use Metrics to decide when a seed may advance.
func ExampleKasmina_training() {
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	const hidden, seeds, slots, width = 8, 2, 3, 8 // width is enough for a rank of 1
	lattice, err := state.NewLattice(seeds, hidden, state.WithSlots(slots),
		state.WithWidth(width), state.WithoutGates())
	check(err)

	g := gorgonia.NewGraph()
	input := func(name string, data []float64, shape ...int) *gorgonia.Node {
		value := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
		return gorgonia.NewTensor(g, tensor.Float64, len(shape), gorgonia.WithName(name),
			gorgonia.WithShape(shape...), gorgonia.WithValue(value))
	}
	start := func(n int) []float64 { // the same in every run
		w := make([]float64, n)
		for i := range w {
			w[i] = math.Sin(float64(3*i + 1))
		}
		return w
	}

	// two features and a constant
	x := input("x", []float64{0, 0, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1}, 4, 3)
	target := input("target", []float64{0, 1, 1, 0}, 4, 1)
	in, out := input("in", start(3*hidden), 3, hidden), input("out", start(hidden), hidden, 1)
	// zeros: slots that a seed starts to use start as its identity
	weights := input("weights", make([]float64, slots*width), slots, width)
	scales := input("scales", make([]float64, slots), slots)
	params := gorgonia.Nodes{in, out, weights, scales}

	h := gorgonia.Must(gorgonia.Tanh(gorgonia.Must(gorgonia.Mul(x, in))))
	y, err := op.Kasmina(h, weights, scales, lattice)
	check(err)
	miss := gorgonia.Must(gorgonia.Sub(gorgonia.Must(gorgonia.Mul(y, out)), target))
	cost := gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(miss))))
	_, err = gorgonia.Grad(cost, params...)
	check(err)
	machine := gorgonia.NewTapeMachine(g, gorgonia.BindDualValues(params...))
	defer machine.Close()
	solver, err := optim.NewAdamW(optim.WithLR(0.02),
		optim.WithGroup(optim.NameContains("weights"), optim.Decay(0)))
	check(err)

	for epoch := range 20 {
		for range 20 {
			check(machine.RunAll())
			check(solver.Step(gorgonia.NodesToValueGrads(params)))
			machine.Reset()
		}
		_, err := lattice.StepEpoch(state.Metrics{Loss: cost.Value().Data().(float64)})
		check(err)
		switch seed := lattice.Report().Seeds[0]; {
		case seed.Stage == state.Dormant && epoch == 4: // it has watched for long enough
			check(lattice.RequestGermination(0, state.GerminationRequest{Slot: 1,
				Kind:     blueprints.ChunkMLP,
				Strategy: graft.FixedRamp{Ramp: graft.Linear, Epochs: 4, Target: 1}}))
		case seed.Stage == state.Dormant || seed.Stage == state.Grafting && !seed.RampFinished ||
			seed.Stage == state.Fossilized:
			continue
		default:
			check(lattice.Transition(0, seed.Stage.Next()))
		}
		if !lattice.LearningSlots()[1] { // momentum must not change frozen parameters
			check(solver.Forget("weights", 1*width, 2*width))
			check(solver.Forget("scales", 1, 2))
		}
		seed := lattice.Report().Seeds[0]
		fmt.Println("epoch", epoch, seed.Stage, seed.Alpha)
	}

	fmt.Println("learnt:", cost.Value().Data().(float64) < 0.01)
	watched := lattice.Report().Seeds[1]
	fmt.Println("seed 1:", watched.Stage, watched.Health.Variance > 0)
	// Output:
	// epoch 4 Germinated 0
	// epoch 5 Training 0
	// epoch 6 Grafting 0
	// epoch 10 Stabilization 1
	// epoch 11 Evaluating 1
	// epoch 12 FineTuning 1
	// epoch 13 Fossilized 1
	// learnt: true
	// seed 1: Dormant true
}
