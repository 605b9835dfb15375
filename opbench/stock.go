package opbench

import (
	"errors"
	"math"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// The ops of this module made of Gorgonia's own.

// room reports whether Gorgonia's machine, which keeps all values until a run ends, has room for so
// many numbers.
func (g *graph) room(what string, elements float64) bool {
	if err := fits(what, elements); g.err == nil && err != nil {
		g.err = err
	}
	return g.err == nil
}

func stockMatMul(g *graph) *gorgonia.Node {
	a, b := g.normal("a", g.shape[0], g.shape[1]), g.normal("b", g.shape[1], g.shape[2])
	return g.do(func() (*gorgonia.Node, error) { return gorgonia.Mul(a, b) })
}

func stockAdd(g *graph) *gorgonia.Node {
	a, b := g.normal("a", g.shape...), g.normal("b", g.shape...)
	return g.do(func() (*gorgonia.Node, error) { return gorgonia.Add(a, b) })
}

func stockTanh(g *graph) *gorgonia.Node {
	x := g.normal("x", g.shape...)
	return g.do(func() (*gorgonia.Node, error) { return gorgonia.Tanh(x) })
}

func stockSoftMax(g *graph) *gorgonia.Node {
	x := g.normal("x", g.shape...)
	return g.do(func() (*gorgonia.Node, error) { return gorgonia.SoftMax(x) })
}

// stockRMSNorm is x / sqrt(mean(x²) + eps) ⊙ w.
func stockRMSNorm(g *graph) *gorgonia.Node {
	x, w := g.normal("x", g.shape...), g.normal("w", g.shape[1])
	n := g.do(func() (*gorgonia.Node, error) { return gorgonia.Square(x) })
	n = g.do(func() (*gorgonia.Node, error) { return gorgonia.Mean(n, 1) })
	n = g.do(func() (*gorgonia.Node, error) { return gorgonia.Add(n, g.number(eps)) })
	n = g.do(func() (*gorgonia.Node, error) { return gorgonia.Sqrt(n) })
	n = g.do(func() (*gorgonia.Node, error) {
		return gorgonia.BroadcastHadamardDiv(x, n, nil, []byte{1})
	})
	return g.do(func() (*gorgonia.Node, error) {
		return gorgonia.BroadcastHadamardProd(n, w, nil, []byte{0})
	})
}

// stockLinear is x·wᵀ.
func stockLinear(g *graph) *gorgonia.Node {
	x, w := g.normal("x", g.shape[0], g.shape[1]), g.normal("w", g.shape[2], g.shape[1])
	return g.transposed(x, w)
}

// transposed is x·wᵀ.
func (g *graph) transposed(x, w *gorgonia.Node) *gorgonia.Node {
	t := g.do(func() (*gorgonia.Node, error) { return gorgonia.Transpose(w) })
	return g.do(func() (*gorgonia.Node, error) { return gorgonia.Mul(x, t) })
}

// stockSiLUMLP is (silu(x·gateᵀ) ⊙ x·upᵀ)·downᵀ.
func stockSiLUMLP(g *graph) *gorgonia.Node {
	x, gate, up, down := mlpInputs(g)
	a, b := g.transposed(x, gate), g.transposed(x, up)
	s := g.do(func() (*gorgonia.Node, error) { return gorgonia.Sigmoid(a) })
	s = g.do(func() (*gorgonia.Node, error) { return gorgonia.HadamardProd(a, s) })
	s = g.do(func() (*gorgonia.Node, error) { return gorgonia.HadamardProd(s, b) })
	return g.transposed(s, down)
}

// stockLoss is the mean of −log softmax(logits) at the targets, which are a one-hot matrix.
func stockLoss(g *graph, logits *gorgonia.Node, vocab int) *gorgonia.Node {
	rows, at := g.shape[0], -1
	if !g.room("logits take", 6*float64(rows)*float64(vocab)) {
		return nil
	}
	targets := g.draw(rows, vocab)
	hot := g.input("one-hot", func() float64 {
		if at++; targets[at/vocab] == at%vocab {
			return 1
		}
		return 0
	}, rows, vocab)
	p := g.do(func() (*gorgonia.Node, error) { return gorgonia.SoftMax(logits) })
	p = g.do(func() (*gorgonia.Node, error) { return gorgonia.Log(p) })
	p = g.do(func() (*gorgonia.Node, error) { return gorgonia.HadamardProd(p, hot) })
	p = g.do(func() (*gorgonia.Node, error) { return gorgonia.Sum(p) })
	return g.do(func() (*gorgonia.Node, error) {
		return gorgonia.Mul(p, g.number(-1/float64(rows)))
	})
}

// stockAttention is softmax(q·kᵀ/√d + mask)·v for every head, which have keys and values of their
// own.
func stockAttention(g *graph) *gorgonia.Node {
	batch, seq, heads, d := g.shape[0], g.shape[1], g.shape[2], g.shape[4]
	if g.shape[3] != heads {
		g.err = errors.New(
			"there is nothing for heads that share keys and values among Gorgonia's ops")
		return nil
	}
	if !g.room("scores of all heads take",
		6*float64(batch)*float64(heads)*float64(seq)*float64(seq)) {
		return nil
	}
	q, k, v := attentionInputs(g)
	at := -1
	mask := g.input("mask", func() float64 {
		if at++; at%seq > at/seq%seq {
			return -1e9
		}
		return 0
	}, batch*heads, seq, seq)
	apart := func(x *gorgonia.Node) *gorgonia.Node {
		x = g.do(func() (*gorgonia.Node, error) {
			return gorgonia.Reshape(x, tensor.Shape{batch, seq, heads, d})
		})
		x = g.do(func() (*gorgonia.Node, error) { return gorgonia.Transpose(x, 0, 2, 1, 3) })
		return g.do(func() (*gorgonia.Node, error) {
			return gorgonia.Reshape(x, tensor.Shape{batch * heads, seq, d})
		})
	}
	qh, kh, vh := apart(q), apart(k), apart(v)
	p := g.do(func() (*gorgonia.Node, error) { return gorgonia.BatchedMatMul(qh, kh, false, true) })
	p = g.do(func() (*gorgonia.Node, error) {
		return gorgonia.Mul(p, g.number(1/math.Sqrt(float64(d))))
	})
	p = g.do(func() (*gorgonia.Node, error) { return gorgonia.Add(p, mask) })
	p = g.do(func() (*gorgonia.Node, error) {
		return gorgonia.Reshape(p, tensor.Shape{batch * heads * seq, seq})
	})
	p = g.do(func() (*gorgonia.Node, error) { return gorgonia.SoftMax(p) })
	p = g.do(func() (*gorgonia.Node, error) {
		return gorgonia.Reshape(p, tensor.Shape{batch * heads, seq, seq})
	})
	p = g.do(func() (*gorgonia.Node, error) { return gorgonia.BatchedMatMul(p, vh) })
	p = g.do(func() (*gorgonia.Node, error) {
		return gorgonia.Reshape(p, tensor.Shape{batch, heads, seq, d})
	})
	p = g.do(func() (*gorgonia.Node, error) { return gorgonia.Transpose(p, 0, 2, 1, 3) })
	return g.do(func() (*gorgonia.Node, error) {
		return gorgonia.Reshape(p, tensor.Shape{batch * seq, heads * d})
	})
}
