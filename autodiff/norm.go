package autodiff

import (
	"fmt"
	"math"
	"slices"
	"sync"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu/array"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/params"
)

// readers caches the most recently read model, because a training loop reads the same one repeatedly.
var readers = sync.Pool{New: func() any { return new(params.Reader) }}

// GlobalNorm returns sqrt(Σ g²) over all elements of all gradients in grads, which
// gorgonia.NodesToValueGrads makes from parameter nodes. The sum is accumulated in float64 and in a
// fixed order. The first NaN or infinity in a gradient is an error wrapping a [*NonFiniteError].
func GlobalNorm(grads []gorgonia.ValueGrad) (float64, error) {
	r := readers.Get().(*params.Reader)
	defer readers.Put(r)
	ps, err := r.Read(grads)
	if err == nil {
		var norm float64
		if norm, err = globalNorm(ps); err == nil {
			return norm, nil
		}
	}
	return 0, fmt.Errorf("autodiff.GlobalNorm: %w", err)
}

// ClipGlobalNorm multiplies all gradients by min(1, limit/(norm + 1e-6)), where norm is their
// previous [GlobalNorm], and returns norm. limit must be positive. On an error, such as a non-finite
// gradient, no gradient is changed. (Pascanu, Mikolov and Bengio, "On the difficulty of training
// recurrent neural networks", 2013.)
func ClipGlobalNorm(grads []gorgonia.ValueGrad, limit float64) (norm float64, err error) {
	r := readers.Get().(*params.Reader)
	defer readers.Put(r)
	return clip(r, grads, limit)
}

// Clipper repeatedly clips the same gradients, for models that clip some gradients separately from
// the rest. It must not be used concurrently.
type Clipper struct {
	grads  []gorgonia.ValueGrad
	reader params.Reader
}

// NewClipper returns a Clipper for the given gradients.
func NewClipper(grads []gorgonia.ValueGrad) *Clipper { return &Clipper{grads: slices.Clone(grads)} }

// Clip clips the gradients and returns their previous norm; see [ClipGlobalNorm].
func (c *Clipper) Clip(limit float64) (norm float64, err error) {
	return clip(&c.reader, c.grads, limit)
}

// clip implements ClipGlobalNorm.
func clip(r *params.Reader, grads []gorgonia.ValueGrad, limit float64) (norm float64, err error) {
	const name = "autodiff.ClipGlobalNorm"
	if !(limit > 0) {
		return 0, fmt.Errorf("%s: limit is %v, want a number above 0", name, limit)
	}

	ps, err := r.Read(grads)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	if norm, err = globalNorm(ps); err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}

	scale := limit / (norm + 1e-6)
	if !(scale < 1) {
		return norm, nil
	}

	for _, p := range ps {
		switch g := p.Grad.(type) {
		case []float32:
			array.ScaleBy(g, scale)
		case []float64:
			array.ScaleBy(g, scale)
		}
	}

	return norm, nil
}

// globalNorm computes the sum in one pass, and searches for a non-finite element only if the sum is not finite.
func globalNorm(ps []params.Param) (float64, error) {
	var sum float64
	for i, p := range ps {
		switch g := p.Grad.(type) {
		case []float32:
			sum += array.SumSquares(g)
		case []float64:
			sum += array.SumSquares(g)
		}
		if math.IsNaN(sum) || math.IsInf(sum, 0) {
			if e := nonFinite(p.Grad, p.Shape); e != nil {
				e.Param, e.What = params.Label(p.Name, i), "gradient"
				return 0, e
			}
			return 0, fmt.Errorf("the sum of squares overflows at parameter %s",
				params.Label(p.Name, i))
		}
	}

	return math.Sqrt(sum), nil
}

// NonFiniteError reports the location of a NaN or an infinity.
type NonFiniteError struct {
	Param string  // the parameter's name, quoted, or its number
	What  string  // "value" or "gradient"
	Index []int   // index within the parameter
	Value float64 // NaN or ±Inf
}

// Error describes the value and its location.
func (e *NonFiniteError) Error() string {
	return fmt.Sprintf("the %s of parameter %s is %v at %v", e.What, e.Param, e.Value, e.Index)
}

// FirstNonFinite returns the name of the first parameter that contains a NaN or an infinity, and
// whether there is one. kind is "value" or, if all values are finite, "gradient". Values are checked
// first because a single non-finite parameter makes all gradients non-finite. A missing value or gradient
// counts as finite.
func FirstNonFinite(model []gorgonia.ValueGrad) (name, kind string, found bool) {
	r := readers.Get().(*params.Reader)
	defer readers.Put(r)
	if ps, err := r.Read(model); err == nil && !slices.ContainsFunc(ps, isNonFinite) {
		return "", "", false
	}

	for i, p := range model {
		if !params.Missing(p) && nonFiniteValue(p.Value()) != nil {
			return params.Label(params.Name(p), i), "value", true
		}
	}

	for i, p := range model {
		if params.Missing(p) {
			continue
		}
		if g, err := p.Grad(); err == nil && nonFiniteValue(g) != nil {
			return params.Label(params.Name(p), i), "gradient", true
		}
	}

	return "", "", false
}

// isNonFinite reports whether the value or the gradient of a parameter has a non-finite element.
func isNonFinite(p params.Param) bool {
	if x, ok := p.Value.([]float32); ok {
		return array.FirstNonFinite(x) >= 0 || p.NonFinite() >= 0
	}
	return array.FirstNonFinite(p.Value.([]float64)) >= 0 || p.NonFinite() >= 0
}

// nonFiniteValue returns the location of the first non-finite element of v, or nil.
func nonFiniteValue(v gorgonia.Value) *NonFiniteError {
	if v == nil {
		return nil
	}
	flat, err := opbase.Flat(v)
	if err != nil {
		return nil
	}
	return nonFinite(flat, v.Shape())
}

// nonFinite returns the location of the first NaN or infinity in data, the elements of a tensor
// with the given shape, or nil.
func nonFinite(data any, shape tensor.Shape) *NonFiniteError {
	i, v := -1, 0.0
	switch d := data.(type) {
	case []float32:
		if i = array.FirstNonFinite(d); i >= 0 {
			v = float64(d[i])
		}
	case []float64:
		if i = array.FirstNonFinite(d); i >= 0 {
			v = d[i]
		}
	}

	if i < 0 {
		return nil
	}
	return &NonFiniteError{Index: indexOf(i, shape), Value: v}
}
