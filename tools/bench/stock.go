package main

import (
	"fmt"
	"math"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
)

// stockModel is a model of package llm with the same weights, composed only of Gorgonia's own ops, as in
// a program without this module. Embedding and loss use one-hot matrices, and rotations use products with
// a signed permutation. Weights are stored as [in, out], which is fastest for these ops.
type stockModel struct {
	config       llm.Config
	batch        int
	g            *gorgonia.ExprGraph
	params       gorgonia.Nodes
	ids, targets *gorgonia.Node // one-hot [rows, V]
	loss         *gorgonia.Node
	constants    []*gorgonia.Node // inputs that never change: rotation tables and the causal mask

	byName map[string]*gorgonia.Node
	err    error
}

func newStockModel(m *llm.Model, batch int) (*stockModel, error) {
	c := m.Config
	if c.KVHeads != c.Heads || len(c.Kasmina) > 0 {
		return nil, fmt.Errorf("a stock model cannot have grouped heads or Kasmina layers")
	}

	s := &stockModel{config: c, batch: batch, g: gorgonia.NewGraph(),
		byName: map[string]*gorgonia.Node{}}
	for _, p := range m.Params {
		value := p.Value.Clone().(*tensor.Dense)
		if value.Dims() == 2 && !strings.Contains(p.Name, "embed_tokens") {
			if err := value.T(); err != nil {
				return nil, err
			}
			if err := value.Transpose(); err != nil {
				return nil, err
			}
		}
		n := gorgonia.NodeFromAny(s.g, value, gorgonia.WithName(p.Name))
		s.byName[p.Name], s.params = n, append(s.params, n)
	}

	rows := batch * c.Seq
	s.ids = gorgonia.NewMatrix(s.g, tensor.Float32, gorgonia.WithShape(rows, c.Vocab),
		gorgonia.WithName("ids"))
	s.targets = gorgonia.NewMatrix(s.g, tensor.Float32, gorgonia.WithShape(rows, c.Vocab),
		gorgonia.WithName("targets"))
	s.build()
	if s.err != nil {
		return nil, s.err
	}

	_, err := gorgonia.Grad(s.loss, s.params...)
	return s, err
}

// do calls a function that builds a node, and records its error. After an error, do returns nil without calling the
// function.
func (s *stockModel) do(f func() (*gorgonia.Node, error)) *gorgonia.Node {
	if s.err != nil {
		return nil
	}
	n, err := f()
	s.err = err
	return n
}

func (s *stockModel) build() {
	c := s.config
	table := s.byName["model.embed_tokens.weight"]
	x := s.product(s.ids, table)
	cos, sin, swap := s.rotation()
	mask := s.mask()
	for i := range c.Layers {
		p := fmt.Sprintf("model.layers.%d.", i)
		h := s.norm(x, p+"input_layernorm.weight")
		q := s.rotate(s.product(h, s.byName[p+"self_attn.q_proj.weight"]), cos, sin, swap)
		k := s.rotate(s.product(h, s.byName[p+"self_attn.k_proj.weight"]), cos, sin, swap)
		v := s.product(h, s.byName[p+"self_attn.v_proj.weight"])
		h = s.product(s.attend(s.heads(q), s.heads(k), s.heads(v), mask),
			s.byName[p+"self_attn.o_proj.weight"])
		x = s.add(x, h)
		h = s.norm(x, p+"post_attention_layernorm.weight")
		gate, up := s.product(h, s.byName[p+"mlp.gate_proj.weight"]),
			s.product(h, s.byName[p+"mlp.up_proj.weight"])
		silu := s.times(gate, s.do(func() (*gorgonia.Node, error) {
			return gorgonia.Sigmoid(gate)
		}))
		x = s.add(x, s.product(s.times(silu, up), s.byName[p+"mlp.down_proj.weight"]))
	}

	x = s.norm(x, "model.norm.weight")
	logits := s.do(func() (*gorgonia.Node, error) {
		t, err := gorgonia.Transpose(table)
		if err != nil {
			return nil, err
		}
		return gorgonia.Mul(x, t)
	})

	s.loss = s.do(func() (*gorgonia.Node, error) {
		p, err := gorgonia.SoftMax(logits)
		if err != nil {
			return nil, err
		}
		if p, err = gorgonia.Log(p); err != nil {
			return nil, err
		}
		if p, err = gorgonia.HadamardProd(p, s.targets); err != nil {
			return nil, err
		}
		if p, err = gorgonia.Sum(p); err != nil {
			return nil, err
		}
		return gorgonia.Mul(p, gorgonia.NewConstant(float32(-1/float64(s.batch*s.config.Seq))))
	})
}

func (s *stockModel) product(x, w *gorgonia.Node) *gorgonia.Node {
	return s.do(func() (*gorgonia.Node, error) { return gorgonia.Mul(x, w) })
}

func (s *stockModel) add(a, b *gorgonia.Node) *gorgonia.Node {
	return s.do(func() (*gorgonia.Node, error) { return gorgonia.Add(a, b) })
}

func (s *stockModel) times(a, b *gorgonia.Node) *gorgonia.Node {
	return s.do(func() (*gorgonia.Node, error) { return gorgonia.HadamardProd(a, b) })
}

// norm is RMSNorm: x / sqrt(mean(x²) + eps) ⊙ weight.
func (s *stockModel) norm(x *gorgonia.Node, weight string) *gorgonia.Node {
	return s.do(func() (*gorgonia.Node, error) {
		n, err := gorgonia.Square(x)
		if err != nil {
			return nil, err
		}
		if n, err = gorgonia.Mean(n, 1); err != nil {
			return nil, err
		}
		if n, err = gorgonia.Add(n, gorgonia.NewConstant(float32(s.config.Eps))); err != nil {
			return nil, err
		}
		if n, err = gorgonia.Sqrt(n); err != nil {
			return nil, err
		}
		if n, err = gorgonia.BroadcastHadamardDiv(x, n, nil, []byte{1}); err != nil {
			return nil, err
		}
		return gorgonia.BroadcastHadamardProd(n, s.byName[weight], nil, []byte{0})
	})
}

// constant returns an input that keeps its value.
func (s *stockModel) constant(name string, x []float32, shape ...int) *gorgonia.Node {
	n := gorgonia.NodeFromAny(s.g, tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x)),
		gorgonia.WithName(name))
	s.constants = append(s.constants, n)
	return n
}

// rotation returns the tables of cosines and sines of every feature, and the matrix that takes a
// head (a, b) to (−b, a).
func (s *stockModel) rotation() (cos, sin, swap *gorgonia.Node) {
	c := s.config
	rows, d, h := s.batch*c.Seq, c.Heads*c.HeadDim, c.HeadDim/2
	cs, sn := make([]float32, rows*d), make([]float32, rows*d)
	for r := range rows {
		for i := range d {
			angle := float64(r%c.Seq) * math.Pow(c.Base, -float64(i%c.HeadDim%h)/float64(h))
			cs[r*d+i], sn[r*d+i] = float32(math.Cos(angle)), float32(math.Sin(angle))
		}
	}

	sw := make([]float32, c.HeadDim*c.HeadDim)
	for i := range h {
		sw[(i+h)*c.HeadDim+i], sw[i*c.HeadDim+i+h] = -1, 1
	}

	return s.constant("cos", cs, rows, d), s.constant("sin", sn, rows, d),
		s.constant("swap", sw, c.HeadDim, c.HeadDim)
}

// rotate is RoPE: x ⊙ cos + swap(x) ⊙ sin.
func (s *stockModel) rotate(x, cos, sin, swap *gorgonia.Node) *gorgonia.Node {
	return s.do(func() (*gorgonia.Node, error) {
		rows, d := x.Shape()[0], x.Shape()[1]
		plain, err := gorgonia.HadamardProd(x, cos)
		if err != nil {
			return nil, err
		}
		heads, err := gorgonia.Reshape(x, tensor.Shape{rows * s.config.Heads, s.config.HeadDim})
		if err != nil {
			return nil, err
		}
		if heads, err = gorgonia.Mul(heads, swap); err != nil {
			return nil, err
		}
		if heads, err = gorgonia.Reshape(heads, tensor.Shape{rows, d}); err != nil {
			return nil, err
		}
		if heads, err = gorgonia.HadamardProd(heads, sin); err != nil {
			return nil, err
		}
		return gorgonia.Add(plain, heads)
	})
}

// heads reshapes [B·T, H·Dh] to [B·H, T, Dh].
func (s *stockModel) heads(x *gorgonia.Node) *gorgonia.Node {
	c := s.config
	return s.do(func() (*gorgonia.Node, error) {
		n, err := gorgonia.Reshape(x, tensor.Shape{s.batch, c.Seq, c.Heads, c.HeadDim})
		if err != nil {
			return nil, err
		}
		if n, err = gorgonia.Transpose(n, 0, 2, 1, 3); err != nil {
			return nil, err
		}
		return gorgonia.Reshape(n, tensor.Shape{s.batch * c.Heads, c.Seq, c.HeadDim})
	})
}

// mask returns 0 where a query may look at a key, and a large negative number elsewhere, as [B·H, T, T].
func (s *stockModel) mask() *gorgonia.Node {
	c := s.config
	n := s.batch * c.Heads
	x := make([]float32, n*c.Seq*c.Seq)
	for i := range x {
		if q, k := i/c.Seq%c.Seq, i%c.Seq; k > q {
			x[i] = -1e9
		}
	}
	return s.constant("mask", x, n, c.Seq, c.Seq)
}

// attend computes softmax(q·kᵀ/√Dh + mask)·v as [B·T, H·Dh].
func (s *stockModel) attend(q, k, v, mask *gorgonia.Node) *gorgonia.Node {
	c := s.config
	return s.do(func() (*gorgonia.Node, error) {
		p, err := gorgonia.BatchedMatMul(q, k, false, true)
		if err != nil {
			return nil, err
		}
		if p, err = gorgonia.Mul(p,
			gorgonia.NewConstant(float32(1/math.Sqrt(float64(c.HeadDim))))); err != nil {
			return nil, err
		}
		if p, err = gorgonia.Add(p, mask); err != nil {
			return nil, err
		}
		if p, err = gorgonia.Reshape(p,
			tensor.Shape{s.batch * c.Heads * c.Seq, c.Seq}); err != nil {
			return nil, err
		}
		if p, err = gorgonia.SoftMax(p); err != nil {
			return nil, err
		}
		if p, err = gorgonia.Reshape(p, tensor.Shape{s.batch * c.Heads, c.Seq, c.Seq}); err != nil {
			return nil, err
		}
		if p, err = gorgonia.BatchedMatMul(p, v); err != nil {
			return nil, err
		}
		if p, err = gorgonia.Reshape(p, tensor.Shape{s.batch, c.Heads, c.Seq,
			c.HeadDim}); err != nil {
			return nil, err
		}
		if p, err = gorgonia.Transpose(p, 0, 2, 1, 3); err != nil {
			return nil, err
		}
		return gorgonia.Reshape(p, tensor.Shape{s.batch * c.Seq, c.Heads * c.HeadDim})
	})
}

// let sets the inputs of the model to a batch.
func (s *stockModel) let(b data.Batch) error {
	if err := gorgonia.Let(s.ids, oneHot(b.Inputs, s.config.Vocab)); err != nil {
		return err
	}
	return gorgonia.Let(s.targets, oneHot(b.Targets, s.config.Vocab))
}

func oneHot(ids []int, v int) *tensor.Dense {
	x := make([]float32, len(ids)*v)
	for i, id := range ids {
		x[i*v+id] = 1
	}
	return tensor.New(tensor.WithShape(len(ids), v), tensor.WithBacking(x))
}
