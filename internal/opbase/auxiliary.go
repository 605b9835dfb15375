package opbase

import (
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// Aux is memory that a forward op fills and its backward op reads, for values that would cost a
// pass to recompute. It belongs to the forward op and is reused from run to run.
type Aux struct {
	f32 []float32
	f64 []float64
}

// AuxSlice returns n elements of a with their previous contents.
func AuxSlice[T cpu.Float](a *Aux, n int) []T {
	var s any
	switch any(*new(T)).(type) {
	case float32:
		if len(a.f32) != n {
			a.f32 = make([]float32, n)
		}
		s = a.f32
	default:
		if len(a.f64) != n {
			a.f64 = make([]float64, n)
		}
		s = a.f64
	}

	return s.([]T)
}

// Len returns the type and number of the elements of a, which is 0 before the first run.
func (a *Aux) Len() (tensor.Dtype, int) {
	if a.f64 != nil {
		return tensor.Float64, len(a.f64)
	}
	return tensor.Float32, len(a.f32)
}

// Lend makes a use the given memory, a []float32 or []float64, or withdraws it if memory is nil.
func (a *Aux) Lend(memory any) {
	a.f32, _ = memory.([]float32)
	a.f64, _ = memory.([]float64)
}

// Aux returns the auxiliary memory of an op.
func (b *Base) Aux() []*Aux { return b.aux }

// Owns registers the auxiliary memory of an op with ReleaseAux.
func (b *Base) Owns(aux ...*Aux) { b.aux = append(b.aux, aux...) }

// ReleaseAux frees the op's auxiliary memory; its next run allocates new memory. A graph that is
// recomputed for its gradient calls it after the first computation, since only the second fills the
// memory for the backward op.
func (b *Base) ReleaseAux() {
	for _, a := range b.aux {
		*a = Aux{}
	}
}
