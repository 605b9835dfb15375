package optim

import (
	"iter"
	"slices"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/opbase"
)

// Moment is an array that a kernel keeps for a parameter from step to step.
//
// Most moments have the parameter's shape and type, which is float32 on a GPU. A moment may also be
// stored in eight bits per element. Its elements are then codes for numbers relative to the scale of
// their block, and the scales form another moment.
type Moment struct {
	Name string // in checkpoints, after the parameter's name and a dot
	Mean Mean

	// Codes is nil for a floating-point moment. Otherwise the elements are of type uint8, and code c
	// represents Codes[c] times the scale of the block. One code must represent 0.
	Codes *[256]float32
	Scale string // name of the moment with the scales of the codes

	// Block is the number of consecutive elements of the parameter that share an element of the
	// moment; 0 means 1. It must divide [PartGrain], so that no block belongs to two parts.
	Block int
}

// Mean describes what a moment holds. Moments of floats or codes are running means of the gradients
// or of their squares. The code that judges growth relies on this. An optimizer whose formula
// contains a sum stores the mean instead and scales the step.
type Mean int

const (
	OfGradients Mean = iota + 1
	OfSquares        // squares of gradients; never negative
	IsScale          // scales of another moment; never negative
)

// Len returns the number of elements of the moment for n elements of a parameter.
func (m Moment) Len(n int) int {
	block := max(1, m.Block)
	return (n + block - 1) / block
}

// Shape returns the moment's shape for a parameter of the given shape.
func (m Moment) Shape(shape []int) []int {
	if m.Block > 1 {
		return []int{m.Len(opbase.Size(shape))}
	}
	return slices.Clone(shape)
}

// Part returns the elements from ≤ i < to of the moment that belong to a part of a parameter.
func (m Moment) Part(p Part) (from, to int) { return p.From / max(1, m.Block), m.Len(p.To) }

// Size returns the number of bytes of an element, given the size of a float.
func (m Moment) Size(float int) int {
	if m.Codes != nil {
		return 1
	}
	return float
}

// Zero returns the byte that fills the memory of a moment of zeros.
func (m Moment) Zero() byte {
	if m.Codes == nil {
		return 0
	}
	return byte(slices.Index(m.Codes[:], 0))
}

// Forget clears the elements from ≤ i < to of the parameter in data, which holds the moment's
// elements. Scales are kept, since other elements of their blocks may need them.
func (m Moment) Forget(data any, from, to int) {
	if m.Block > 1 {
		return
	}

	switch x := data.(type) {
	case []float32:
		clear(x[from:to])
	case []float64:
		clear(x[from:to])
	case []uint8:
		zero := m.Zero()
		for i := from; i < to; i++ {
			x[i] = zero
		}
	}
}

// New returns a moment of zeros for n elements of a parameter. The moment consists of codes or else
// of floats of the parameter's type, where any type except float64 counts as float32.
func (m Moment) New(n int, dtype tensor.Dtype) any {
	n = m.Len(n)
	switch {
	case m.Codes != nil:
		x := make([]uint8, n)
		m.Forget(x, 0, n)
		return x
	case dtype == tensor.Float64:
		return make([]float64, n)
	}
	return make([]float32, n)
}

// Slice returns the elements of the moment that belong to a part of a parameter.
func (m Moment) Slice(data any, p Part) any {
	from, to := m.Part(p)
	switch x := data.(type) {
	case []float32:
		return x[from:to]
	case []float64:
		return x[from:to]
	case []uint8:
		return x[from:to]
	}
	return data
}

// Bytes returns the memory of the kernel's moments for n elements of a parameter, given the size of
// a float.
func (k *Kernel) Bytes(n, float int) (bytes int) {
	if k == nil {
		return 0
	}

	for _, m := range k.Moments {
		bytes += m.Len(n) * m.Size(float)
	}
	return bytes
}

// MomentBytes returns the memory of an optimizer's moments for parameters with the given names and
// shapes, given the size of a float, which is 4 on GPUs.
func MomentBytes(o Rules, params iter.Seq2[string, []int], float int) (bytes int) {
	for name, shape := range params {
		bytes += o.Rule(name, shape).Kernel.Bytes(opbase.Size(shape), float)
	}
	return bytes
}

// Gradients summarizes a parameter's recent gradients.
type Gradients struct {
	Param   string
	Squares float64 // sum of the squares of all gradients
	Count   int     // number of gradients
}

// RememberedGradients returns a summary of the gradients for each parameter in an optimizer's state,
// in the state's order of parameters. It uses a mean of squares if the parameter's kernel maintains
// one, and otherwise a mean of gradients. Parameters without either are omitted.
func RememberedGradients(o Rules, state []Tensor) (all []Gradients) {
	fields, order := fieldsOf(state)
	for _, param := range order {
		kernel := o.Rule(param, widest(fields[param])).Kernel
		m, ok := kernel.gradientMoment()
		if !ok {
			continue
		}
		values, ok := kernel.values(m, fields[param])
		if !ok {
			continue
		}

		g := Gradients{Param: param}
		for v := range values {
			if m.Mean == OfGradients {
				v *= v
			}
			g.Squares += v
			g.Count++
		}
		all = append(all, g)
	}

	return all
}

// gradientMoment returns the moment that best describes the size of gradients. It returns false if
// the kernel has no suitable moment.
func (k *Kernel) gradientMoment() (Moment, bool) {
	if k == nil {
		return Moment{}, false
	}

	for _, mean := range []Mean{OfSquares, OfGradients} {
		i := slices.IndexFunc(k.Moments, func(m Moment) bool { return m.Mean == mean })
		if i >= 0 {
			return k.Moments[i], true
		}
	}

	return Moment{}, false
}

// values returns the numbers of moment m in a parameter's tensors. It returns false if there are
// none, or if their scales are missing.
func (k *Kernel) values(m Moment, fields map[string]Tensor) (iter.Seq[float64], bool) {
	switch x := fields[m.Name].Data.(type) {
	case []float32:
		return floats(x), len(x) > 0
	case []float64:
		return floats(x), len(x) > 0
	case []uint8:
		return k.decoded(m, x, fields)
	}
	return nil, false
}

// decoded is like values for a moment of codes.
func (k *Kernel) decoded(m Moment, codes []uint8, fields map[string]Tensor) (iter.Seq[float64], bool) {
	at := slices.IndexFunc(k.Moments, func(s Moment) bool { return s.Name == m.Scale })
	if at < 0 || m.Codes == nil {
		return nil, false
	}

	var scales []float64
	switch x := fields[m.Scale].Data.(type) {
	case []float32:
		scales = slices.Collect(floats(x))
	case []float64:
		scales = x
	}

	s := k.Moments[at]
	if len(scales) != s.Len(len(codes)) {
		return nil, false
	}

	return func(yield func(float64) bool) {
		for i, c := range codes {
			if !yield(float64(m.Codes[c]) * scales[i/max(1, s.Block)]) {
				return
			}
		}
	}, len(codes) > 0
}

func floats[T float32 | float64](x []T) iter.Seq[float64] {
	return func(yield func(float64) bool) {
		for _, v := range x {
			if !yield(float64(v)) {
				return
			}
		}
	}
}
