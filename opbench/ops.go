package opbench

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// graph is an op with its inputs. After an error, which it keeps, nothing more is built.
type graph struct {
	g      *gorgonia.ExprGraph
	shape  []int
	dt     tensor.Dtype
	random *rand.Rand
	params gorgonia.Nodes // inputs of floats
	y      *gorgonia.Node
	err    error
}

func newGraph(shape []int, dt tensor.Dtype) *graph {
	return &graph{g: gorgonia.NewGraph(), shape: shape, dt: dt, random: rand.New(rand.NewPCG(1, 1))}
}

// do takes the result of a function that makes a node.
func (g *graph) do(f func() (*gorgonia.Node, error)) *gorgonia.Node {
	if g.err != nil {
		return nil
	}
	n, err := f()
	g.err = err
	return n
}

// input is an input that holds what next returns.
func (g *graph) input(name string, next func() float64, shape ...int) *gorgonia.Node {
	n := opbase.Size(shape)
	var data any
	if g.dt == tensor.Float64 {
		x := make([]float64, n)
		for i := range x {
			x[i] = next()
		}
		data = x
	} else {
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(next())
		}
		data = x
	}
	return g.holding(name, data, shape...)
}

// holding is an input that holds data.
func (g *graph) holding(name string, data any, shape ...int) *gorgonia.Node {
	value := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
	return gorgonia.NodeFromAny(g.g, value, gorgonia.WithName(name))
}

// normal is a parameter of random numbers.
func (g *graph) normal(name string, shape ...int) *gorgonia.Node {
	scale := 1.0
	if len(shape) == 2 && name != "x" && name != "gradient" {
		scale = 1 / math.Sqrt(float64(shape[1])) // for results of ordinary size
	}
	p := g.input(name, func() float64 { return scale * g.random.NormFloat64() }, shape...)
	g.params = append(g.params, p)
	return p
}

// draw is random ids below n.
func (g *graph) draw(rows, n int) []int {
	x := make([]int, rows)
	for i := range x {
		x[i] = g.random.IntN(n)
	}
	return x
}

// ids is an input of random ids below n.
func (g *graph) ids(name string, rows, n int) *gorgonia.Node {
	return g.holding(name, g.draw(rows, n), rows)
}

// number is a constant.
func (g *graph) number(v float64) *gorgonia.Node {
	if g.dt == tensor.Float64 {
		return gorgonia.NewConstant(v)
	}
	return gorgonia.NewConstant(float32(v))
}

// bytes is the inputs and the result, as the type has them.
func (g *graph) bytes(d Dtype) float64 {
	n := opbase.Size(g.y.Shape())
	for _, p := range g.params {
		n += opbase.Size(p.Shape())
	}
	return float64(n * d.size())
}

// spec is an op that can be timed.
type spec struct {
	name, shape string
	check       func(shape []int) error // nil where every shape will do
	elements    func(shape []int) float64
	flops       func(shape []int) float64
	ours        func(g *graph) *gorgonia.Node
	stock       func(g *graph) *gorgonia.Node // of Gorgonia's own ops, nil where it has none
}

// product returns the product of some numbers of a shape, times a factor: of elements, or
// operations.
func product(factor float64, at ...int) func([]int) float64 {
	return func(shape []int) float64 {
		n := factor
		for _, i := range at {
			n *= float64(shape[i])
		}
		return n
	}
}

// sum adds up what several functions return.
func sum(all ...func([]int) float64) func([]int) float64 {
	return func(shape []int) (n float64) {
		for _, f := range all {
			n += f(shape)
		}
		return n
	}
}

func none([]int) float64 { return 0 }

// divides wants one number of a shape to be a multiple of another.
func divides(what string, of, by int) func([]int) error {
	return func(shape []int) error {
		if shape[of]%shape[by] != 0 {
			return fmt.Errorf("want %s", what)
		}
		return nil
	}
}

// eps is that of RMSNorm.
const eps = 1e-5

// specs are all ops. Those of Gorgonia's own are the same graph for every peer.
var specs = []spec{
	{"RMSNorm", "rows, features", nil, product(2, 0, 1), none,
		func(g *graph) *gorgonia.Node {
			x, w := g.normal("x", g.shape...), g.normal("w", g.shape[1])
			return g.do(func() (*gorgonia.Node, error) { return op.RMSNorm(x, w, eps) })
		}, stockRMSNorm},
	{"Linear", "rows, in, out", nil,
		sum(product(1, 0, 1), product(1, 1, 2), product(1, 0, 2)), product(2, 0, 1, 2),
		func(g *graph) *gorgonia.Node {
			x, w := g.normal("x", g.shape[0], g.shape[1]), g.normal("w", g.shape[2], g.shape[1])
			return g.do(func() (*gorgonia.Node, error) { return op.Linear(x, w) })
		}, stockLinear},
	{"LinearAdd", "rows, in, out", nil,
		sum(product(1, 0, 1), product(1, 1, 2), product(2, 0, 2)), product(2, 0, 1, 2),
		func(g *graph) *gorgonia.Node {
			x, w := g.normal("x", g.shape[0], g.shape[1]), g.normal("w", g.shape[2], g.shape[1])
			d := g.normal("d", g.shape[0], g.shape[2])
			y := g.do(func() (*gorgonia.Node, error) { return op.Linear(x, w) })
			return g.do(func() (*gorgonia.Node, error) { return gorgonia.Add(y, d) })
		}, func(g *graph) *gorgonia.Node {
			y := stockLinear(g)
			d := g.normal("d", g.shape[0], g.shape[2])
			return g.do(func() (*gorgonia.Node, error) { return gorgonia.Add(y, d) })
		}},
	{"SiLUMLP", "rows, features, hidden", nil,
		sum(product(2, 0, 1), product(3, 1, 2), product(3, 0, 2)), product(6, 0, 1, 2),
		func(g *graph) *gorgonia.Node {
			x, gate, up, down := mlpInputs(g)
			return g.do(func() (*gorgonia.Node, error) { return op.SiLUMLP(x, gate, up, down) })
		}, stockSiLUMLP},
	{"GELUMLP", "rows, features, hidden", nil,
		sum(product(2, 0, 1), product(3, 1, 2), product(3, 0, 2)), product(6, 0, 1, 2),
		func(g *graph) *gorgonia.Node {
			x, gate, up, down := mlpInputs(g)
			return g.do(func() (*gorgonia.Node, error) { return op.GELUMLP(x, gate, up, down) })
		}, nil},
	{"Bias", "rows, features", nil, sum(product(2, 0, 1), product(1, 1)), none,
		func(g *graph) *gorgonia.Node {
			x, b := g.normal("x", g.shape...), g.normal("b", g.shape[1])
			return g.do(func() (*gorgonia.Node, error) { return op.Bias(x, b) })
		}, func(g *graph) *gorgonia.Node {
			x, b := g.normal("x", g.shape...), g.normal("b", g.shape[1])
			row := g.do(func() (*gorgonia.Node, error) {
				return gorgonia.Reshape(b, []int{1, g.shape[1]})
			})
			return g.do(func() (*gorgonia.Node, error) {
				return gorgonia.BroadcastAdd(x, row, nil, []byte{0})
			})
		}},
	{"RoPE", "batch, positions, heads, head size", even(3), product(4, 0, 1, 2, 3), none,
		func(g *graph) *gorgonia.Node {
			s := g.shape
			x := g.normal("x", s[0]*s[1], s[2]*s[3])
			return g.do(func() (*gorgonia.Node, error) {
				return op.RoPE(x, op.RoPEConfig{Seq: s[1], Heads: s[2], HeadDim: s[3], Base: 10000})
			})
		}, nil},
	{"Attention", "batch, positions, heads, key-value heads, head size",
		divides("a multiple of the key-value heads for heads", 2, 3),
		sum(product(2, 0, 1, 2, 4), product(2, 0, 1, 3, 4)),
		product(2, 0, 1, 1, 2, 4), // 2 products of 2, of which the mask leaves half
		func(g *graph) *gorgonia.Node {
			q, k, v := attentionInputs(g)
			s := g.shape
			c := op.AttentionConfig{Seq: s[1], Heads: s[2], KVHeads: s[3],
				HeadDim: s[4], Causal: true}
			return g.do(func() (*gorgonia.Node, error) { return op.Attention(q, k, v, c) })
		}, stockAttention},
	{"Embedding", "rows, vocabulary, features", nil, sum(product(1, 0, 2), product(1, 1, 2)), none,
		func(g *graph) *gorgonia.Node {
			ids, table := g.ids("ids", g.shape[0], g.shape[1]),
				g.normal("table", g.shape[1], g.shape[2])
			return g.do(func() (*gorgonia.Node, error) { return op.Embedding(ids, table) })
		}, nil},
	{"CrossEntropy", "rows, vocabulary", nil, product(1, 0, 1), none,
		func(g *graph) *gorgonia.Node {
			x, targets := g.normal("x", g.shape...), g.ids("targets", g.shape[0], g.shape[1])
			return g.do(func() (*gorgonia.Node, error) { return op.CrossEntropy(x, targets) })
		}, func(g *graph) *gorgonia.Node {
			x := g.normal("x", g.shape...)
			return stockLoss(g, x, g.shape[1])
		}},
	{"LinearCrossEntropy", "rows, features, vocabulary", nil,
		sum(product(1, 0, 1), product(1, 1, 2)), product(2, 0, 1, 2),
		func(g *graph) *gorgonia.Node {
			x, w := g.normal("x", g.shape[0], g.shape[1]), g.normal("w", g.shape[2], g.shape[1])
			targets := g.ids("targets", g.shape[0], g.shape[2])
			return g.do(func() (*gorgonia.Node, error) {
				return op.LinearCrossEntropy(x, w, targets)
			})
		}, func(g *graph) *gorgonia.Node { return stockLoss(g, stockLinear(g), g.shape[2]) }},
	{"NewtonSchulz", "rows, columns", nil, product(2, 0, 1), newtonSchulzFLOPs,
		func(g *graph) *gorgonia.Node {
			x := g.normal("x", g.shape...)
			return g.do(func() (*gorgonia.Node, error) {
				return op.NewtonSchulz(x, newtonSchulzSteps)
			})
		}, nil},
	{"Kasmina", "rows, features, seeds",
		divides("a multiple of the seeds for features", 1, 2), product(3, 0, 1), none, kasmina,
		nil},
	{"MatMul", "m, k, n", nil,
		sum(product(1, 0, 1), product(1, 1, 2), product(1, 0, 2)), product(2, 0, 1, 2),
		stockMatMul, stockMatMul},
	{"Add", "rows, features", nil, product(3, 0, 1), none, stockAdd, stockAdd},
	{"Tanh", "rows, features", nil, product(2, 0, 1), none, stockTanh, stockTanh},
	{"SoftMax", "rows, features", nil, product(2, 0, 1), none, stockSoftMax, stockSoftMax},
}

// even wants a number of a shape to be even.
func even(i int) func([]int) error {
	return func(shape []int) error {
		if shape[i]%2 != 0 {
			return errors.New("want an even head size")
		}
		return nil
	}
}

// newtonSchulzSteps is Muon's.
const newtonSchulzSteps = 5

// newtonSchulzFLOPs is three products a step: X·Xᵀ, A² and the polynomial with X.
func newtonSchulzFLOPs(shape []int) float64 {
	m, n := float64(min(shape[0], shape[1])), float64(max(shape[0], shape[1]))
	return newtonSchulzSteps * (4*m*m*n + 2*m*m*m)
}

func mlpInputs(g *graph) (x, gate, up, down *gorgonia.Node) {
	rows, d, f := g.shape[0], g.shape[1], g.shape[2]
	return g.normal("x", rows, d), g.normal("gate", f, d), g.normal("up", f, d),
		g.normal("down", d, f)
}

func attentionInputs(g *graph) (q, k, v *gorgonia.Node) {
	rows, s := g.shape[0]*g.shape[1], g.shape
	wide := func(name string, heads int) *gorgonia.Node {
		p := g.input(name, g.random.NormFloat64, rows, heads*s[4])
		g.params = append(g.params, p)
		return p
	}
	return wide("q", s[2]), wide("k", s[3]), wide("v", s[3])
}

// kasmina is a layer whose seeds all graft with α ½, the four kinds with a weight a feature in
// turn.
func kasmina(g *graph) *gorgonia.Node {
	rows, d, seeds := g.shape[0], g.shape[1], g.shape[2]
	lattice, err := state.NewLattice(seeds, d, state.WithoutGates())
	if err != nil {
		g.err = err
		return nil
	}
	kinds := []blueprints.Kind{blueprints.Residual, blueprints.AttentionGate,
		blueprints.MLPExpansion,
		blueprints.ConvFilter}
	for s := range seeds {
		r := state.GerminationRequest{Slot: 1 + s, Kind: kinds[s%len(kinds)]}
		g.err = errors.Join(g.err, lattice.RequestGermination(s, r),
			lattice.Transition(s, state.Training),
			lattice.Transition(s, state.Grafting), lattice.SetAlpha(s, 0.5))
	}
	x, w, a := g.normal("x", rows, d), g.normal("weights", seeds+1, d/seeds),
		g.normal("scales", seeds+1)
	return g.do(func() (*gorgonia.Node, error) { return op.Kasmina(x, w, a, lattice) })
}
