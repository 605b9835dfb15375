package block

import (
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/op/lowrank"
)

// Tuning describes which parameters of a block learn. In its zero value, all parameters learn and
// there are no adapters.
type Tuning struct {
	Frozen   map[string]bool // weights of linear layers without gradients, by name
	Adapters []Adapter

	// Selected holds, by layer, the adapters among which Selection chooses for each row.
	Selected  map[string][]*lowrank.Adapter
	Selection *lowrank.Selection

	// Stacked holds, by layer, the stacked adapters of a graph for a device. The input Rows, an int [rows],
	// selects an adapter for each row by its index; the number of adapters means none.
	Stacked map[string]Stacked
	Rows    *gorgonia.Node
}

// Stacked holds the matrices of n adapters of one layer, stacked on top of one another. For each row, the shares of
// all adapters other than the row's own are 0, so only its own adapter contributes:
//
//	y[r] = f[k] ⊙ (x[r]·wᵀ + (s[k] ⊙ (x[r]·aᵀ))·bᵀ), with the adapter k of row r
//
// a is [rank, in] and b [out, rank], with the sum of all ranks. s is [n+1, rank] and f [n+1, out]. The last row of s
// and f is for rows without an adapter. Without DoRA, f is nil.
type Stacked struct{ A, B, Shares, Factors *gorgonia.Node }

// An Adapter adds the product of two narrow matrices to the weight of a linear layer:
//
//	y = x·wᵀ + Scale·(x·aᵀ)·bᵀ
//
// With Magnitude, as in DoRA, the output is m ⊙ y/‖w + Scale·b·a‖, with the norm of each row.
type Adapter struct {
	Layer     string // such as "self_attn.q_proj"
	Scale     float64
	Magnitude bool
	Dropout   float64 // dropout probability of the inputs of a
	Salt      uint64  // distinguishes the masks of layers
}

// Endings of the names of an adapter's parameters, after the name of its layer.
const (
	EndingA         = ".lora_A.weight"
	EndingB         = ".lora_B.weight"
	EndingMagnitude = ".lora_magnitude_vector"

	// An adapter of the embedding has these matrices instead of a and b: [vocabulary, rank] and
	// [features, rank].
	EndingEmbeddingA = ".lora_embedding_A"
	EndingEmbeddingB = ".lora_embedding_B"
)

// Params returns the names of the adapter's parameters.
func (a Adapter) Params() []string {
	names := []string{a.Layer + EndingA, a.Layer + EndingB}
	if a.Magnitude {
		names = append(names, a.Layer+EndingMagnitude)
	}
	return names
}

// Params returns the names of the parameters of all adapters.
func (t Tuning) Params() (names []string) {
	for _, a := range t.Adapters {
		names = append(names, a.Params()...)
	}
	return names
}

// Drops reports whether an adapter has dropout.
func (t Tuning) Drops() bool {
	for _, a := range t.Adapters {
		if a.Dropout > 0 {
			return true
		}
	}
	return false
}

// adapter returns the adapter of a layer.
func (t Tuning) adapter(layer string) (Adapter, bool) {
	for _, a := range t.Adapters {
		if a.Layer == layer {
			return a, true
		}
	}
	return Adapter{}, false
}

// plain reports whether a layer is free of adapters and its weight learns.
func (t Tuning) plain(layer string) bool {
	_, adapted := t.adapter(layer)
	return !adapted && !t.Frozen[layer+".weight"] && t.Selected[layer] == nil && t.Stacked[layer].A == nil
}

// product adds the product of x and the weight of a linear layer, with its adapter if it has one.
func (p *parts) product(x *gorgonia.Node, layer string) *gorgonia.Node {
	if all := p.Selected[layer]; all != nil {
		y := p.weigh(x, layer)
		return p.do(func() (*gorgonia.Node, error) { return lowrank.Add(x, y, all, p.Selection) })
	}

	if s := p.Stacked[layer]; s.A != nil {
		return p.stacked(x, layer, s)
	}

	a, ok := p.adapter(layer)
	switch {
	case !ok:
		return p.weigh(x, layer)
	case a.Dropout == 0 && p.Frozen[layer+".weight"]:
		y := p.do(func() (*gorgonia.Node, error) {
			return op.AdaptedLinear(x, p.params[layer+".weight"], p.params[layer+EndingA],
				p.params[layer+EndingB], a.Scale)
		})
		if a.Magnitude {
			y = p.scaleColumns(y, p.magnitude(a))
		}
		return y
	}

	y, dropped := p.weigh(x, layer), x
	if a.Dropout > 0 {
		dropped = p.do(func() (*gorgonia.Node, error) {
			return op.Dropout(x, p.key, a.Dropout, a.Salt)
		})
	}

	h := p.do(func() (*gorgonia.Node, error) { return op.Linear(dropped, p.params[layer+EndingA]) })
	if a.Scale != 1 {
		h = p.do(func() (*gorgonia.Node, error) { return gorgonia.Mul(h, number(h, a.Scale)) })
	}

	z := p.do(func() (*gorgonia.Node, error) { return op.Linear(h, p.params[layer+EndingB]) })
	switch {
	case !a.Magnitude:
		return p.add(y, z)
	case a.Dropout == 0:
		return p.scaleColumns(p.add(y, z), p.magnitude(a))
	}

	// For an input with dropout, DoRA scales both products and adds the remainder of the input
	// without dropout: y − x'·wᵀ + f ⊙ (x'·wᵀ + z).
	base := p.weigh(dropped, layer)
	scaled := p.scaleColumns(p.add(base, z), p.magnitude(a))
	y = p.do(func() (*gorgonia.Node, error) { return gorgonia.Sub(y, base) })
	return p.add(y, scaled)
}

// stacked adds the product of x and the weight of a linear layer, with the adapter of each row.
func (p *parts) stacked(x *gorgonia.Node, layer string, s Stacked) *gorgonia.Node {
	chosen := func(x, table *gorgonia.Node) *gorgonia.Node { // multiplies each row by its adapter's row of a table
		f := p.do(func() (*gorgonia.Node, error) { return op.Embedding(p.Rows, table) })
		return p.do(func() (*gorgonia.Node, error) { return gorgonia.HadamardProd(x, f) })
	}

	y := p.weigh(x, layer)
	h := p.do(func() (*gorgonia.Node, error) { return op.Linear(x, s.A) })
	h = chosen(h, s.Shares)
	y = p.add(y, p.do(func() (*gorgonia.Node, error) { return op.Linear(h, s.B) }))
	if s.Factors == nil {
		return y
	}
	return chosen(y, s.Factors)
}

// Head adds the product of x and the frozen weight of the output layer, with an adapter. The keys of
// params are the endings of the adapter's parameters. The key is the input of dropout.
func (b *Builder) Head(x, weight, key *gorgonia.Node, a Adapter, params map[string]*gorgonia.Node) (*gorgonia.Node,
	error) {
	p := &parts{Builder: b, Tuning: Tuning{Adapters: []Adapter{a}, Frozen: map[string]bool{a.Layer + ".weight": true}},
		key: key, params: map[string]*gorgonia.Node{a.Layer + ".weight": weight}}
	for ending, n := range params {
		p.params[a.Layer+ending] = n
	}
	y := p.product(x, a.Layer)
	return y, p.err
}

// weigh adds x·wᵀ.
func (p *parts) weigh(x *gorgonia.Node, layer string) *gorgonia.Node {
	linear := op.Linear
	if p.Frozen[layer+".weight"] {
		linear = op.FrozenLinear
	}
	return p.do(func() (*gorgonia.Node, error) { return linear(x, p.params[layer+".weight"]) })
}

// magnitude adds m/‖w + Scale·b·a‖ for each row.
func (p *parts) magnitude(a Adapter) *gorgonia.Node {
	norms := p.do(func() (*gorgonia.Node, error) {
		return op.RowNorms(p.params[a.Layer+".weight"], p.params[a.Layer+EndingA],
			p.params[a.Layer+EndingB], a.Scale)
	})
	return p.do(func() (*gorgonia.Node, error) {
		return gorgonia.HadamardDiv(p.params[a.Layer+EndingMagnitude], norms)
	})
}

func (p *parts) scaleColumns(x, f *gorgonia.Node) *gorgonia.Node {
	return p.do(func() (*gorgonia.Node, error) { return op.ScaleColumns(x, f) })
}

// number returns a constant of the type of a node.
func number(like *gorgonia.Node, x float64) *gorgonia.Node {
	if like.Dtype() == tensor.Float64 {
		return gorgonia.NewConstant(x)
	}
	return gorgonia.NewConstant(float32(x))
}
