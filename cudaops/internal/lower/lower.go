package lower

import (
	"fmt"
	"reflect"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

func init() {
	register[*opbase.PartOp](lowerPart, linearIn(0))
}

// A lowering adds the calls that compute node n from the values of its inputs, and returns the node's
// value.
type lowering func(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array

// ownOp describes how to compile one of this module's ops.
type ownOp struct {
	lower  lowering
	scaled linearity // nil if the op is not linear in any input
}

// ownOps maps the types of this module's ops to their descriptions.
var ownOps = map[reflect.Type]ownOp{}

// register adds an op to ownOps. Each file of this package registers the ops that it lowers. An op and
// its gradient are lowered in the same file, since the gradient uses data that the op saves on the
// device.
func register[O gorgonia.Op](lower lowering, scaled linearity) {
	ownOps[reflect.TypeFor[O]()] = ownOp{lower, scaled}
}

// loweringOf returns the lowering of a node to kernels, or nil if no kernel supports the node.
func loweringOf(n *gorgonia.Node) lowering {
	if find := stockOps[graph.OpType(n)].find; find != nil {
		return find(n)
	}
	return ownOps[reflect.TypeOf(n.Op())].lower
}

// hasKernel reports whether kernels compute a node. That requires a lowering, and for Gorgonia's ops also
// that no rule requests the host.
func (c *compiler) hasKernel(n *gorgonia.Node) bool {
	_, own := ownOps[reflect.TypeOf(n.Op())]
	return own || loweringOf(n) != nil && !c.o.OnHost(fmt.Sprint(n.Op()))
}

// lower adds the calls of a node.
func (c *compiler) lower(n *gorgonia.Node) {
	err := graph.HasValue(n)
	if err == nil && n.Dtype() != tensor.Float32 && n.Dtype() != tensor.Int {
		err = fmt.Errorf("it is of type %v; on the GPU a graph's floats are float32, and its "+
			"integers int", n.Dtype())
	}

	if c.fail(err); err != nil {
		return
	}

	if len(graph.Children(n)) == 0 && n.Op() == nil || n.Value() != nil && graph.IsConstant(n) {
		c.input(n)
		return
	}

	f := lowerOnHost
	if c.hasKernel(n) {
		f = loweringOf(n)
	}

	var in []*program.Array
	for i := range graph.Children(n) {
		in = append(in, c.operandOf(n, i))
	}

	if out := f(c, n, in); c.Values[n] == nil { // otherwise it was fused into another value
		c.Values[n] = out
	}
}

// input allocates device memory for a node that receives its value from the host.
func (c *compiler) input(n *gorgonia.Node) {
	if c.packedInput(n) {
		return
	}
	if shared := c.o.sharedParam(n); shared != nil {
		c.Values[n] = shared.Array
		c.inputOf[shared.Array.Buffer] = shared
		c.Borrowed = append(c.Borrowed, shared)
		return
	}

	a := c.NewResident(typeOf(n.Dtype()), n.Shape()...)
	c.Values[n] = a
	in := &program.Input{Node: n, Array: a, Constant: graph.IsConstant(n) ||
		slices.Contains(c.o.Params, n), Frozen: slices.Contains(c.o.Frozen, n)}
	c.Inputs = append(c.Inputs, in)
	c.inputOf[a.Buffer] = in
	if in.Constant {
		c.sources[a.Buffer] = []*program.Input{in}
	}
}

// lowerPart returns a view of one of the tensors of a packed result.
func lowerPart(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	offset := n.Op().(*opbase.PartOp).Offset
	if len(in[0].Parts) == 0 {
		return c.aligned(n, in[0].View(offset, n.Shape()...))
	}
	i := 0
	for ; offset > 0; i++ {
		offset -= in[0].Parts[i].Len()
	}
	return in[0].Parts[i]
}

// lowerOnHost lowers a node to a computation on the host by its op's Do method. The op receives gradients
// without the loss scale.
func lowerOnHost(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	why := "a rule requires this"
	if loweringOf(n) == nil {
		why = fmt.Sprintf("there is no kernel for %T", n.Op())
	}

	if c.o.Strict {
		c.fail(fmt.Errorf("%s, and WithStrict forbids computing it on the host", why))
		return nil
	}

	c.o.Warn(fmt.Sprintf("%v: %s: it is computed on the host, which waits for the device and "+
		"copies %d values there and back", n.Op(), why, len(graph.Children(n))))
	out := c.NewArray(typeOf(n.Dtype()), n.Shape()...)
	args := []program.Arg{program.Writes(program.NoField, out)}
	for _, a := range in {
		args = append(args, program.Reads(program.NoField, a))
	}

	addCall(c, n, &program.HostOp{Node: n, In: in, Out: out}, args...)
	return out
}
