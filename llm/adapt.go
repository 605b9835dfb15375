package llm

import (
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	"github.com/kasmina-go/kasmina/internal/parallel"
	"github.com/kasmina-go/kasmina/llm/internal/block"
)

// Adapt returns a model with low-rank adapters that initially computes the same function as m. Both
// models share the memory of m's parameters, so several sets of adapters can be attached to one model at
// once. By default, training changes only the adapters. Parameters that [TrainConfig.Tuned] names change
// in both models.
//
// The initial values of the adapters depend only on the seed and the names of the targets. It is an
// error if m has adapters already.
func Adapt(m *Model, a LoRA, seed uint64) (*Model, error) {
	return adapt(m, a, func(p ParamSpec) func() float64 {
		h := fnv.New64a()
		h.Write([]byte(p.Name))
		r := rand.New(rand.NewPCG(seed, h.Sum64()))
		bound := math.Sqrt(3) * p.Deviation // of a uniform distribution
		return func() float64 { return bound * (2*r.Float64() - 1) }
	})
}

// An Adapter holds low-rank adapters, chunk seeds, or both, separately from the model that they change. [Model.Attach]
// adds low-rank adapters to a model. A [Batcher] can use a different adapter for each text.
type Adapter struct {
	LoRA   LoRA        // zero if there are only seeds
	Params []Param     // of LoRA, with the names that they have in a model with the adapters
	Seeds  []SeedLayer // in the order of their blocks
}

// NewAdapter returns an adapter with zeros for models of a configuration.
func NewAdapter(c Config, a LoRA, dt tensor.Dtype) (*Adapter, error) {
	if a.IsZero() {
		return nil, errors.New("llm: NewAdapter: the LoRA is its zero value, want a Rank, an Alpha and Targets")
	}

	c.Adapter = a
	if err := c.Check(); err != nil {
		return nil, err
	}

	next := &Adapter{LoRA: a}
	for _, p := range c.adapterSpecs() {
		next.Params = append(next.Params, Param{p.Name, newParamValue(dt, p.Shape, nil)})
	}
	return next, nil
}

// Param returns the values of a parameter, or nil if the adapter lacks it.
func (a *Adapter) Param(name string) *tensor.Dense {
	for _, p := range a.Params {
		if p.Name == name {
			return p.Value
		}
	}
	return nil
}

// ChangesOuterLayers reports whether the adapter changes the embedding or the output layer. A [Batcher] cannot
// choose such an adapter for each text.
func (a *Adapter) ChangesOuterLayers() bool {
	return slices.Contains(a.LoRA.Targets, EmbeddingLayer) || slices.Contains(a.LoRA.Targets, OutputLayer)
}

// Attach returns a model with an adapter. It shares the memory of m's parameters and of the adapter.
func (m *Model) Attach(a *Adapter) (*Model, error) {
	done, err := m.Current()
	if err != nil {
		return nil, fmt.Errorf("llm: Attach: %w", err)
	}
	defer done()

	if err := a.fits(m.Config, m.Dtype()); err != nil {
		return nil, fmt.Errorf("llm: Attach: %w", err)
	}
	if len(a.Seeds) > 0 {
		return nil, errors.New("llm: Attach: the adapter has chunk seeds, which only texts of a Batcher can choose")
	}
	next, err := m.adapted(a.LoRA, func(ParamSpec) func() float64 { return nil })
	if err != nil {
		return nil, err
	}

	for i, p := range next.Params {
		if IsAdapterParam(p.Name) {
			next.Params[i].Value = a.Param(p.Name)
		}
	}
	return next, nil
}

// fits returns an error unless the adapter fits models of a configuration and type.
func (a *Adapter) fits(c Config, dt tensor.Dtype) error {
	switch {
	case a == nil:
		return errors.New("it is nil")
	case a.LoRA.IsZero() && len(a.Seeds) == 0:
		return errors.New("the adapter has neither low-rank adapters nor seeds")
	}
	if err := a.seedsFit(c, dt); err != nil || a.LoRA.IsZero() {
		return err
	}

	c.Adapter = a.LoRA
	if err := c.Check(); err != nil {
		return err
	}
	for _, p := range c.adapterSpecs() {
		v := a.Param(p.Name)
		if v == nil || !slices.Equal(v.Shape(), p.Shape) || v.Dtype() != dt {
			return fmt.Errorf("the adapter does not fit the model: its %s is not a %v of shape %v", p.Name, dt,
				p.Shape)
		}
	}
	return nil
}

// adapt returns a model with adapters. The function start returns the initial values of their matrices a.
func adapt(m *Model, a LoRA, start func(ParamSpec) func() float64) (*Model, error) {
	done, err := m.Current()
	if err != nil {
		return nil, fmt.Errorf("llm: Adapt: %w", err)
	}
	defer done()
	return m.adapted(a, start)
}

// adapted implements adapt for a model that is locked.
func (m *Model) adapted(a LoRA, start func(ParamSpec) func() float64) (next *Model, err error) {
	if !m.Config.Adapter.IsZero() {
		return nil, errors.New("llm: Adapt: the model has adapters already: adapt the original model, or " +
			"merge them with Model.Plain")
	}

	c := m.Config
	c.Adapter = a
	if a.IsZero() {
		return nil, errors.New("llm: Adapt: the LoRA is its zero value, want a Rank, an Alpha and Targets")
	}
	if err := c.Check(); err != nil {
		return nil, err
	}

	next = &Model{Config: c, KasminaOptions: m.KasminaOptions, Base: m.Base, byName: map[string]int{}}
	for p := range c.Specs() {
		v := m.Param(p.Name)
		switch {
		case v != nil || m.Base.Has(p.Name):
		case p.Deviation > 0:
			v = newParamValue(m.Dtype(), p.Shape, start(p))
		default:
			v = newParamValue(m.Dtype(), p.Shape, nil)
		}
		next.byName[p.Name] = len(next.Params)
		next.Params = append(next.Params, Param{p.Name, v})
	}

	if next.Kasmina, err = next.newNetwork(); err != nil {
		return nil, err
	}

	// Since b is 0, the norms are the norms of the weights.
	if a.Magnitude {
		for _, target := range a.Targets {
			next.rowNorms(target, next.Param(target+block.EndingMagnitude))
		}
	}

	return next, nil
}

// rowNorms writes ‖w + s·b·a‖ of each row of a target to norms.
func (m *Model) rowNorms(target string, norms *tensor.Dense) {
	writeRowNorms(norms, m.weight(m.Config.layerParam(target)), m.Param(target+block.EndingA), m.Param(target+block.EndingB),
		m.Config.Adapter.ScaleOf(target))
}

// writeRowNorms writes ‖w + scale·b·a‖ of each row to norms.
func writeRowNorms(norms, w, a, b *tensor.Dense, scale float64) {
	switch to := norms.Data().(type) {
	case []float32:
		rowNorms(to, w.Float32s(), a.Float32s(), b.Float32s(), scale)
	case []float64:
		rowNorms(to, w.Float64s(), a.Float64s(), b.Float64s(), scale)
	}
}

func rowNorms[T float32 | float64](norms, w, a, b []T, scale float64) {
	out := len(norms)
	in, r := len(w)/out, len(b)/out
	p, gram, q := make([]T, out*r), make([]T, r*r), make([]T, out*r)
	gemm.Linear(p, w, a, out, in, r)
	gemm.Linear(gram, a, a, r, in, r)
	gemm.Linear(q, b, gram, out, r, r)
	layer.RowNorms(norms, w, b, p, q, r, scale)
}

// merged copies the weights, merges the adapters into the copies, and returns the result as a model. Matrices
// in Base become float32. The model must be locked.
func (m *Model) merged() (*Model, error) {
	c := m.Config
	c.Adapter = LoRA{}

	// An adapter of the embedding does not change the output layer, and vice versa.
	c.Untied = c.Untied || m.Config.adapts(EmbeddingLayer) || m.Config.adapts(OutputLayer)
	next := &Model{Config: c, byName: map[string]int{}}
	for p := range c.Specs() {
		v := m.weight(p.Name)
		if v == nil { // the layers were tied
			v = m.weight(m.Config.headParam())
		}
		next.byName[p.Name] = len(next.Params)
		next.Params = append(next.Params, Param{p.Name, v})
	}

	targets := m.Config.Adapter.Targets
	parallel.Each(len(targets), func(i int) {
		p := &next.Params[next.byName[c.layerParam(targets[i])]]
		p.Value = m.mergedWeight(targets[i])
	})

	var err error
	next.Kasmina, err = next.newNetwork()
	return next, err
}

// mergedWeight returns w + s·b·a, or with magnitudes m/‖w + s·b·a‖ ⊙ (w + s·b·a) for each row.
func (m *Model) mergedWeight(target string) *tensor.Dense {
	sum := cloneTensor(m.weight(m.Config.layerParam(target)))
	if target == EmbeddingLayer { // w + s·a·bᵀ
		a, b := m.Param(target+block.EndingEmbeddingA), m.Param(target+block.EndingEmbeddingB)
		scale, r, in := m.Config.Adapter.ScaleOf(target), a.Shape()[1], sum.Shape()[1]
		switch w := sum.Data().(type) {
		case []float32:
			gemm.Mul(false, true, len(w)/in, in, r, float32(scale), a.Float32s(), r, b.Float32s(), r, 1, w, in)
		case []float64:
			gemm.Mul(false, true, len(w)/in, in, r, scale, a.Float64s(), r, b.Float64s(), r, 1, w, in)
		}
		return sum
	}

	a, b := m.Param(target+block.EndingA), m.Param(target+block.EndingB)
	scale := m.Config.Adapter.ScaleOf(target)
	magnitude := m.Param(target + block.EndingMagnitude)

	var norms *tensor.Dense
	if magnitude != nil {
		norms = newParamValue(m.Dtype(), magnitude.Shape(), nil)
		m.rowNorms(target, norms)
	}

	switch w := sum.Data().(type) {
	case []float32:
		addProduct(w, a.Float32s(), b.Float32s(), float32(scale), sum.Shape()[1])
		if magnitude != nil {
			scaleRows(w, magnitude.Float32s(), norms.Float32s())
		}
	case []float64:
		addProduct(w, a.Float64s(), b.Float64s(), scale, sum.Shape()[1])
		if magnitude != nil {
			scaleRows(w, magnitude.Float64s(), norms.Float64s())
		}
	}

	return sum
}

// addProduct adds s·b·a to a weight with the given number of columns.
func addProduct[T float32 | float64](w, a, b []T, s T, in int) {
	r, out := len(a)/in, len(w)/in
	gemm.Mul(false, false, out, in, r, s, b, r, a, in, 1, w, in)
}

// scaleRows multiplies each row of a weight by its magnitude divided by its norm.
func scaleRows[T float32 | float64](w, magnitudes, norms []T) {
	in := len(w) / len(norms)
	for o, n := range norms {
		row := w[o*in:][:in]
		for i := range row {
			row[i] *= magnitudes[o] / n
		}
	}
}
