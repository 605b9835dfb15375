package cpuops

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/array"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// A gradientSum is the sum of a parameter's gradients over runs.
//
// A run adds its gradients one by one, and may fail or be canceled in between. The sum must then be
// restored, since otherwise running again would add the first gradients twice. Therefore add either
// records that the sum was zero, as it is in most runs, or copies the sum, and undo restores it.
type gradientSum struct {
	value gorgonia.Value
	flat  any // the elements of value, []float32 or []float64

	before any // memory for a copy, allocated by the first run that needs one
	undoBy undoing
}

// undoing is a way to restore a gradientSum.
type undoing uint8

const (
	notAdded undoing = iota
	wasZero
	hasCopy
)

func newGradientSum(g *value) (*gradientSum, error) {
	s := &gradientSum{value: newValue(g.dt, g.shape)}
	var err error
	s.flat, err = opbase.Flat(s.value)
	return s, err
}

// add adds the gradient of the present run.
func (s *gradientSum) add(g any) {
	switch g := g.(type) {
	case []float32:
		s.undoBy = addUndoable(s, g)
	case []float64:
		s.undoBy = addUndoable(s, g)
	}
}

// addUndoable records how to restore the sum, then adds g to it.
func addUndoable[T cpu.Float](s *gradientSum, g []T) undoing {
	sum, by := s.flat.([]T), wasZero
	if !array.IsZero(sum) {
		if s.before == nil {
			s.before = make([]T, len(sum))
		}
		array.Copy(s.before.([]T), sum)
		by = hasCopy
	}
	array.Accumulate(sum, g)
	return by
}

// undo restores the sum as it was before the present run.
func (s *gradientSum) undo() {
	switch sum := s.flat.(type) {
	case []float32:
		restore(s, sum)
	case []float64:
		restore(s, sum)
	}
	s.undoBy = notAdded
}

func restore[T cpu.Float](s *gradientSum, sum []T) {
	switch s.undoBy {
	case wasZero:
		clear(sum)
	case hasCopy:
		array.Copy(sum, s.before.([]T))
	}
}

// bytes returns the size of the sum and its copy.
func (s *gradientSum) bytes() int {
	n := 1
	if s.before != nil {
		n = 2
	}
	return n * elementSize(s.value.Dtype()) * opbase.Size(s.value.Shape())
}

// finish ends a run. It keeps the gradients added by a successful run and undoes the additions of a
// failed run.
func (p *program) finish(succeeded bool) {
	for _, s := range p.sums {
		if succeeded {
			s.undoBy = notAdded
		} else {
			s.undo()
		}
	}
}
