package cudaops

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// singleOp computes an op of a graph that another machine runs, on memory of that machine's. The op
// is a graph of its own, with a Machine. The other machine is Gorgonia's, with its build tag cuda;
// this file needs no tag, so that its tests need none. Operands are copied on the device, since the
// other machine's memory moves from run to run and begins anywhere. What is captured, and the
// matrix products' plans, go by fixed and aligned addresses.
type singleOp struct {
	m   *Machine
	in  []*program.Input // nil where the op does not read the operand
	out []*program.Array // the result, in the parts that it packs
}

// newSingleOp makes a machine for an op with operands like those that are given.
func newSingleOp[V interface {
	Dtype() tensor.Dtype
	Shape() tensor.Shape
}](d *Device, o gorgonia.Op, operands []V) (*singleOp, error) {
	g := gorgonia.NewGraph()
	in := make(gorgonia.Nodes, len(operands))
	for i, v := range operands {
		name, shape := gorgonia.WithName(fmt.Sprintf("operand %d", i)), v.Shape().Clone()
		if len(shape) == 0 {
			in[i] = gorgonia.NewScalar(g, v.Dtype(), name)
		} else {
			in[i] = gorgonia.NewTensor(g, v.Dtype(), len(shape), gorgonia.WithShape(shape...), name)
		}
	}

	children := append(gorgonia.Nodes{}, in...)
	if f := forwardOf(o); f != nil {
		// The backward op reads what the forward op leaves on the device, where the other machine
		// has no place for it. So it is computed again, and its result stands for the operand that
		// is the same.
		y, err := gorgonia.ApplyOp(f, in[:f.Arity()]...)
		if err != nil {
			return nil, err
		}
		children[f.Arity()] = y
	}

	result, err := gorgonia.ApplyOp(o, children...)
	if err != nil {
		return nil, err
	}

	if d.workspace == 0 { // cuBLASLt's, of all such machines: they run one after the other
		if d.workspace, err = d.ctx.Alloc(run.WorkspaceBytes); err != nil {
			return nil, err
		}
	}

	m, err := NewMachine(d, g, setting(func(c *machineConfig) { c.single = true }))
	if err != nil {
		return nil, err
	}

	l := &singleOp{m: m, in: make([]*program.Input, len(in)),
		out: []*program.Array{m.runner.Program.Values[result]}}
	if parts := l.out[0].Parts; len(parts) > 0 {
		l.out = parts
	}

	for _, input := range m.runner.Program.Inputs {
		input.Bound = true
		if i := slices.Index(in, input.Node); i >= 0 {
			l.in[i] = input
		}
	}

	return l, nil
}

// forwardOf returns the forward op whose record a backward op reads on the device, or nil if the
// backward op reads none.
func forwardOf(o gorgonia.Op) gorgonia.Op {
	b, ok := o.(interface{ Shared() *opbase.Base })
	if !ok {
		return nil
	}
	forward := b.Shared().Forward()
	if forward == nil || len(forward.Aux()) == 0 {
		return nil
	}
	return forward.Op()
}

// run computes the op from operands at the given addresses, whose work must be done, and waits for
// the result.
func (l *singleOp) run(operands []gpu.Ptr, result gpu.Ptr) error {
	m := l.m
	ctx, s := m.device.ctx, m.runner.Stream
	for i, in := range l.in {
		if in == nil {
			continue
		}
		if err := ctx.CopyOnDevice(in.Array.Ptr(), operands[i], in.Array.Extent(), s); err != nil {
			return err
		}
		if err := m.runner.Inputs.CheckIDs(in); err != nil {
			return err
		}
	}

	if err := m.RunAll(); err != nil {
		return err
	}

	for _, part := range l.out {
		if err := ctx.CopyOnDevice(result, part.Ptr(), part.Extent(), s); err != nil {
			return err
		}
		result = result.Offset(part.Extent())
	}

	if err := ctx.SyncStream(s); err != nil {
		return err
	}

	return m.layers.Settle()
}
