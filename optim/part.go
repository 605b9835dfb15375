package optim

import (
	"cmp"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/optimizer"
	"github.com/kasmina-go/kasmina/internal/params"
)

// PartGrain is the number of elements in whose multiples a parameter may be divided. The elements
// of each block are computed by themselves, so that parts have the bits of the whole.
const PartGrain = cpu.VectorGrain

// Part is the elements From ≤ i < To, in row-major order, of the parameter with that name.
type Part struct {
	Name     string
	From, To int
}

// Partial is an optimiser that can do its share of a step. It serves where several processes train
// a model, of which each updates a part. [AdamW] and [Muon] are.
type Partial interface {
	Optimizer
	// StepParts is Step for the given parts alone. It counts a step of every parameter of the
	// model, but reads and changes no gradients, values and moments outside the parts. From is a
	// multiple of PartGrain, and so is To, unless it is the parameter's end. Parts do not overlap.
	// A matrix that Muon updates is one part or none.
	StepParts(model []gorgonia.ValueGrad, parts []Part) error
	// Rule is what the optimiser does with a parameter.
	Rule(name string, shape []int) Rule
	// Moments are what the optimiser remembers of a parameter beside its count of steps, each a
	// []float32 or []float64 of its size. It is the optimiser's own memory, into which others'
	// parts can be copied. It is nil before the first step.
	Moments(name string) []any
	// StateParts is State of the given parts alone: of each moment a copy of the part's elements,
	// flat, under the moment's name. The counts of steps are those of all parameters.
	StateParts(parts []Part) []Tensor
}

var (
	_ Partial = (*AdamW)(nil)
	_ Partial = (*Muon)(nil)
)

// readParts returns the parameters of a model, and those parts of them that are to be updated.
func (s *store) readParts(model []gorgonia.ValueGrad,
	parts []Part) (ps, cut []params.Param, err error) {
	if ps, err = s.reader.Read(model); err != nil {
		return nil, nil, err
	}
	byName := make(map[string]params.Param, len(ps))
	for i, p := range ps {
		if p.Name == "" {
			return nil, nil, fmt.Errorf(
				"parameter #%d has no name, under which its state could be kept", i)
		}
		byName[p.Name] = p
	}
	for _, part := range parts {
		p, ok := byName[part.Name]
		if !ok {
			return nil, nil, fmt.Errorf("there is no parameter %q", part.Name)
		}
		if c, err := part.of(p); err != nil {
			return nil, nil, fmt.Errorf("parameter %q: %w", p.Name, err)
		} else if at := c.NonFinite(); at >= 0 {
			return nil, nil, fmt.Errorf(
				"parameter %q: the gradient is not finite at element %d of shape %v",
				p.Name, part.From+at, p.Shape)
		} else {
			cut = append(cut, c)
		}
	}
	return ps, cut, nil
}

// of returns the part's value and gradient, under the shape of the whole.
func (part Part) of(p params.Param) (params.Param, error) {
	n := p.Shape.TotalSize()
	if part.From < 0 || part.To < part.From || part.To > n || part.From%PartGrain != 0 ||
		part.To%PartGrain != 0 && part.To != n {
		return p, fmt.Errorf("the part is %d to %d of %d elements, want multiples of %d or the end",
			part.From, part.To, n, PartGrain)
	}
	p.Value, p.Grad = slice(p.Value, part), slice(p.Grad, part)
	return p, nil
}

func slice(data any, part Part) any {
	switch x := data.(type) {
	case []float32:
		return x[part.From:part.To]
	case []float64:
		return x[part.From:part.To]
	}
	return data
}

// StepParts implements [Partial].
func (a *AdamW) StepParts(model []gorgonia.ValueGrad, parts []Part) error {
	if a == nil || a.store.entries == nil {
		return fmt.Errorf("optim.AdamW: StepParts: %w", errZero)
	}
	ps, cut, err := a.store.readParts(model, parts)
	if err == nil {
		err = a.stepParts(ps, cut, parts)
	}
	if err == nil {
		err = overflowed(cut)
	}
	if err != nil {
		return fmt.Errorf("optim.AdamW: StepParts: %w", err)
	}
	return nil
}

// stepParts updates parts, cut of the parameters ps.
func (a *AdamW) stepParts(ps, cut []params.Param, parts []Part) error {
	for _, p := range ps {
		if err := a.store.fits(p.Name, p.Shape, p.Dtype); err != nil {
			return err
		}
	}
	for _, p := range ps {
		a.store.entry(p).step++
	}
	for i, p := range cut {
		h, e := resolve(a.base, a.groups, p.Name, p.Shape), a.store.entries[p.Name]
		s := optimizer.AdamWStep{LR: a.lr * h.scale, Beta1: h.beta1, Beta2: h.beta2, Eps: a.eps,
			Decay: h.decay, Step: e.step}
		m, v := slice(e.moments[0], parts[i]), slice(e.moments[1], parts[i])
		switch g := p.Grad.(type) {
		case []float32:
			optimizer.AdamW(p.Value.([]float32), g, m.([]float32), v.([]float32), s)
		case []float64:
			optimizer.AdamW(p.Value.([]float64), g, m.([]float64), v.([]float64), s)
		}
	}
	return nil
}

// Moments implements [Partial].
func (a *AdamW) Moments(name string) []any { return a.store.moments(name) }

// StateParts implements [Partial].
func (a *AdamW) StateParts(parts []Part) []Tensor { return a.store.stateParts(parts) }

// StateParts implements [Partial].
func (m *Muon) StateParts(parts []Part) []Tensor {
	if m.rest == nil {
		return nil
	}
	return sorted(append(m.store.stateParts(parts), m.rest.store.stateParts(parts)...))
}

// stateParts returns the counts of steps of all, and of the parts copies of the moments.
func (s *store) stateParts(parts []Part) []Tensor {
	var state []Tensor
	for name, e := range s.entries {
		if e.step > 0 {
			state = append(state, Tensor{name + "." + stepField, []int{1}, []int64{int64(e.step)}})
		}
	}
	for _, p := range parts {
		e := s.entries[p.Name]
		if e == nil || e.step == 0 {
			continue
		}
		for i, f := range s.fields {
			state = append(state, Tensor{p.Name + "." + f, []int{p.To - p.From},
				clone(slice(e.moments[i], p))})
		}
	}
	return sorted(state)
}

// sorted puts a state in order of names.
func sorted(state []Tensor) []Tensor {
	slices.SortFunc(state, func(a, b Tensor) int { return cmp.Compare(a.Name, b.Name) })
	return state
}

// StepParts implements [Partial].
func (m *Muon) StepParts(model []gorgonia.ValueGrad, parts []Part) error {
	if m == nil || m.rest == nil {
		return fmt.Errorf("optim.Muon: StepParts: %w", errZero)
	}
	ps, cut, err := m.store.readParts(model, parts)
	if err == nil {
		err = m.stepParts(ps, cut, parts)
	}
	if err == nil {
		err = overflowed(cut)
	}
	if err != nil {
		return fmt.Errorf("optim.Muon: StepParts: %w", err)
	}
	return nil
}

func (m *Muon) stepParts(ps, cut []params.Param, parts []Part) error {
	var own, rest, restCut []params.Param
	var restParts []Part
	for _, p := range ps {
		if err := m.fits(p.Name, p.Shape, p.Dtype); err != nil {
			return err
		}
		if m.usesAdamW(p.Name, p.Shape) {
			rest = append(rest, p)
		}
	}
	for i, p := range cut {
		switch {
		case m.usesAdamW(p.Name, p.Shape):
			restCut, restParts = append(restCut, p), append(restParts, parts[i])
		case parts[i].To-parts[i].From != p.Shape.TotalSize():
			return fmt.Errorf(
				"parameter %q: the part is %d to %d of %d elements, want the whole matrix",
				p.Name, parts[i].From, parts[i].To, p.Shape.TotalSize())
		default:
			own = append(own, p)
		}
	}
	m.update(own)
	for _, p := range ps { // those of other processes
		if !m.usesAdamW(p.Name, p.Shape) && !slices.ContainsFunc(own, func(q params.Param) bool {
			return q.Name == p.Name
		}) {
			m.store.entry(p).step++
		}
	}
	return m.rest.stepParts(rest, restCut, restParts)
}

// Moments implements [Partial].
func (m *Muon) Moments(name string) []any {
	if m.rest == nil {
		return nil
	}
	if own := m.store.moments(name); own != nil {
		return own
	}
	return m.rest.store.moments(name)
}

// moments are the memory of what is kept of a parameter, nil before its first step.
func (s *store) moments(name string) []any {
	if e := s.entries[name]; e != nil && e.step > 0 {
		return e.moments
	}
	return nil
}
