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

// graphSeeds holds the seeds of a graph that have something planted at a weight or in the stream, and the
// chunk seeds with blueprints that are computed as graphs. Seeds without a blueprint are not part of the
// graph.
type graphSeeds struct {
	controls *gorgonia.Node // [len(rows), graft.Controls]; nil without rows
	rows     []graphRow     // planted seeds first, then attached ones
	planted  []Planted
	attached []attachedSeed
	pass     state.Pass
	drawn    bool // whether to draw α with noise, as in training

	streams gorgonia.Nodes   // inputs of the blocks and of the last norm
	health  gorgonia.Nodes   // health of each planted seed's input; nil except in training
	norms   []gorgonia.Nodes // gradient norms of each planted seed's parameters
	sizes   []int            // number of elements in each planted seed's parameters
}

// SeedFigures holds the measurements of a blueprint at a weight or in the stream, taken during a
// step. If they are not finite, the Gradient and the variance in Health are reported as -1.
type SeedFigures struct {
	Planted
	Health   [graft.Figures]float64 // of the stream that enters its block
	Gradient float64                // norm of its parameters' gradients
	Params   int                    // number of elements in its parameters
}

// measure adds telemetry nodes for the planted seeds. It needs the gradients.
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

// Outputs returns the nodes to read after a run: the loss and the telemetry of blueprints, or the logits
// and, for cached decoding, keys and values. It returns nil for a nil graph.
func (g *Graph) Outputs() gorgonia.Nodes {
	switch {
	case g == nil:
		return nil
	case g.Kind == ForLogits:
		if g.States != nil {
			return gorgonia.Nodes{g.States}
		}
		all := gorgonia.Nodes{g.Logits}
		if g.keeps {
			all = slices.Concat(all, g.blocks.Keys, g.blocks.Values)
		}
		return all
	}

	if g.LogProbs != nil {
		return gorgonia.Nodes{g.LogProbs}
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

// Figures returns the measurements of the last run. The function value returns the value of a node.
func (g *Graph) Figures(value func(*gorgonia.Node) (gorgonia.Value, error)) (all []SeedFigures,
	err error) {
	if g == nil || value == nil {
		return nil, errors.New("llm: Figures: the graph or the function for values is nil")
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
		err = errors.Join(err, fmt.Errorf("a measurement has type %T", v.Data()))
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

// graphRow identifies the seed that a row of the controls steers.
type graphRow struct {
	*state.Lattice
	seed int
}

// plant adds the controls of planted and attached seeds, and replaces weights on which a seed is
// planted.
func (b *graphBuilder) plant() error {
	s := &b.out.seeds
	for _, p := range b.Planted {
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

// latticeAt returns the lattice of a site other than chunks, or nil if the model has none.
func (b *graphBuilder) latticeAt(site blueprints.Site) *state.Lattice {
	for _, l := range b.Kasmina.Lattices() {
		if l.Site() == site {
			return l
		}
	}
	return nil
}

// grown returns the kind and the parameters of a planted blueprint.
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

// streams adds the blueprints that are planted in the residual stream after block i.
func (b *graphBuilder) streams(i int, x *gorgonia.Node) (*gorgonia.Node, error) {
	for at, p := range b.out.seeds.planted {
		if p.Site != blueprints.Stream || b.Config.Streams[p.Seed] != i {
			continue
		}
		var err error
		if x, err = b.stream(i, x, p, graft.Row{Of: b.out.seeds.controls, At: at}); err != nil {
			return nil, fmt.Errorf("seed %d of the stream after block %d: %w", p.Seed, i, err)
		}
	}
	return x, nil
}

// stream returns x + α·f(norm(x)).
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

// half returns the output of an attention or an MLP of the given size, built like the same half of
// block i.
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

// steer sets the controls from the current state of the lattices.
func (s *graphSeeds) steer() error {
	if s.controls == nil {
		return nil
	}

	n := len(s.rows)
	values := make([]float64, n*graft.Controls)
	var read *state.Lattice
	for i, r := range s.rows {
		if read != r.Lattice { // rows are ordered by lattice
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
