package optim

import (
	"fmt"
	"maps"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/parallel"
	"github.com/kasmina-go/kasmina/internal/params"
)

// updater is the part of an optimizer that does not depend on its rules. It applies the rules to
// parameters and keeps each parameter's state by name.
type updater struct {
	name string // name of the optimizer in errors

	// rule returns how the optimizer updates a parameter, and the parameter's learning rate in the
	// next step.
	rule func(name string, shape []int) (Rule, float64)

	entries map[string]*entry
	reader  params.Reader
}

func newUpdater(name string, rule func(name string, shape []int) (Rule, float64)) *updater {
	return &updater{name: name, rule: rule, entries: map[string]*entry{}}
}

// run calls f and adds the names of the optimizer and the method to its error.
func (u *updater) run(method string, f func() error) error {
	if err := f(); err != nil {
		return fmt.Errorf("%s: %s: %w", u.name, method, err)
	}
	return nil
}

// Rule returns how the optimizer updates the parameter with the given name and shape.
func (u *updater) Rule(name string, shape []int) Rule {
	r, _ := u.rule(name, shape)
	return r
}

// Declare implements [Optimizer].
func (u *updater) Declare(model []gorgonia.ValueGrad) error {
	return u.run("Declare", func() error {
		decls, err := declarations(model)
		if err != nil {
			return err
		}
		if err := u.allFit(decls, false); err != nil {
			return err
		}

		for name, e := range decls {
			if u.entries[name] == nil {
				u.entries[name] = e
			}
		}
		return nil
	})
}

// Step updates every parameter in model from its gradient and sets the gradients to zero.
//
// It returns an error, and changes nothing, if a parameter has no name, value or gradient, if its
// shape has changed, or if its gradient is not finite. The only exception is [ErrOverflow], after
// which parameters have changed.
func (u *updater) Step(model []gorgonia.ValueGrad) error {
	return u.run("Step", func() error {
		ps, err := u.readModel(model)
		if err != nil {
			return err
		}
		return u.step(ps, ps, nil)
	})
}

// step counts a step of the parameters ps and updates cut, which holds the given parts of the parameters.
// If parts is nil, cut holds whole parameters.
func (u *updater) step(ps, cut []params.Param, parts []Part) error {
	for _, p := range ps {
		if err := u.fits(p.Name, p.Shape, p.Dtype); err != nil {
			return err
		}
	}

	for i, part := range parts {
		p := cut[i]
		r, _ := u.rule(p.Name, p.Shape)
		if r.Kernel.Whole && part.To-part.From != p.Shape.TotalSize() {
			return fmt.Errorf(
				"parameter %q: the part is %d to %d of %d elements, want the whole matrix",
				p.Name, part.From, part.To, p.Shape.TotalSize())
		}
	}

	for _, p := range ps {
		u.entry(p).step++
	}

	for i, p := range cut {
		from, to := 0, p.Shape.TotalSize()
		if parts != nil {
			from, to = parts[i].From, parts[i].To
		}
		u.update(p, from, to)
	}

	return overflowed(cut)
}

// update updates the elements from ≤ i < to of a parameter. p holds only these elements.
func (u *updater) update(p params.Param, from, to int) {
	e := u.entries[p.Name]
	r, lr := u.rule(p.Name, p.Shape)
	s := step{Rule: r, lr: lr, count: e.step, shape: p.Shape}

	moments := e.moments
	if to-from != p.Shape.TotalSize() {
		moments = make([]any, len(e.moments))
		for i, m := range e.kernel.Moments {
			moments[i] = m.Slice(e.moments[i], Part{From: from, To: to})
		}
	}

	switch g := p.Grad.(type) {
	case []float32:
		r.Kernel.float32(p.Value.([]float32), g, moments, s)
	case []float64:
		r.Kernel.float64(p.Value.([]float64), g, moments, s)
	}
}

// readModel returns the parameters for a step. It checks that they have names and finite gradients.
func (u *updater) readModel(model []gorgonia.ValueGrad) ([]params.Param, error) {
	ps, err := u.reader.Read(model)
	if err != nil {
		return nil, err
	}

	for i, p := range ps {
		if p.Name == "" {
			return nil, fmt.Errorf("parameter #%d has no name, which its state needs",
				i)
		}
		if at := p.NonFinite(); at >= 0 {
			return nil, fmt.Errorf(
				"parameter %q: the gradient is not finite at element %d of shape %v",
				p.Name, at, p.Shape)
		}
	}

	return ps, nil
}

// fits returns an error if the optimizer already knows a parameter of this name with a different type
// or shape.
func (u *updater) fits(name string, shape []int, dtype tensor.Dtype) error {
	e, ok := u.entries[name]
	if ok && (e.dtype != dtype || !slices.Equal(e.shape, shape)) {
		return fmt.Errorf(
			"parameter %q is %v of shape %v, but %v of shape %v is known under this name",
			name, dtype, tensor.Shape(shape), e.dtype, tensor.Shape(e.shape))
	}
	return nil
}

// allFit calls fits for all entries. If closed is true, the optimizer must know each parameter.
func (u *updater) allFit(entries map[string]*entry, closed bool) error {
	for _, name := range slices.Sorted(maps.Keys(entries)) {
		if closed && u.entries[name] == nil {
			return fmt.Errorf("there is no parameter %q", name)
		}
		if err := u.fits(name, entries[name].shape, entries[name].dtype); err != nil {
			return err
		}
	}
	return nil
}

// entry returns a parameter's entry, including its moments.
func (u *updater) entry(p params.Param) *entry {
	e := u.entries[p.Name]
	if e == nil {
		e = &entry{shape: p.Shape, dtype: p.Dtype}
		u.entries[p.Name] = e
	}

	if e.kernel == nil {
		r, _ := u.rule(p.Name, p.Shape)
		e.kernel = r.Kernel
	}

	for len(e.moments) < len(e.kernel.Moments) {
		m := e.kernel.Moments[len(e.moments)]
		e.moments = append(e.moments, m.New(opbase.Size(p.Shape), p.Dtype))
	}

	return e
}

// Forget implements [Optimizer].
func (u *updater) Forget(name string, from, to int) error {
	return u.run("Forget", func() error {
		e := u.entries[name]
		if e == nil {
			return nil
		}
		if n := opbase.Size(e.shape); from < 0 || to < from || to > n {
			return fmt.Errorf("elements %d to %d of parameter %q, which has %d", from, to, name, n)
		}

		for i, data := range e.moments {
			e.kernel.Moments[i].Forget(data, from, to)
		}
		return nil
	})
}

// Drop implements [Dropper].
func (u *updater) Drop(names ...string) {
	for _, name := range names {
		delete(u.entries, name)
	}
}

// State returns the moments of each parameter as "NAME.MOMENT", and its step count as "NAME.step".
func (u *updater) State() []Tensor {
	var state []Tensor
	for name, e := range u.entries {
		if e.step == 0 {
			continue
		}
		state = append(state, e.steps(name))
		for i, m := range e.kernel.Moments {
			state = append(state, Tensor{name + "." + m.Name, m.Shape(e.shape), e.moments[i]})
		}
	}

	sorted(state)
	parallel.Each(len(state), func(i int) { state[i].Data = clone(state[i].Data) })
	return state
}

// SetState implements [Optimizer].
func (u *updater) SetState(state []Tensor) error {
	return u.run("SetState", func() error {
		entries, err := u.parse(state)
		if err != nil {
			return err
		}
		if err := u.allFit(entries, len(u.entries) > 0); err != nil {
			return err
		}
		for _, name := range slices.Sorted(maps.Keys(entries)) {
			e := entries[name]
			if e.kernel.check == nil {
				continue
			}
			if err := e.kernel.check(u.Rule(name, e.shape), e); err != nil {
				return fmt.Errorf("parameter %q: %w", name, err)
			}
		}

		// Declared parameters missing from the state restart from zero.
		for name, e := range u.entries {
			u.entries[name] = &entry{shape: e.shape, dtype: e.dtype}
		}
		maps.Copy(u.entries, entries)
		return nil
	})
}
