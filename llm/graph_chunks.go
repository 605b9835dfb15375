package llm

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm/site"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/op/graft"
	"github.com/kasmina-go/kasmina/state"
)

// attachedSeed is a chunk seed with a kind that is computed as a graph. A graph includes the seeds that
// are attached when it is built, each with the weights of its slot.
type attachedSeed struct {
	Layer, Seed int
	Kind        blueprints.Kind
	Slot        uint16
}

// attachedTo returns the attached seeds of a network.
func attachedTo(n *state.Network) (all []attachedSeed) {
	var pass state.Pass
	for layer, l := range n.Lattices() {
		if l.Site() != blueprints.Chunk {
			continue
		}
		l.Begin(&pass, false)
		for seed, stage := range pass.Stage {
			if (stage.Blends() || stage.Learns()) && pass.Slot[seed] != 0 &&
				blueprints.IsGraph(pass.Kind[seed]) {
				all = append(all, attachedSeed{layer, seed, pass.Kind[seed], pass.Slot[seed]})
			}
		}
	}

	return all
}

// kasmina applies a Kasmina layer to x. To each chunk y of its output that has an attached seed, it adds
// α(t(x) − x).
func (b *graphBuilder) kasmina(layer int, x, weights, scales *gorgonia.Node) (*gorgonia.Node, error) {
	l, opts := b.Kasmina.Lattice(layer), b.KasminaOptions.Options(b.trains())
	own := map[int]graft.Row{} // by seed
	first := len(b.out.seeds.planted)
	var seeds []int
	for i, a := range b.out.seeds.attached {
		if a.Layer == layer {
			seeds = append(seeds, a.Seed)
			own[a.Seed] = graft.Row{Of: b.out.seeds.controls, At: first + i}
		}
	}

	if len(seeds) > 0 {
		opts = append(opts, op.WithGraphs(seeds...))
	}

	y, err := op.Kasmina(x, weights, scales, l, opts...)
	if err != nil || len(seeds) == 0 {
		return y, err
	}

	c := l.Hidden() / l.Seeds()
	var parts gorgonia.Nodes
	end := 0
	for _, a := range b.out.seeds.attached {
		if a.Layer != layer {
			continue
		}
		if parts, err = b.pass(parts, y, end, a.Seed*c); err != nil {
			return nil, err
		}
		end = (a.Seed + 1) * c
		t, err := b.chunk(a, x, y, weights, own[a.Seed], end-c, end)
		if err != nil {
			return nil, fmt.Errorf("seed %d: %w", a.Seed, err)
		}
		parts = append(parts, t)
	}

	if parts, err = b.pass(parts, y, end, l.Hidden()); err != nil {
		return nil, err
	}

	if len(parts) == 1 {
		return parts[0], nil
	}

	return gorgonia.Concat(1, parts...)
}

// pass appends the columns from ≤ i < to of y, if there are any.
func (b *graphBuilder) pass(parts gorgonia.Nodes, y *gorgonia.Node, from, to int) (gorgonia.Nodes, error) {
	if from == to {
		return parts, nil
	}
	n, err := columns(y, from, to)
	return append(parts, n), err
}

// chunk returns the output of the seed's chunk.
func (b *graphBuilder) chunk(a attachedSeed, x, y, weights *gorgonia.Node, r graft.Row,
	from, to int) (*gorgonia.Node, error) {
	params, err := slotParams(a, weights, r, to-from)
	if err != nil {
		return nil, err
	}

	in, err := columns(x, from, to)
	if err != nil {
		return nil, err
	}

	if in, err = graft.Isolate(in, r, graft.Inward); err != nil {
		return nil, err
	}

	t, err := site.Apply(a.Kind, in, params, to-from)
	if err != nil {
		return nil, err
	}

	difference, err := gorgonia.Sub(t, in)
	if err != nil {
		return nil, err
	}

	out, err := columns(y, from, to)
	if err != nil {
		return nil, err
	}

	return graft.Blend(out, difference, r)
}

// slotParams returns the weights of a slot as the arrays of its kind. Their gradients are zero unless the
// seed learns.
func slotParams(a attachedSeed, weights *gorgonia.Node, r graft.Row, c int) (gorgonia.Nodes, error) {
	width := weights.Shape()[1]
	n, err := blueprints.Size(a.Kind, c, width)
	if err != nil {
		return nil, err
	}

	arrays, err := blueprints.Parts(a.Kind, c, n)
	if err != nil {
		return nil, err
	}

	// Take the row from a vector: slicing one element out of a matrix would give a scalar.
	flat, err := gorgonia.Reshape(weights, []int{weights.Shape().TotalSize()})
	if err != nil {
		return nil, err
	}

	var params gorgonia.Nodes
	at := int(a.Slot) * width
	for _, p := range arrays {
		size := 1
		for _, d := range p.Shape {
			size *= d
		}
		v, err := gorgonia.Slice(flat, gorgonia.S(at, at+size))
		if err == nil && size == 1 {
			// A slice of one element is a scalar. Gorgonia cannot add tensor gradients to a scalar, as
			// seeds that share a slot require.
			v, err = gorgonia.Reshape(v, []int{1})
		}
		if err == nil && !slices.Equal(v.Shape(), p.Shape) { // Shape.Eq considers [5] and [1, 5] equal
			v, err = gorgonia.Reshape(v, p.Shape)
		}
		if err != nil {
			return nil, fmt.Errorf("%s of shape %v: %w", p.Name, p.Shape, err)
		}
		params, at = append(params, v), at+size
	}

	return site.Own(params, r)
}

// columns returns the columns from ≤ i < to of a matrix.
func columns(x *gorgonia.Node, from, to int) (*gorgonia.Node, error) {
	if from == 0 && to == x.Shape()[1] {
		return x, nil
	}
	y, err := gorgonia.Slice(x, nil, gorgonia.S(from, to))
	if err != nil {
		return nil, err
	}
	return gorgonia.Reshape(y, []int{x.Shape()[0], to - from}) // a single column would otherwise be a vector
}
