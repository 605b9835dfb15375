package optim

import (
	"cmp"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/params"
)

// PartGrain is the granularity for dividing parameters, so the boundaries of parts are multiples of
// it. Kernels compute each such block of elements separately, so that updating parts is bit-identical
// to updating the whole.
const PartGrain = cpu.VectorGrain

// Part consists of the elements From ≤ i < To, in row-major order, of the named parameter.
type Part struct {
	Name     string
	From, To int
}

// A Dropper is an [Optimizer] that can forget parameters. A trainer calls Drop before a model grows and
// reuses names with other shapes.
type Dropper interface {
	Optimizer

	// Drop removes parameters from the state, including their names and shapes.
	Drop(names ...string)
}

// Partial is implemented by optimizers that can update a part of a model, for runs on several processes
// that update one part each. All optimizers in this package implement it.
type Partial interface {
	Rules

	// StepParts is Step for the given parts only. It counts a step for every parameter of the model,
	// but neither reads nor changes gradients, values or moments outside the parts.
	//
	// From is a multiple of [PartGrain], and so is To unless it is the end of the parameter. Parts do
	// not overlap. If [Kernel.Whole] is set, a part is the whole matrix.
	StepParts(model []gorgonia.ValueGrad, parts []Part) error

	// Moments returns the moments of a parameter in the order of its kernel's Moments, each as a
	// []float32, []float64 or []uint8. They are the optimizer's own memory, so that a caller can copy
	// the parts of other processes into them; see [Moment.Part]. There are none before the first
	// step.
	Moments(name string) []any

	// StateParts returns the step counts of all parameters and a copy of the given parts of the
	// moments, both sorted by name.
	StateParts(parts []Part) (counts []Tensor, moments []Stretch)
}

// Stretch is a range of consecutive elements of a moment, as a flat tensor with the moment's name in
// a state.
type Stretch struct {
	Tensor
	From, Of int // the first element, and the number of elements of the whole moment
}

// readParts returns the parameters of a model as ps, and the given parts as cut.
func (u *updater) readParts(model []gorgonia.ValueGrad,
	parts []Part) (ps, cut []params.Param, err error) {
	if ps, err = u.reader.Read(model); err != nil {
		return nil, nil, err
	}

	byName := make(map[string]params.Param, len(ps))
	for i, p := range ps {
		if p.Name == "" {
			return nil, nil, fmt.Errorf(
				"parameter #%d has no name, which its state needs", i)
		}
		byName[p.Name] = p
	}

	for _, part := range parts {
		p, ok := byName[part.Name]
		if !ok {
			return nil, nil, fmt.Errorf("there is no parameter %q", part.Name)
		}
		if c, err := part.cut(p); err != nil {
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

// cut returns the part's value and gradient with the shape of the whole parameter.
func (part Part) cut(p params.Param) (params.Param, error) {
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
func (u *updater) StepParts(model []gorgonia.ValueGrad, parts []Part) error {
	return u.run("StepParts", func() error {
		ps, cut, err := u.readParts(model, parts)
		if err != nil {
			return err
		}
		return u.step(ps, cut, parts)
	})
}

// Moments implements [Partial].
func (u *updater) Moments(name string) []any {
	if e := u.entries[name]; e != nil && e.step > 0 {
		return e.moments
	}
	return nil
}

// StateParts implements [Partial].
func (u *updater) StateParts(parts []Part) (counts []Tensor, moments []Stretch) {
	for name, e := range u.entries {
		if e.step > 0 {
			counts = append(counts, e.steps(name))
		}
	}

	for _, p := range parts {
		e := u.entries[p.Name]
		if e == nil || e.step == 0 {
			continue
		}
		for i, m := range e.kernel.Moments {
			from, to := m.Part(p)
			own := Tensor{p.Name + "." + m.Name, []int{to - from}, clone(m.Slice(e.moments[i], p))}
			moments = append(moments, Stretch{own, from, m.Len(opbase.Size(e.shape))})
		}
	}

	slices.SortFunc(moments, func(a, b Stretch) int { return cmp.Compare(a.Name, b.Name) })
	return sorted(counts), moments
}

// sorted sorts a state by name.
func sorted(state []Tensor) []Tensor {
	slices.SortFunc(state, func(a, b Tensor) int { return cmp.Compare(a.Name, b.Name) })
	return state
}
