package main

import (
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/op"
)

// opChecks returns the checks of all ops but Kasmina.
func opChecks() []check {
	var checks []check
	add := func(name, config string, build func(in *inputs) (*gorgonia.Node, error)) {
		checks = append(checks, checkOf(name, config, build))
	}
	for _, eps := range []float64{1e-6, 0.5} {
		add("RMSNorm", fmt.Sprintf("5×7, eps %g", eps), func(in *inputs) (*gorgonia.Node, error) {
			return op.RMSNorm(in.normal("x", 5, 7), in.normal("weight", 7), eps)
		})
	}
	add("RMSNorm", "4×(3 heads of 5), 1 + weight", func(in *inputs) (*gorgonia.Node, error) {
		return op.RMSNorm(in.normal("x", 4, 15), in.normal("weight", 5), 1e-6,
			op.EachHead(), op.WeightPlusOne())
	})
	for i, c := range ropes {
		add("RoPE", fmt.Sprintf("%d positions, %d heads of %d, %s", c.Seq, c.Heads, c.HeadDim,
			ropeNames[i]), func(in *inputs) (*gorgonia.Node, error) {
			return op.RoPE(in.normal("x", 2*c.Seq, c.Heads*c.HeadDim), c)
		})
	}
	add("SiLUMLP", "5×6, 9 inner", func(in *inputs) (*gorgonia.Node, error) {
		return op.SiLUMLP(in.normal("x", 5, 6), in.normal("gate", 9, 6), in.normal("up", 9, 6),
			in.normal("down", 6, 9))
	})
	add("GELUMLP", "5×6, 9 inner", func(in *inputs) (*gorgonia.Node, error) {
		return op.GELUMLP(in.normal("x", 5, 6), in.normal("gate", 9, 6), in.normal("up", 9, 6),
			in.normal("down", 6, 9))
	})
	for _, c := range attentions {
		config := fmt.Sprintf("%d positions, %d heads on %d of %d", c.Seq,
			c.Heads, c.KVHeads, c.HeadDim)
		if c.Causal {
			config += ", causal"
		}
		if c.Window > 0 {
			config += fmt.Sprintf(", window of %d", c.Window)
		}
		add("Attention", config, func(in *inputs) (*gorgonia.Node, error) {
			rows, kv := 2*c.Seq, c.KVHeads*c.HeadDim
			return op.Attention(in.normal("q", rows, c.Heads*c.HeadDim), in.normal("k", rows, kv),
				in.normal("v", rows, kv), c)
		})
	}
	add("DocumentAttention", "70 positions, 3 documents, 2 heads on 1 of 1",
		func(in *inputs) (*gorgonia.Node, error) {
			return documents(documentInputs(in))
		})
	add("Bias", "5×7", func(in *inputs) (*gorgonia.Node, error) {
		return op.Bias(in.normal("x", 5, 7), in.normal("b", 7))
	})
	add("Linear", "5×7 to 4", func(in *inputs) (*gorgonia.Node, error) {
		return op.Linear(in.normal("x", 5, 7), in.normal("w", 4, 7))
	})
	add("Embedding", "6 rows of 4×5", func(in *inputs) (*gorgonia.Node, error) {
		return op.Embedding(in.constant("ids", []int{3, 0, 3, 1, 2, 3}, 6),
			in.normal("table", 4, 5))
	})
	add("CrossEntropy", "4×9, one row ignored", func(in *inputs) (*gorgonia.Node, error) {
		return op.CrossEntropy(in.normal("logits", 4, 9),
			in.constant("targets", []int{8, 0, -1, 3}, 4))
	})
	add("LinearCrossEntropy", "4×5 to 9, one row ignored",
		func(in *inputs) (*gorgonia.Node, error) {
			return op.LinearCrossEntropy(in.normal("x", 4, 5), in.normal("w", 9, 5),
				in.constant("targets", []int{8, 0, -1, 3}, 4))
		})
	for _, s := range [][3]int{{4, 7, 5}, {7, 4, 5}, {5, 5, 2}} {
		add("NewtonSchulz", fmt.Sprintf("%d×%d, %d steps", s[0], s[1], s[2]),
			func(in *inputs) (*gorgonia.Node, error) {
				return op.NewtonSchulz(in.normal("x", s[0], s[1]), s[2])
			})
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

var (
	ropes = []op.RoPEConfig{
		{Seq: 5, Heads: 3, HeadDim: 4},
		{Seq: 7, Heads: 1, HeadDim: 8, Base: 500, Scaling: &op.RoPEScaling{Factor: 8, LowFreq: 1,
			HighFreq: 4, Original: 64}},
		{Seq: 7, Heads: 2, HeadDim: 8, Base: 500, Scaling: &op.RoPEScaling{Factor: 8, BetaFast: 32,
			BetaSlow: 1, Original: 640}},
	}
	ropeNames  = []string{"base 10000", "scaled for longer contexts", "scaled by YaRN"}
	attentions = []op.AttentionConfig{
		{Seq: 5, Heads: 2, KVHeads: 2, HeadDim: 3, Causal: true},
		{Seq: 5, Heads: 2, KVHeads: 2, HeadDim: 3},
		{Seq: 4, Heads: 4, KVHeads: 2, HeadDim: 3, Causal: true},
		{Seq: 3, Heads: 6, KVHeads: 1, HeadDim: 2, Causal: true, Scale: 0.3},
		{Seq: 70, Heads: 2, KVHeads: 1, HeadDim: 2, Causal: true},
		{Seq: 300, Heads: 2, KVHeads: 1, HeadDim: 2, Causal: true, Window: 37},
	}
)

// documentInputs are those of attention to documents of 25 tokens at most.
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
