package main

import (
	"math/rand/v2"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/internal/opcase"
	"github.com/kasmina-go/kasmina/op"
)

// opChecks returns the checks of all ops except Kasmina, and of recomputation. The cases are shared with
// the tests of the ops.
func opChecks() []check {
	var checks []check
	r := rand.New(rand.NewPCG(1, 1)) // for the shapes; each run of a check draws different numbers
	for _, o := range opcase.All {
		if o.Cases == nil {
			continue
		}
		for _, c := range o.Cases(r) {
			checks = append(checks, caseCheck(o.Name, c))
		}
	}

	add := func(name, config string, build func(in *inputs) (*gorgonia.Node, error)) {
		checks = append(checks, checkOf(name, config, build))
	}
	add("Recompute", "embedding, norm and MLP", func(in *inputs) (*gorgonia.Node, error) {
		return autodiff.Recompute(blockInputs(in), block)
	})
	add("Recompute", "attention of documents", func(in *inputs) (*gorgonia.Node, error) {
		return autodiff.Recompute(documentInputs(in), documents)
	})
	add("Recompute", "within Recompute", func(in *inputs) (*gorgonia.Node, error) {
		return autodiff.Recompute(blockInputs(in), func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			h, err := autodiff.Recompute(in, block)
			if err != nil {
				return nil, err
			}
			return gorgonia.Tanh(h)
		})
	})

	return checks
}

// caseCheck returns a check for one case of an op, with different numbers in each run. For a large input, it
// changes single elements at random positions, and all elements together.
func caseCheck(name string, c opcase.Case) check {
	return check{name, c.String(), func(r *rand.Rand) ([]autodiff.CheckReport, error) {
		drawn := c
		drawn.In = nil
		for _, in := range c.In {
			if in.IDs == nil {
				in.Values = opcase.Normal(r, in.Shape...).Values
			}
			drawn.In = append(drawn.In, in)
		}

		nodes, wrt := drawn.Nodes(tensor.Float64)
		y, err := c.Build(nodes)
		if err != nil {
			return nil, err
		}
		cost, err := weigh(&inputs{Rand: r, g: y.Graph()}, y)
		if err != nil {
			return nil, err
		}
		report, err := autodiff.CheckGradients(cost, wrt, autodiff.WithSamples(20),
			autodiff.WithSeed(r.Uint64()))
		return []autodiff.CheckReport{report}, err
	}}
}

// documentInputs returns the inputs of attention within documents of at most 25 tokens.
func documentInputs(in *inputs) gorgonia.Nodes {
	starts := make([]int, 70)
	for i := range starts {
		starts[i] = i / 25 * 25
	}
	return gorgonia.Nodes{in.normal("q", 70, 2), in.normal("k", 70, 1), in.normal("v", 70, 1),
		in.constant("starts", starts, 70)}
}

func documents(in gorgonia.Nodes) (*gorgonia.Node, error) {
	return op.DocumentAttention(in[0], in[1], in[2], in[3], op.AttentionConfig{Seq: 70, Heads: 2,
		KVHeads: 1, HeadDim: 1, Causal: true})
}

func blockInputs(in *inputs) gorgonia.Nodes {
	return gorgonia.Nodes{in.normal("x", 4, 6), in.constant("ids", []int{2, 0, 1, 2}, 4),
		in.normal("table", 3, 6), in.normal("norm", 6),
		in.normal("gate", 5, 6), in.normal("up", 5, 6), in.normal("down", 6, 5)}
}

// block is a small residual block, x + mlp(norm(x + table[ids])).
func block(in gorgonia.Nodes) (*gorgonia.Node, error) {
	e, err := op.Embedding(in[1], in[2])
	if err != nil {
		return nil, err
	}

	h, err := gorgonia.Add(in[0], e)
	if err != nil {
		return nil, err
	}

	if h, err = op.RMSNorm(h, in[3], 1e-6); err != nil {
		return nil, err
	}

	if h, err = op.SiLUMLP(h, in[4], in[5], in[6]); err != nil {
		return nil, err
	}

	return gorgonia.Add(in[0], h)
}
