package op_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/opcase"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// kasminaCases returns one case of the layer for each kind, with a seed in each stage.
func kasminaCases(t *testing.T) (cases []opCase) {
	const chunk, width, slots, rows = 3, 21, 3, 5
	r := random(t)
	stages := int(state.RolledBack) + 1
	for i, kind := range slices.Concat(kasminaKinds, capacityKinds) {
		settings := make([]seedSetting, stages)
		for stage := range stages {
			settings[stage] = seedSetting{state.Stage(stage).String(), kind, 1 + stage%2, 0.375}
		}
		build := func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.Kasmina(in[0], in[1], in[2], newLattice(t, stages*chunk, settings),
				op.WithStability(op.Stability(i%3)), op.WithGradClip(2))
		}
		cases = append(cases, opCase{opcase.Case{Build: build,
			In: []opcase.Input{opcase.Normal(r, rows, stages*chunk), opcase.Normal(r, slots, width),
				opcase.Normal(r, slots)}}, "Kasmina " + kind})
	}

	return cases
}

// lispCost applies the op of a case and uses its first float input a second time. The cost is y if that
// is a scalar, and otherwise Σ c ⊙ y.
func lispCost(t *testing.T, c opCase, in, wrt gorgonia.Nodes,
	dt tensor.Dtype) (y, cost *gorgonia.Node) {
	t.Helper()
	y = must(t)(c.Build(in))
	cost = y
	if !y.IsScalar() {
		weights := make([]float64, y.Shape().TotalSize())
		for i := range weights {
			weights[i] = float64(i%7) - 2.5
		}
		w := gorgonia.NodeFromAny(y.Graph(), dense(dt, weights, y.Shape()...),
			gorgonia.WithName("cost weights"))
		cost = must(t)(gorgonia.Sum(must(t)(gorgonia.HadamardProd(y, w))))
	}

	return y, must(t)(gorgonia.Add(cost, must(t)(gorgonia.Sum(wrt[0]))))
}

// TestLispMachine checks that Gorgonia's LispMachine and tape machine give the same gradients. They may
// add the gradients of several uses in a different order. A second run of the graph adds to the
// gradients, as with Gorgonia's own ops.
func TestLispMachine(t *testing.T) {
	tested := map[string]bool{}
	for _, c := range append(opCases(random(t)), kasminaCases(t)...) {
		for _, dt := range []tensor.Dtype{tensor.Float64, tensor.Float32} {
			in, wrt := c.Nodes(dt)
			y, cost := lispCost(t, c, in, wrt, dt)
			for _, n := range y.Graph().AllNodes() {
				tested[fmt.Sprintf("%T", n.Op())] = true
			}
			want, err := gorgonia.Grad(cost, wrt...)
			require.NoError(t, err)
			run(t, cost.Graph())

			in, wrt = c.Nodes(dt)
			_, cost = lispCost(t, c, in, wrt, dt)
			for runs := range 2 {
				require.NoError(t, runLisp(cost.Graph()), c.name)
				for i, n := range wrt {
					grad, err := n.Grad()
					require.NoError(t, err)
					sum := mapped(floats(t, want[i].Value()),
						func(v float64) float64 { return v * float64(runs+1) })
					tolerance := map[tensor.Dtype]float64{tensor.Float64: 1e-14,
						tensor.Float32: 1e-6}[dt]
					require.LessOrEqual(t, distance(floats(t, grad), sum), tolerance,
						"%s %v: gradient %d, run %d",
						c.name, dt, i, runs)
				}
			}
		}
	}

	for _, o := range differentiableOps(t) {
		require.Contains(t, tested, "*op."+o, "an op that no case has")
	}
}

func runLisp(g *gorgonia.ExprGraph) error {
	machine := gorgonia.NewLispMachine(g)
	defer machine.Close()
	return machine.RunAll()
}

// TestLispMachineChain checks that gradients flow from op to op, and add up if a value is used twice.
func TestLispMachineChain(t *testing.T) {
	r := random(t)
	x, w, v := opcase.Normal(r, 6, 8), opcase.Normal(r, 8, 8), opcase.Normal(r, 8)
	build := func(in gorgonia.Nodes) (*gorgonia.Node, error) {
		h := must(t)(op.RMSNorm(in[0], in[2], 1e-5))
		q := must(t)(op.RoPE(must(t)(op.Linear(h, in[1])),
			op.RoPEConfig{Seq: 3, Heads: 2, HeadDim: 4}))
		a := must(t)(op.Attention(q, h, h, op.AttentionConfig{Seq: 3, Heads: 2, HeadDim: 4,
			Causal: true}))
		return op.SiLUMLP(must(t)(gorgonia.Add(a, h)), in[1], in[1], in[1])
	}

	c := opCase{opcase.Case{In: []opcase.Input{x, w, v}, Build: build}, "chain"}
	in, wrt := c.Nodes(tensor.Float64)
	_, cost := lispCost(t, c, in, wrt, tensor.Float64)
	want, err := gorgonia.Grad(cost, wrt...)
	require.NoError(t, err)
	run(t, cost.Graph())
	in, wrt = c.Nodes(tensor.Float64)
	_, cost = lispCost(t, c, in, wrt, tensor.Float64)
	require.NoError(t, runLisp(cost.Graph()))
	for i, n := range wrt {
		grad, err := n.Grad()
		require.NoError(t, err)
		require.LessOrEqual(t, distance(floats(t, grad), floats(t, want[i].Value())), 1e-14,
			"gradient %d", i)
	}
}

// TestLispMachineSecondDerivatives checks that ops without a second derivative return an error instead of
// 0.
func TestLispMachineSecondDerivatives(t *testing.T) {
	g := gorgonia.NewGraph()
	x := gorgonia.NodeFromAny(g, dense(tensor.Float64, []float64{1, 2, 3, 4}, 2, 2),
		gorgonia.WithName("x"))
	w := gorgonia.NodeFromAny(g, dense(tensor.Float64, []float64{1, 2}, 2), gorgonia.WithName("w"))
	cost := must(t)(gorgonia.Sum(must(t)(op.RMSNorm(x, w, 1e-5))))
	grads, err := gorgonia.Grad(cost, x, w)
	require.NoError(t, err)
	must(t)(gorgonia.Add(must(t)(gorgonia.Sum(grads[0])), must(t)(gorgonia.Sum(grads[1]))))
	require.ErrorContains(t, runLisp(g), "RMSNormGrad")
}

// differentiableOps finds the package's ops with a SymDiff method.
func differentiableOps(t *testing.T) (names []string) {
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		method := regexp.MustCompile(`(?m)^func \(\w+ \*(\w+)\) SymDiff\(`)
		for _, m := range method.FindAllStringSubmatch(string(text), -1) {
			names = append(names, m[1])
		}
	}

	require.GreaterOrEqual(t, len(names), 10)
	return names
}
