package lower

import (
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// Activations, their gradients and the operands of matrix products have the program's activation type.
// Weights of norms, losses, values that a forward op saves for its backward op, and gradients of
// parameters are float32, with the exception described at weightGradient.

// packed returns a result composed of several arrays.
func packed(parts ...*program.Array) *program.Array { return &program.Array{Parts: parts} }

// aux returns a float32 array that doesn't correspond to a node.
func (c *compiler) aux(shape ...int) *program.Array { return c.NewArray(gpu.Float32, shape...) }

// cast returns a call that converts a to the type of b and writes the result to b.
func (c *compiler) cast(n *gorgonia.Node, b, a *program.Array) *program.Call {
	l := elementwise.Cast{YType: b.Type, XType: a.Type, N: a.Len()}
	return newCall(c, n, &l, program.Writes(&l.Y, b), program.Reads(&l.X, a))
}

// as returns a converted to type t. The result is a itself if it has that type already, and a shared copy
// otherwise. A parameter that ranks have divided is always read from a copy.
func (c *compiler) as(n *gorgonia.Node, a *program.Array, t gpu.DType) *program.Array {
	if a.Type == t && a.Packed == nil {
		if in := c.inputOf[a.Buffer]; in != nil && in.Part != nil {
			return c.borrowedCopies(t, []*program.Array{a})[0]
		}
		return a
	}
	return c.converted(n, t, a.Shape, a)
}

// asActivation returns a converted to the activation type.
func (c *compiler) asActivation(n *gorgonia.Node, a *program.Array) *program.Array {
	return c.as(n, a, c.o.Activation)
}

// asActivations applies act to two arrays.
func (c *compiler) asActivations(n *gorgonia.Node, a, b *program.Array) (*program.Array, *program.Array) {
	return c.asActivation(n, a), c.asActivation(n, b)
}

// stack returns matrices with equal numbers of columns stacked vertically, as activations. A single
// product can then serve all matrices.
func (c *compiler) stack(n *gorgonia.Node, all ...*program.Array) *program.Array {
	rows := 0
	for _, a := range all {
		rows += a.Shape[0]
	}
	return c.converted(n, c.o.Activation, []int{rows, all[0].Shape[1]}, all...)
}

// converted returns the elements of arrays, converted to type t and concatenated. Equal conversions
// share a result, and arrays that already have the type and are contiguous, as frozen parameters in
// their owning program can be, are returned without a copy.
//
// Conversions of parameters and constants are resident, and updated along with their inputs. Other
// conversions are repeated in every run.
func (c *compiler) converted(n *gorgonia.Node, t gpu.DType, shape []int,
	all ...*program.Array) *program.Array {
	if anyPacked(all) {
		return c.widen(n, t, shape, all)
	}
	key := program.NewConversion(t, all...)
	if m, ok := c.Conversions[key]; ok {
		return m.Values.View(0, shape...)
	}
	all = c.borrowedCopies(t, all)

	var inputs []*program.Input
	kept, lies, at := true, true, all[0].At
	for _, a := range all {
		in := c.inputOf[a.Buffer]
		inputs = append(inputs, in)
		kept = kept && in != nil && c.sources[a.Buffer] != nil
		lies = lies && a.Buffer == all[0].Buffer && a.Type == t && a.At == at && a.Stride == 0
		at += a.Extent()
	}

	place := c.NewArray
	switch {
	case lies:
		return all[0].View(0, shape...)
	case kept:
		place = c.NewResident
	}

	m := place(t, shape...)
	if kept {
		c.sources[m.Buffer] = inputs
	}

	at = 0
	for i, a := range all {
		to := m.View(at, a.Shape...)
		at += a.Len()
		if kept {
			inputs[i].Copies = append(inputs[i].Copies,
				program.Copy{Array: to, Convert: c.cast(n, to, a)})
			continue
		}
		if len(all) > 1 { // another node may need the array by itself
			a = c.as(n, a, t)
		}
		c.Add(c.cast(n, to, a))
	}

	c.Conversions[key] = program.Quantized{Values: m}
	return m
}

// borrowedCopies returns the given arrays, but replaces each array that holds a parameter of another program by that
// program's copy of type t, if there is one. When ranks divide a parameter, only such a copy holds all of it.
func (c *compiler) borrowedCopies(t gpu.DType, all []*program.Array) []*program.Array {
	all = slices.Clone(all)
	for i, a := range all {
		in := c.inputOf[a.Buffer]
		if in == nil || !slices.Contains(c.Borrowed, in) || a.At != 0 || a.Len() != in.Array.Len() {
			continue
		}
		for _, copied := range in.Copies {
			if copied.Type == t && copied.At%program.VectorBytes == 0 {
				all[i] = copied.View(0, a.Shape...)
				break
			}
		}
	}
	return all
}

// aligned returns a, or a copy if a's address lacks the alignment that optimizers require.
func (c *compiler) aligned(n *gorgonia.Node, a *program.Array) *program.Array {
	if a.At%program.VectorBytes == 0 {
		return a
	}
	b := c.Like(a)
	c.Add(c.cast(n, b, a))
	return b
}

// typeOf returns the device type for values of a Gorgonia type.
func typeOf(dt tensor.Dtype) gpu.DType {
	if dt == tensor.Int {
		return gpu.Int64
	}
	return gpu.Float32
}

// Gradients stored with less precision than float32: see WithGradientPrecision.

// updateOnly returns the gradients of parameters that only an update after the last run reads.
func (o Options) updateOnly() map[*gorgonia.Node]bool {
	all := map[*gorgonia.Node]bool{}
	for _, p := range o.Params {
		if d := p.Deriv(); d != nil && !o.Accumulate && !slices.Contains(o.Outputs, d) {
			all[d] = true
		}
	}
	return all
}

// weightGradient returns a new array for the gradients of the given nodes, computed by a single product.
// Its type is the configured gradient type if only an update reads the gradients, and otherwise float32.
func (c *compiler) weightGradient(shape []int, parts ...*gorgonia.Node) *program.Array {
	e := c.o.Gradient
	for _, p := range parts {
		if !c.updateOnly[p] || len(c.users[p]) > 0 {
			e = gpu.Float32
		}
	}
	return c.NewArray(e, shape...)
}
