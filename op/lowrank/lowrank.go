// Package lowrank applies a different low-rank adapter to each row of a matrix. Texts with different
// adapters can thus share a pass over a model and a single read of its weights (Chen et al., "Punica:
// Multi-Tenant LoRA Serving", 2023).
package lowrank

import (
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// An Adapter is a low-rank adapter for a linear layer. A, B and Factors have type []float32 or
// []float64, matching the layer.
type Adapter struct {
	Rank  int
	Scale float64
	A     any // [Rank, in]
	B     any // [out, Rank]

	// Factors [out] multiplies the outputs, as in DoRA. If it is nil, the outputs are not multiplied.
	Factors any
}

// A Selection assigns an adapter to each row. All ops of a graph share one Selection.
type Selection struct{ adapters []int }

// Set sets the index of the adapter for each row. Rows with a negative index, and rows beyond the end of
// the slice, use no adapter.
func (s *Selection) Set(adapters []int) { s.adapters = slices.Clone(adapters) }

// Adapters returns the index for each row, as given to Set.
func (s *Selection) Adapters() []int { return s.adapters }

// AddOp is the op that [Add] applies.
type AddOp struct {
	opbase.Base
	adapters  []*Adapter
	selection *Selection

	narrow opbase.Aux // scratch memory
}

// Add applies adapters to the output y of a linear layer with the input x:
//
//	z[r] = f ⊙ (y[r] + s·(x[r]·aᵀ)·bᵀ)
//
// s, a, b and f belong to the adapter selected for row r. x is [rows, in], and y and z are [rows, out];
// all are float32 or all are float64. Rows with a nil adapter are unchanged.
//
// The adapters must not change afterwards. The op has no gradient, and runs only on CPUs.
func Add(x, y *gorgonia.Node, adapters []*Adapter, selection *Selection) (*gorgonia.Node, error) {
	if x == nil || y == nil || selection == nil {
		return nil, errors.New("lowrank.Add: an input or the selection is nil")
	}

	dt := x.Dtype()
	if x.Dims() != 2 || y.Dims() != 2 || x.Shape()[0] != y.Shape()[0] || y.Dtype() != dt ||
		dt != tensor.Float32 && dt != tensor.Float64 {
		return nil, fmt.Errorf("lowrank.Add: x is a %v of shape %v and y a %v of shape %v, want floats of one "+
			"type with as many rows", dt, x.Shape(), y.Dtype(), y.Shape())
	}

	for i, a := range adapters {
		if a == nil {
			continue
		}
		if err := a.check(dt, x.Shape()[1], y.Shape()[1]); err != nil {
			return nil, fmt.Errorf("lowrank.Add: adapter %d: %w", i, err)
		}
	}

	o := &AddOp{adapters: slices.Clone(adapters), selection: selection}
	o.Owns(&o.narrow)

	// The address in the description distinguishes ops with the same inputs.
	opbase.Init(&o.Base, o, "AddLowRank", fmt.Sprintf("%p", o), gorgonia.Nodes{x, y}, dt, y.Shape(),
		add[float32], add[float64])
	return gorgonia.ApplyOp(o, x, y)
}

// check returns an error unless the adapter fits a layer with the given type and numbers of inputs and
// outputs.
func (a *Adapter) check(dt tensor.Dtype, in, out int) error {
	size := func(x any) int {
		switch x := x.(type) {
		case []float32:
			if dt == tensor.Float32 {
				return len(x)
			}
		case []float64:
			if dt == tensor.Float64 {
				return len(x)
			}
		}
		return -1
	}

	if a.Rank < 1 || size(a.A) != a.Rank*in || size(a.B) != out*a.Rank || a.Factors != nil && size(a.Factors) != out ||
		a.Scale-a.Scale != 0 {
		return fmt.Errorf("rank %d, scale %v, and %d, %d and %d elements of A, B and Factors do not fit a layer of %v with %d inputs and "+
			"%d outputs", a.Rank, a.Scale, size(a.A), size(a.B), size(a.Factors), dt, in, out)
	}
	return nil
}

func add[T cpu.Float](o *AddOp, z []T, args opbase.Args) error {
	x, y := opbase.Slice[T](args, 0), opbase.Slice[T](args, 1)
	rows, in, out := o.InputShape(0)[0], o.InputShape(0)[1], o.InputShape(1)[1]
	copy(z, y)

	// Apply an adapter to consecutive rows in a single product.
	selected := o.selection.adapters
	for from := 0; from < min(rows, len(selected)); {
		to := from + 1
		for to < min(rows, len(selected)) && selected[to] == selected[from] {
			to++
		}
		if k := selected[from]; k >= len(o.adapters) {
			return fmt.Errorf("row %d has adapter %d of %d", from, k, len(o.adapters))
		} else if k >= 0 && o.adapters[k] != nil {
			addRows(o, o.adapters[k], z[from*out:to*out], x[from*in:to*in], to-from, in, out)
		}
		from = to
	}

	return nil
}

// addRows applies an adapter to rows of z.
func addRows[T cpu.Float](o *AddOp, a *Adapter, z, x []T, rows, in, out int) {
	narrow := opbase.AuxSlice[T](&o.narrow, rows*a.Rank)
	gemm.Mul(false, true, rows, a.Rank, in, T(a.Scale), x, in, a.A.([]T), in, 0, narrow, a.Rank)
	gemm.Mul(false, true, rows, out, a.Rank, 1, narrow, a.Rank, a.B.([]T), a.Rank, 1, z, out)
	if a.Factors == nil {
		return
	}

	factors := a.Factors.([]T)
	for r := range rows {
		row := z[r*out:][:out]
		for i := range row {
			row[i] *= factors[i]
		}
	}
}

// DiffWRT reports that the op is not differentiable.
func (o *AddOp) DiffWRT(inputs int) []bool { return make([]bool, max(inputs, 0)) }

// SymDiff returns an error, because the op has no gradient.
func (o *AddOp) SymDiff(gorgonia.Nodes, *gorgonia.Node, *gorgonia.Node) (gorgonia.Nodes, error) {
	return nil, errors.New("lowrank.Add has no gradient: train with the adapters of one model")
}
