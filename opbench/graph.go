package opbench

import (
	"errors"
	"fmt"
	"math/rand/v2"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/opcase"
)

// graph is an op with inputs, and with gradients if these are timed as well.
type graph struct {
	g      *gorgonia.ExprGraph
	params gorgonia.Nodes // inputs of floats
	y      *gorgonia.Node
}

// build returns a graph of the op or, if stock is true, of Gorgonia's own ops, with gradients if
// training is true. The random numbers are always the same.
func (b *bench) build(stock, training bool) (g *graph, err error) {
	defer func() {
		if cause := recover(); cause != nil { // Gorgonia panics on some shapes
			err = fmt.Errorf("building the graph: %v", cause)
		}
	}()

	r := rand.New(rand.NewPCG(1, 1))
	c, err := b.op.Bench.Case(r, b.shape)
	if err != nil {
		return nil, err
	}

	in, params := c.Nodes(b.floats())
	g = &graph{g: in[0].Graph(), params: params}
	if stock {
		g.y, err = b.stock(in)
	} else {
		g.y, err = c.Build(in)
	}

	if err != nil || !training {
		return g, err
	}

	if g.y.IsScalar() {
		_, err = gorgonia.Grad(g.y, params...)
		return g, err
	}

	upstream := opcase.Normal(r, g.y.Shape()...)
	up := gorgonia.NodeFromAny(g.g, opcase.Dense(b.floats(), upstream.Values, upstream.Shape...),
		gorgonia.WithName("gradient"))
	g.params = append(g.params, up)
	_, err = gorgonia.Backpropagate(gorgonia.Nodes{g.y}, gorgonia.Nodes{up}, params)
	return g, err
}

// stock adds Gorgonia's own ops for the op, if there is memory for them. Gorgonia's machine keeps all
// values until a run ends.
func (b *bench) stock(in gorgonia.Nodes) (*gorgonia.Node, error) {
	if b.op.Bench.Stock == nil {
		return nil, errors.New("no ops of Gorgonia for it")
	}
	if room := b.op.Bench.Room; room != nil {
		if err := fits(room(b.shape)); err != nil {
			return nil, err
		}
	}
	return b.op.Bench.Stock(in, b.shape)
}

// bytes returns the size of the inputs and the result in the type that is timed.
func (g *graph) bytes(d Dtype) float64 {
	n := opbase.Size(g.y.Shape())
	for _, p := range g.params {
		n += opbase.Size(p.Shape())
	}
	return float64(n * d.size())
}
