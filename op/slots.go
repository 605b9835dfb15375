package op

import (
	"errors"
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/state"
)

// KeepSlots copies the weights and scales of all slots of a Kasmina layer that are not currently
// being trained, and returns a function that writes them back.
//
// Use it with solvers that do not know about slots, such as gorgonia.NewAdamSolver. Such a solver
// changes a parameter whose gradient is 0 as long as it remembers earlier gradients, and always if it
// uses weight decay. Without KeepSlots, even a fossilized blueprint would therefore change:
//
//	restore, err := op.KeepSlots(lattice, weights, scales)
//	err = solver.Step(gorgonia.NodesToValueGrads(gorgonia.Nodes{weights, scales}))
//	restore()
//
// The optimizers in package optim do not need KeepSlots if their Forget method is called for such
// slots.
func KeepSlots(l *state.Lattice, weights, scales *gorgonia.Node) (restore func(), err error) {
	if l == nil || weights == nil || scales == nil {
		return nil, errors.New("op: KeepSlots: the lattice, weights and scales must not be nil")
	}

	learning := l.LearningSlots()
	var kept []func()
	for _, n := range []*gorgonia.Node{weights, scales} {
		x, ok := n.Value().(*tensor.Dense)
		if !ok {
			return nil, fmt.Errorf("op: KeepSlots: the value of %v is a %T, want a *tensor.Dense", n, n.Value())
		}
		if x.Shape()[0] != len(learning) {
			return nil, fmt.Errorf("op: KeepSlots: %v has %d rows, and the lattice has %d slots: make it with "+
				"state.WithSlots", n, x.Shape()[0],
				len(learning))
		}
		switch data := x.Data().(type) {
		case []float32:
			kept = append(kept, keepRows(data, learning))
		case []float64:
			kept = append(kept, keepRows(data, learning))
		default:
			return nil, fmt.Errorf("op: KeepSlots: %v is of %v, want float32 or float64", n, x.Dtype())
		}
	}

	return func() {
		for _, restore := range kept {
			restore()
		}
	}, nil
}

// keepRows copies the rows of slots that do not learn, and returns a function that writes them back.
func keepRows[T float32 | float64](data []T, learning []bool) (restore func()) {
	width := len(data) / len(learning)
	rows := make([][]T, len(learning))
	for slot, learns := range learning {
		if !learns {
			rows[slot] = append([]T(nil), data[slot*width:][:width]...)
		}
	}

	return func() {
		for slot, row := range rows {
			copy(data[slot*width:], row)
		}
	}
}
