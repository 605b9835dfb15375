package llm

import (
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/parallel"
	"github.com/kasmina-go/kasmina/optim"
)

// modelState is the layout, the parameters and the optimizer state of a model.
type modelState struct {
	layout
	Params  []Param
	Moments []optim.Tensor // never modified in place

	// From maps the parameters that an engine holds, together with their optimizer state, to their names
	// in the engine. The values in Params are then out of date, except for the parameters in Here. From
	// is nil if the whole model is on the host.
	From map[string]string
	Here map[string]bool
}

// Clone returns a deep copy of a model that is on the host.
func (m modelState) Clone() modelState {
	m.From, m.Here = nil, nil
	m.Params = m.copies()
	return m
}

// copies returns the parameters, with copies of the values that are on the host.
func (m modelState) copies() []Param {
	params := slices.Clone(m.Params)
	parallel.Each(len(params), func(i int) {
		if p := &params[i]; !m.elsewhere(p.Name) {
			p.Value = cloneTensor(p.Value)
		}
	})
	return params
}

// cloneTensor returns a deep copy of a tensor, or nil for nil.
func cloneTensor(v *tensor.Dense) *tensor.Dense {
	if v == nil {
		return nil
	}

	var numbers any
	switch x := v.Data().(type) {
	case []float32:
		numbers = parallel.Clone(x)
	case []float64:
		numbers = parallel.Clone(x)
	}
	return tensor.New(tensor.WithShape(v.Shape().Clone()...), tensor.WithBacking(numbers))
}

// param returns the values of a parameter, or nil if the model lacks it.
func (m modelState) param(name string) *tensor.Dense {
	i := slices.IndexFunc(m.Params, func(p Param) bool { return p.Name == name })
	if i < 0 {
		return nil
	}
	return m.Params[i].Value
}

// dtype returns the type of the parameters. Those in a model's Base have no values.
func (m modelState) dtype() tensor.Dtype {
	i := slices.IndexFunc(m.Params, func(p Param) bool { return p.Value != nil })
	return m.Params[i].Value.Dtype()
}

// values returns the parameters by name.
func (m modelState) values() map[string]*tensor.Dense {
	all := make(map[string]*tensor.Dense, len(m.Params))
	for _, p := range m.Params {
		all[p.Name] = p.Value
	}
	return all
}

// moments returns the optimizer state by parameter.
func (m modelState) moments() map[string][]optim.Tensor {
	all := map[string][]optim.Tensor{}
	for _, x := range m.Moments {
		param := x.Name[:strings.LastIndexByte(x.Name, '.')]
		all[param] = append(all[param], x)
	}
	return all
}

// become returns the model with layout next. The function source names the old parameter that
// supplies the values and moments of a new one, or returns "" for a parameter that fresh initializes. A
// parameter with several copies is copied.
func (m modelState) become(next layout, source func(name string) string,
	fresh func(i int, p ParamSpec) func() float64) modelState {
	values, moments := m.values(), m.moments()
	grown, taken := modelState{layout: next}, map[*tensor.Dense]bool{}
	var copies []int
	for p := range next.Specs() {
		own, from := Param{Name: p.Name}, source(p.Name)
		grown.findAs(p.Name, m, from)
		switch own.Value = values[from]; {
		case own.Value == nil:
			own.Value = newParamValue(m.dtype(), p.Shape, fresh(len(grown.Params), p))
		case taken[own.Value] && grown.elsewhere(p.Name):
			own.Value = newParamValue(m.dtype(), p.Shape, nil)
		case taken[own.Value]:
			copies = append(copies, len(grown.Params))
		}
		taken[own.Value] = true
		grown.Params = append(grown.Params, own)
		for _, x := range moments[from] {
			x.Name = p.Name + strings.TrimPrefix(x.Name, from)
			grown.Moments = append(grown.Moments, x)
		}
	}

	parallel.Each(len(copies), func(i int) {
		p := &grown.Params[copies[i]]
		p.Value = cloneTensor(p.Value)
	})
	return grown
}

// findAs records that the named parameter has the values of the parameter from of another model, if an engine
// holds them.
func (m *modelState) findAs(name string, other modelState, from string) {
	at, ok := other.From[from]
	if !ok {
		return
	}

	if m.From == nil {
		m.From, m.Here = map[string]string{}, map[string]bool{}
	}

	m.From[name] = at
	if other.Here[from] {
		m.Here[name] = true
	}
}

// elsewhere reports whether only an engine holds a parameter's values.
func (m modelState) elsewhere(name string) bool { return m.From[name] != "" && !m.Here[name] }

// MomentsHere returns the optimizer state of the parameters that no engine holds.
func (m modelState) MomentsHere() []optim.Tensor {
	return slices.DeleteFunc(slices.Clone(m.Moments), func(x optim.Tensor) bool {
		return m.From[x.Name[:strings.LastIndexByte(x.Name, '.')]] != ""
	})
}

// sameName is the source function for parameters that keep their names.
func sameName(name string) string { return name }

// Grow returns the model with its stack of blocks grown. The parameters of a new block that write to the
// residual stream are 0, so that the block is the identity. In a block with a norm at its output, the
// norm weight is 0 instead. (The gradient of a norm of zeros would be unbounded.)
func (m modelState) Grow(g Grown) modelState {
	return m.become(m.layout.Grow(g), g.Source, func(i int, p ParamSpec) func() float64 {
		return p.Fresh(uint64(g.Step), i)
	})
}

// Plant returns the model with a blueprint added at the given step. The initial values depend only on
// the step, the seed and the kind, except that the first rows of a LoRA's matrix A may be given.
func (m modelState) Plant(p Planted, step int, rows ...[]float32) modelState {
	next := m.become(m.layout.Plant(p), sameName, func(_ int, p ParamSpec) func() float64 {
		h := fnv.New64a()
		h.Write([]byte(p.Name))
		r := rand.New(rand.NewPCG(uint64(step), h.Sum64()))
		return func() float64 { return p.Start + p.Deviation*r.NormFloat64() }
	})
	if len(rows) > 0 {
		writeRows(next.param(p.Prefix()+"a"), rows)
	}
	return next
}

// writeRows overwrites the first rows of a matrix.
func writeRows(a *tensor.Dense, rows [][]float32) {
	for r, row := range rows {
		switch x := a.Data().(type) {
		case []float32:
			copy(x[r*len(row):], row)
		case []float64:
			for i, v := range row {
				x[r*len(row)+i] = float64(v)
			}
		}
	}
}

// Uproot returns the model without the blueprint of a seed.
func (m modelState) Uproot(site blueprints.Site, seed int) modelState {
	return m.become(m.layout.Uproot(site, seed), sameName, nil)
}

// Back returns a copy of the model with layout l and the parameters and moments of before. Parameters
// missing from before are taken from m.
func (m modelState) Back(before modelState, l layout) modelState {
	values, moments := before.values(), before.moments()
	now, remembered := m.values(), m.moments()
	var back modelState
	back.layout = l
	for p := range l.Specs() {
		from := p.Name
		for i := len(l.Grown) - 1; i >= len(before.Config.Grown) && from != ""; i-- {
			from = l.Grown[i].Source(from)
		}
		v, kept := values[from], moments[from]
		if v == nil || !slices.Equal(v.Shape(), p.Shape) {
			from = p.Name
			v, kept = now[from], remembered[from]
			back.findAs(p.Name, m, from)
		}
		back.Params = append(back.Params, Param{Name: p.Name, Value: v})
		for _, x := range kept {
			x.Name = p.Name + strings.TrimPrefix(x.Name, from)
			back.Moments = append(back.Moments, x)
		}
	}

	back.Params = back.copies()
	return back
}

// plantedSeed holds the parameters of a planted blueprint.
type plantedSeed struct {
	Planted
	kind   blueprints.Kind
	values map[string]*tensor.Dense // by name without the prefix
}

// planted returns the blueprint of a seed.
func (m modelState) planted(site blueprints.Site, seed int) (o plantedSeed, err error) {
	p, ok := m.PlantedAt(site, seed)
	if !ok {
		return o, fmt.Errorf("seed %d of site %v has nothing planted", seed, site)
	}

	kind, _ := blueprints.ByName(p.Kind)
	o = plantedSeed{p, kind, map[string]*tensor.Dense{}}
	for _, q := range m.Params {
		if name, ok := strings.CutPrefix(q.Name, p.Prefix()); ok {
			o.values[name] = q.Value
		}
	}

	return o, nil
}

// replace returns the model with the given values for all of its parameters. Only the values of the named parameters
// differ from those that the engine holds. The moments do not change.
func (m modelState) replace(values map[string]*tensor.Dense, names []string) modelState {
	m.Params = slices.Clone(m.Params)
	for i := range m.Params {
		m.Params[i].Value = values[m.Params[i].Name]
	}

	if m.From != nil {
		m.Here = maps.Clone(m.Here)
		for _, name := range names {
			m.Here[name] = true
		}
	}

	return m
}

// valueGradsOf returns the parameters that learn, in the form that an optimizer's Declare takes.
func valueGradsOf(params []Param, learns func(name string) bool) (all []gorgonia.ValueGrad) {
	g := gorgonia.NewGraph()
	for _, p := range params {
		if !learns(p.Name) {
			continue
		}
		all = append(all, gorgonia.NodeFromAny(g, p.Value, gorgonia.WithName(p.Name)))
	}
	return all
}
