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

// singleOp computes a single op of a graph that another machine runs, on that machine's memory. It wraps
// the op in a separate graph and Machine.
//
// The other machine is Gorgonia's, which needs the build tag cuda. This file has no build tag, so that
// its tests run without the tag.
//
// Operands are copied on the device, because the other machine's memory moves between runs and may be
// unaligned. Captured work and plans of matrix products need fixed, aligned addresses.
type singleOp struct {
	m   *Machine
	in  []*program.Input // nil for an operand that the op does not read
	out []*program.Array // the result, as the parts that it consists of
}

// newSingleOp makes a singleOp for operands of the given types and shapes.
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
		// The backward op reads a record that the forward op stores on the device. The other machine has
		// no place for such a record, so this graph computes the forward op again. Its result replaces
		// the operand with the same value.
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

	// All single ops share cuBLASLt's workspace because they run one after the other.
	if d.workspace == 0 {
		if d.workspace, err = d.ctx.Alloc(run.WorkspaceBytes); err != nil {
			return nil, err
		}
	}

	m, err := NewMachine(d, g, WithOutputs(result), setting(func(c *machineConfig) { c.single = true }))
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

// forwardOf returns the forward op that stores the record read by a backward op, or nil if the backward
// op reads no record.
func forwardOf(o gorgonia.Op) gorgonia.Op {
	b, ok := o.(interface{ Shared() *opbase.Base })
	if !ok {
		return nil
	}
	forward := b.Shared().Forward()
	// A backward op that reads a record also takes the forward op's result, before the gradient.
	if forward == nil || len(forward.Aux()) == 0 || b.Shared().Arity() != forward.Arity()+2 {
		return nil
	}
	return forward.Op()
}

// run computes the op on operands at the given addresses and waits for the result. The work that produces
// the operands must be complete.
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

	return run.Joined(m.layers.Flush(), m.meters.read())
}
