package opbase

import (
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// Aux is memory that a forward op fills and its backward op reads: a figure that would cost a pass
// to compute again. It belongs to the forward op and is reused from run to run.
type Aux struct {
	f32 []float32
	f64 []float64
}

// AuxSlice returns n elements of a, what they last held included.
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

// Len returns the type and the number of the elements of a, none before the first run.
func (a *Aux) Len() (tensor.Dtype, int) {
	if a.f64 != nil {
		return tensor.Float64, len(a.f64)
	}
	return tensor.Float32, len(a.f32)
}

// Lend makes memory, a []float32 or a []float64, that of a; nil takes it away.
func (a *Aux) Lend(memory any) {
	a.f32, _ = memory.([]float32)
	a.f64, _ = memory.([]float64)
}

// Aux returns the auxiliary memory of an op.
func (b *Base) Aux() []*Aux { return b.aux }

// Owns registers the auxiliary memory of an op, for ReleaseAux.
func (b *Base) Owns(aux ...*Aux) { b.aux = append(b.aux, aux...) }

// ReleaseAux drops the op's auxiliary memory; its next run allocates it anew. A graph that is
// computed a second time for its gradient calls it after the first, whose figures nobody reads.
func (b *Base) ReleaseAux() {
	for _, a := range b.aux {
		*a = Aux{}
	}
}
