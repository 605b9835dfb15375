package lower

import (
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// Activations, their gradients and the operands of matrix products are of the program's activation
// type. Weights of norms, losses, what a forward op leaves for its backward op, and gradients of
// parameters are float32, but for what weightGradient is for.

// packed is a result that consists of several arrays.
func packed(parts ...*program.Array) *program.Array { return &program.Array{Parts: parts} }

// aux is float32 memory that no node stands for.
func (c *compiler) aux(shape ...int) *program.Array { return c.NewArray(gpu.Float32, shape...) }

// cast is the call that writes b, a's values in another type.
func (c *compiler) cast(n *gorgonia.Node, b, a *program.Array) *program.Call {
	l := elementwise.Cast{YType: b.Type, XType: a.Type, N: a.Len()}
	return newCall(c, n, &l, program.Writes(&l.Y, b), program.Reads(&l.X, a))
}

// as returns a's values in another type: a itself, or a copy that is made once.
func (c *compiler) as(n *gorgonia.Node, a *program.Array, t gpu.DType) *program.Array {
	if a.Type == t {
		return a
	}
	return c.made(n, t, a.Shape, a)
}

// act returns a's values as activations.
func (c *compiler) act(n *gorgonia.Node, a *program.Array) *program.Array {
	return c.as(n, a, c.o.Activation)
}

// acts is act of two.
func (c *compiler) acts(n *gorgonia.Node, a, b *program.Array) (*program.Array, *program.Array) {
	return c.act(n, a), c.act(n, b)
}

// stack returns matrices of as many columns as activations, one above the other, so that one
// product serves all.
func (c *compiler) stack(n *gorgonia.Node, all ...*program.Array) *program.Array {
	rows := 0
	for _, a := range all {
		rows += a.Shape[0]
	}
	return c.made(n, c.o.Activation, []int{rows, all[0].Shape[1]}, all...)
}

// made returns what arrays hold in a type, one behind the other. It is made once, unless they lie so
// already, as frozen parameters of the program that owns them may. Of parameters it is kept beside
// them and renewed with them; of others it is made in every run.
func (c *compiler) made(n *gorgonia.Node, t gpu.DType, shape []int,
	all ...*program.Array) *program.Array {
	key := program.NewMaking(t, all...)
	if m, ok := c.Made[key]; ok {
		return m.Values.View(0, shape...)
	}

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
				program.Copy{Array: to, Renew: c.cast(n, to, a)})
			continue
		}
		if len(all) > 1 { // others may take it alone
			a = c.as(n, a, t)
		}
		c.Add(c.cast(n, to, a))
	}

	c.Made[key] = program.Quantized{Values: m}
	return m
}

// aligned returns a, or a copy of it where it begins at an address that optimisers do not take.
func (c *compiler) aligned(n *gorgonia.Node, a *program.Array) *program.Array {
	if a.At%program.VectorBytes == 0 {
		return a
	}
	b := c.Like(a)
	c.Add(c.cast(n, b, a))
	return b
}

// typeOf is how values of a Gorgonia type are stored.
func typeOf(dt tensor.Dtype) gpu.DType {
	if dt == tensor.Int {
		return gpu.Int64
	}
	return gpu.Float32
}

// Gradients that are kept in fewer digits than float32: WithGradientPrecision.

// updating returns the gradients of parameters that nobody asks for but an update of their last
// run's.
func (o Options) updating() map[*gorgonia.Node]bool {
	all := map[*gorgonia.Node]bool{}
	for _, p := range o.Params {
		if d := p.Deriv(); d != nil && !o.Accumulate && !slices.Contains(o.Outputs, d) {
			all[d] = true
		}
	}
	return all
}

// weightGradient is a new array for the gradient of weights, which one product forms: the values of
// the given nodes. It is of the type that the machine has for such gradients if only an update
// reads them, and float32 otherwise.
func (c *compiler) weightGradient(shape []int, parts ...*gorgonia.Node) *program.Array {
	e := c.o.Gradient
	for _, p := range parts {
		if !c.updating[p] || len(c.users[p]) > 0 {
			e = gpu.Float32
		}
	}
	return c.NewArray(e, shape...)
}
