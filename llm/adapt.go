package llm

import (
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"strings"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	"github.com/kasmina-go/kasmina/internal/parallel"
	"github.com/kasmina-go/kasmina/llm/internal/block"
)

// Adapt returns a model with low-rank adapters that initially computes the same function as m. Both
// models share the memory of m's parameters, so several sets of adapters can be attached to one model at
// once. A model to be trained must freeze the shared parameters.
//
// The initial values of a depend only on the seed and the names of the targets.
func Adapt(m *Model, a LoRA, seed uint64) (*Model, error) {
	return adapt(m, a, func(p ParamSpec) func() float64 {
		h := fnv.New64a()
		h.Write([]byte(p.Name))
		r := rand.New(rand.NewPCG(seed, h.Sum64()))
		bound := math.Sqrt(3) * p.Deviation // of a uniform distribution
		return func() float64 { return bound * (2*r.Float64() - 1) }
	})
}

// adapt returns a model with adapters. The function start returns the initial values of their matrices a.
func adapt(m *Model, a LoRA, start func(ParamSpec) func() float64) (*Model, error) {
	done, err := m.Current()
	if err != nil {
		return nil, fmt.Errorf("llm: Adapt: %w", err)
	}
	defer done()

	if !m.Config.Adapter.IsZero() {
		return nil, errors.New("llm: Adapt: the model has adapters already: adapt the model that it was made " +
			"of, or merge them with Model.Plain")
	}

	c := m.Config
	c.Adapter = a
	if a.IsZero() {
		return nil, errors.New("llm: Adapt: the LoRA is its zero value, want a Rank, an Alpha and Targets")
	}
	if err := c.Check(); err != nil {
		return nil, err
	}

	next := &Model{Config: c, byName: map[string]int{}}
	for p := range c.Specs() {
		v := m.Param(p.Name)
		switch {
		case v != nil:
		case strings.HasSuffix(p.Name, block.EndingA):
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
	w, a, b := m.Param(target+".weight"), m.Param(target+block.EndingA), m.Param(target+block.EndingB)
	scale := m.Config.Adapter.ScaleOf(target)
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

// merged copies the weights, merges the adapters into the copies, and returns the result as a model. The
// model must be locked.
func (m *Model) merged() (*Model, error) {
	c := m.Config
	c.Adapter = LoRA{}
	next := &Model{Config: c, byName: map[string]int{}}
	for p := range c.Specs() {
		next.byName[p.Name] = len(next.Params)
		next.Params = append(next.Params, Param{p.Name, m.Param(p.Name)})
	}

	targets := m.Config.Adapter.Targets
	parallel.Each(len(targets), func(i int) {
		p := &next.Params[next.byName[targets[i]+".weight"]]
		p.Value = m.mergedWeight(targets[i])
	})

	var err error
	next.Kasmina, err = next.newNetwork()
	return next, err
}

// mergedWeight returns w + s·b·a, or with magnitudes m/‖w + s·b·a‖ ⊙ (w + s·b·a) for each row.
func (m *Model) mergedWeight(target string) *tensor.Dense {
	sum := cloneTensor(m.Param(target + ".weight"))
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
