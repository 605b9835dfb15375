package autodiff

import (
	"fmt"
	"math"
	"strings"
	"text/tabwriter"

	"gorgonia.org/tensor"
)

// CheckReport is the result of [CheckGradients].
type CheckReport struct {
	Cost        float64 // at the point where gradients were checked
	Inputs      []InputReport
	Evaluations int // number of forward runs for the differences
}

// InputReport is the part of a [CheckReport] about one input.
type InputReport struct {
	Name     string
	Shape    tensor.Shape
	Floor    float64 // minimum denominator of the relative error; see [CheckGradients]
	Elements []Element
}

// Element compares the analytic and the numeric value of one derivative. Index holds one entry per
// input dimension. It is nil for a scalar and for the derivative along a random direction, for which
// Direction is true.
type Element struct {
	Index             []int
	Direction         bool
	Analytic, Numeric float64
	RelError          float64
	Spread            float64 // estimated error of the numeric derivative
}

// At describes the position of the element: an index such as "[2 0]", "scalar" or "random
// direction".
func (e Element) At() string {
	switch {
	case e.Direction:
		return "random direction"
	case len(e.Index) == 0:
		return "scalar"
	}
	return fmt.Sprint(e.Index)
}

// Worst returns the element with the largest relative error, or the zero Element if none was
// checked.
func (r InputReport) Worst() Element {
	var worst Element
	for i, e := range r.Elements {
		if i == 0 || e.RelError > worst.RelError {
			worst = e
		}
	}
	return worst
}

// MaxRelError returns the largest relative error among the input's elements.
func (r InputReport) MaxRelError() float64 { return r.Worst().RelError }

// Worst returns the input with the largest relative error, and its worst element.
func (r CheckReport) Worst() (InputReport, Element) {
	var input InputReport
	var worst Element
	for i, in := range r.Inputs {
		if e := in.Worst(); i == 0 || e.RelError > worst.RelError {
			input, worst = in, e
		}
	}
	return input, worst
}

// MaxRelError returns the largest relative error of all elements.
func (r CheckReport) MaxRelError() float64 {
	_, worst := r.Worst()
	return worst.RelError
}

// Checked returns the number of derivatives that were compared.
func (r CheckReport) Checked() int {
	n := 0
	for _, in := range r.Inputs {
		n += len(in.Elements)
	}
	return n
}

// OK reports whether at least one derivative was checked and all relative errors are below tol.
func (r CheckReport) OK(tol float64) bool { return r.Checked() > 0 && r.MaxRelError() < tol }

// String returns a table with a row for each input that shows its worst element.
func (r CheckReport) String() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "input\tshape\tchecked\tmax rel. error\tat\tanalytic\tnumeric")
	for _, in := range r.Inputs {
		e := in.Worst()
		fmt.Fprintf(w, "%s\t%v\t%d\t%.2e\t%s\t%.9g\t%.9g\n",
			in.Name, in.Shape, len(in.Elements), e.RelError, e.At(), e.Analytic, e.Numeric)
	}
	w.Flush()
	return b.String()
}

// relativeError returns |a−n| / max(|a|, |n|, floor), or infinity if the quotient is NaN.
func relativeError(a, n, floor float64) float64 {
	if a == n {
		return 0
	}
	e := math.Abs(a-n) / math.Max(floor, math.Max(math.Abs(a), math.Abs(n)))
	if math.IsNaN(e) {
		return math.Inf(1)
	}
	return e
}
