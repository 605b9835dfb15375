package llm

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm/site"
	"github.com/kasmina-go/kasmina/op/graft"
	"github.com/kasmina-go/kasmina/state"
)

// graphSeeds are those of a graph that have something planted at a weight or in the stream, and those of
// chunks whose blueprints are graphs. What is not planted is not in the graph.
type graphSeeds struct {
	controls *gorgonia.Node // [len(rows), graft.Controls]; nil where there are none
	rows     []graphRow     // of what is planted, and then of what is attached
	planted  []Planted
	attached []attachedSeed
	pass     state.Pass
	drawn    bool // α is, around its schedule: the graph is for training

	streams gorgonia.Nodes   // what blocks take in, and the last norm
	health  gorgonia.Nodes   // of what each takes in; nil but in training
	norms   []gorgonia.Nodes // of the gradients of its parameters
	sizes   []int            // elements of these
}

// SeedFigures are what a step has measured of a blueprint at a weight or in the stream. Gradient is -1,
// and so is the variance of Health, where it is not finite.
type SeedFigures struct {
	Planted
	Health   [graft.Figures]float64 // of the stream that its block takes in
	Gradient float64                // norm of the gradients of its own parameters
	Params   int                    // how many these are
}

// measure adds what is measured of what is planted, once there are gradients.
func (b *graphBuilder) measure() error {
	s := &b.out.seeds
	at := map[*gorgonia.Node]*gorgonia.Node{}
	for _, p := range s.planted {
		x := s.streams[b.Config.BlockOf(p)]
		if at[x] == nil {
			var err error
			if at[x], err = graft.Health(x); err != nil {
				return err
			}
		}
		s.health = append(s.health, at[x])
		_, params, err := b.grown(p)
		if err != nil {
			return err
		}
		var norms gorgonia.Nodes
		size := 0
		for _, q := range params {
			size += q.Shape().TotalSize()
			n, err := graft.Norm(q.Deriv())
			if err != nil {
				return err
			}
			norms = append(norms, n)
		}
		s.norms, s.sizes = append(s.norms, norms), append(s.sizes, size)
	}

	return nil
}

// Outputs are what is read of a graph that has run. They are the loss, and what is measured of
// blueprints; or logits, and for a decoding keys and values. Of no graph it is nothing.
func (g *Graph) Outputs() gorgonia.Nodes {
	switch {
	case g == nil:
		return nil
	case g.Kind == ForLogits:
		all := gorgonia.Nodes{g.Logits}
		if g.keeps {
			all = slices.Concat(all, g.blocks.Keys, g.blocks.Values)
		}
		return all
	}

	all := gorgonia.Nodes{g.Loss}
	for i, h := range g.seeds.health {
		if !slices.Contains(all, h) {
			all = append(all, h)
		}
		all = append(all, g.seeds.norms[i]...)
	}

	return all
}

// Figures returns what the last run has measured, by what returns the values of nodes.
func (g *Graph) Figures(value func(*gorgonia.Node) (gorgonia.Value, error)) (all []SeedFigures,
	err error) {
	if g == nil || value == nil {
		return nil, errors.New("llm: Figures: the graph, or what returns the values, is nil")
	}

	read := func(n *gorgonia.Node) []float64 {
		v, e := value(n)
		if e != nil {
			err = errors.Join(err, e)
			return make([]float64, graft.Figures)
		}
		switch x := v.Data().(type) {
		case []float64:
			return x
		case []float32:
			wide := make([]float64, len(x))
			for i, f := range x {
				wide[i] = float64(f)
			}
			return wide
		}
		err = errors.Join(err, fmt.Errorf("a figure is a %T", v.Data()))
		return make([]float64, graft.Figures)
	}

	for i, h := range g.seeds.health {
		f := SeedFigures{Planted: g.seeds.planted[i]}
		copy(f.Health[:], read(h))
		f.Params = g.seeds.sizes[i]
		if slices.ContainsFunc(f.Health[:], func(v float64) bool { return v-v != 0 }) {
			f.Health = [graft.Figures]float64{graft.Variance: -1}
		}
		for _, n := range g.seeds.norms[i] {
			f.Gradient = math.Hypot(f.Gradient, read(n)[0])
		}
		if f.Gradient-f.Gradient != 0 {
			f.Gradient = -1
		}
		all = append(all, f)
	}

	return all, err
}

// graphRow is the seed that a row of the controls is for.
type graphRow struct {
	*state.Lattice
	seed int
}

// plant adds the controls of what is planted and of what is attached.
func (b *graphBuilder) plant() error {
	s := &b.out.seeds
	for _, p := range b.Config.Planted {
		l := b.latticeAt(p.Site)
		if l == nil || p.Seed >= l.Seeds() {
			return fmt.Errorf("there is no lattice of site %v with a seed %d", p.Site, p.Seed)
		}
		s.planted, s.rows = append(s.planted, p), append(s.rows, graphRow{l, p.Seed})
	}

	if b.Kasmina != nil {
		s.attached = attachedTo(b.Kasmina)
	}

	for _, a := range s.attached {
		s.rows = append(s.rows, graphRow{b.Kasmina.Lattice(a.Layer), a.Seed})
	}

	if len(s.rows) == 0 {
		return nil
	}

	s.drawn = b.kind == ForTraining
	s.controls = gorgonia.NewMatrix(b.g, b.dtype(),
		gorgonia.WithShape(len(s.rows), graft.Controls), gorgonia.WithName("controls"))
	for i, p := range s.planted {
		if p.Site != blueprints.Weight {
			continue
		}
		name := b.Config.WeightName(b.Config.Weights[p.Seed])
		kind, params, err := b.grown(p)
		if err != nil {
			return err
		}
		b.nodes[name], err = site.Weight(kind, b.nodes[name], params, p.Size,
			b.Config.LoRAScale(p.Size), graft.Row{Of: s.controls, At: i})
		if err != nil {
			return fmt.Errorf("seed %d on %s: %w", p.Seed, name, err)
		}
	}

	return nil
}

// latticeAt returns the lattice of a site that is not a chunk's, nil if there is none.
func (b *graphBuilder) latticeAt(site blueprints.Site) *state.Lattice {
	for _, l := range b.Kasmina.Lattices() {
		if l.Site() == site {
			return l
		}
	}
	return nil
}

// grown returns the kind and the parameters of what is planted.
func (b *graphBuilder) grown(p Planted) (blueprints.Kind, gorgonia.Nodes, error) {
	specs, err := b.Config.SeedParams(p)
	if err != nil {
		return 0, nil, err
	}
	var params gorgonia.Nodes
	for _, s := range specs {
		params = append(params, b.nodes[s.Name])
	}
	kind, _ := blueprints.ByName(p.Kind)
	return kind, params, nil
}

// streams adds what the seeds behind block i have grown.
func (b *graphBuilder) streams(i int, x *gorgonia.Node) (*gorgonia.Node, error) {
	for at, p := range b.out.seeds.planted {
		if p.Site != blueprints.Stream || b.Config.Streams[p.Seed] != i {
			continue
		}
		var err error
		if x, err = b.stream(i, x, p, graft.Row{Of: b.out.seeds.controls, At: at}); err != nil {
			return nil, fmt.Errorf("seed %d of the stream behind block %d: %w", p.Seed, i, err)
		}
	}
	return x, nil
}

// stream is x + α·f(norm(x)).
func (b *graphBuilder) stream(i int, x *gorgonia.Node, p Planted,
	r graft.Row) (*gorgonia.Node, error) {
	kind, params, err := b.grown(p)
	if err != nil {
		return nil, err
	}

	if params, err = site.Own(params, r); err != nil {
		return nil, err
	}

	in, err := graft.Isolate(x, r, graft.Inward)
	if err != nil {
		return nil, err
	}

	var t *gorgonia.Node
	switch kind {
	case blueprints.Attention, blueprints.Perceptron:
		t, err = b.half(i, kind, in, params, p.Size)
	default:
		norm, own := params[:1], params[1:]
		if b.Config.LayerNorm {
			norm, own = params[:2], params[2:]
		}
		if in, err = b.blocks.Norm(in, norm[0], norm[len(norm)-1]); err == nil {
			t, err = site.Apply(kind, in, own, p.Size)
		}
	}
	if err != nil {
		return nil, err
	}

	return graft.Blend(x, t, r)
}

// half is what attention or a perceptron of some size would add to x as a part of a block.
func (b *graphBuilder) half(i int, kind blueprints.Kind, x *gorgonia.Node, params gorgonia.Nodes,
	size int) (*gorgonia.Node, error) {
	shape, attention, err := b.Config.StreamShape(kind, size)
	if err != nil {
		return nil, err
	}

	in := append(gorgonia.Nodes{x}, params...)
	if b.out.Starts != nil {
		in = append(in, b.out.Starts)
	}

	whole := b.blocks.Shape
	defer func() { b.blocks.Shape = whole }()
	b.blocks.Shape = shape
	return b.blocks.BuildHalf(in, attention, b.Config.Attention(i))
}

// steer sets the controls to what the lattices say now.
func (s *graphSeeds) steer() error {
	if s.controls == nil {
		return nil
	}

	n := len(s.rows)
	values := make([]float64, n*graft.Controls)
	var read *state.Lattice
	for i, r := range s.rows {
		if read != r.Lattice { // they come in order of lattices
			read = r.Lattice
			read.Begin(&s.pass, false)
			if s.drawn {
				read.Draw(&s.pass)
			}
		}
		c := values[i*graft.Controls:][:graft.Controls]
		if r.seed >= len(s.pass.Stage) {
			continue
		}
		stage, weight := s.pass.Stage[r.seed], float64(s.pass.Alpha[r.seed])
		c[graft.Backward] = weight
		if stage.Blends() {
			c[graft.Forward], c[graft.Inward] = weight, 1
		}
		if stage.Learns() {
			c[graft.Learning] = 1
		}
	}

	shape := tensor.WithShape(n, graft.Controls)
	if s.controls.Dtype() == tensor.Float64 {
		return gorgonia.Let(s.controls, tensor.New(shape, tensor.WithBacking(values)))
	}

	narrow := make([]float32, len(values))
	for i, v := range values {
		narrow[i] = float32(v)
	}

	return gorgonia.Let(s.controls, tensor.New(shape, tensor.WithBacking(narrow)))
}
