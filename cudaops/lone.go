package cudaops

import (
	"errors"
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/op"
)

// loneOps computes single ops of a graph that another machine runs, on memory of that machine's: each op is a graph of its
// own, with a Machine. The other machine is Gorgonia's, with its build tag cuda; this file needs no tag, so that its tests need
// none. Operands are copied on the device, since the other machine's memory moves from run to run and begins anywhere, while
// what is captured, and the matrix products' plans, go by fixed and aligned addresses.
type loneOps struct {
	device    *Device
	kernels   func(gpu.Context) (kernelSet, error)
	shared    kernelSet // of all machines
	workspace gpu.Ptr   // cuBLASLt's, of all machines: they run one after the other
}

// loneOperand is the type and shape of a value.
type loneOperand struct {
	dt    tensor.Dtype
	shape tensor.Shape
}

// sharedKernels is a kernelSet that its user does not close.
type sharedKernels struct{ kernelSet }

func (sharedKernels) Close() error { return nil }

func newLoneOps(d *Device, kernels func(gpu.Context) (kernelSet, error)) (_ *loneOps, err error) {
	s := &loneOps{device: d, kernels: kernels}
	if s.shared, err = kernels(d.ctx); err != nil {
		return nil, err
	}
	if s.workspace, err = d.ctx.Alloc(workspaceBytes); err != nil {
		return nil, errors.Join(err, s.shared.Close())
	}
	return s, nil
}

// close gives back what the ops have shared. They must have been closed.
func (s *loneOps) close() error {
	return errors.Join(s.device.ctx.Free(s.workspace), s.shared.Close())
}

// loneOp is one of them.
type loneOp struct {
	m   *Machine
	in  []*input // nil where the op does not read the operand
	out []*array // the result, in the parts that it packs
}

// open makes a machine for an op with the given operands.
func (s *loneOps) open(o gorgonia.Op, operands []loneOperand) (*loneOp, error) {
	g := gorgonia.NewGraph()
	in := make(gorgonia.Nodes, len(operands))
	for i, t := range operands {
		name := gorgonia.WithName(fmt.Sprintf("operand %d", i))
		if len(t.shape) == 0 {
			in[i] = gorgonia.NewScalar(g, t.dt, name)
		} else {
			in[i] = gorgonia.NewTensor(g, t.dt, len(t.shape), gorgonia.WithShape(t.shape...), name)
		}
	}
	children := append(gorgonia.Nodes{}, in...)
	if f := forwardOf(o); f != nil {
		// The backward op reads what the forward op leaves on the device, where the other machine has no place for it. So it
		// is computed again, and its result stands for the operand that is the same.
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
	m, err := NewMachine(s.device, g, func(c *machineConfig) error {
		c.lone, c.kernels = s, func(gpu.Context) (kernelSet, error) { return sharedKernels{s.shared}, nil }
		return nil
	})
	if err != nil {
		return nil, err
	}
	l := &loneOp{m: m, in: make([]*input, len(in)), out: []*array{m.program.values[result]}}
	if parts := l.out[0].parts; len(parts) > 0 {
		l.out = parts
	}
	for _, input := range m.program.inputs {
		input.bound = true
		for i, n := range in {
			if n == input.node {
				l.in[i] = input
			}
		}
	}
	return l, nil
}

// forwardOf returns the forward op whose record a backward op reads on the device, nil if it needs none.
func forwardOf(o gorgonia.Op) gorgonia.Op {
	switch o := o.(type) {
	case *op.RMSNormGradOp:
		return o.Forward
	case *op.AttentionGradOp:
		return o.Forward
	case *op.SiLUMLPGradOp:
		return o.Forward
	case *op.CrossEntropyGradOp:
		return o.Forward
	case *op.LinearCrossEntropyGradOp:
		return o.Forward
	}
	return nil
}

// run computes the op from operands at the given addresses, whose work must be done, and waits for the result.
func (l *loneOp) run(operands []gpu.Ptr, result gpu.Ptr) error {
	m := l.m
	ctx := m.device.ctx
	for i, in := range l.in {
		if in == nil {
			continue
		}
		if err := ctx.CopyOnDevice(in.array.ptr(), operands[i], in.array.extent(), m.stream); err != nil {
			return err
		}
		if err := l.check(in); err != nil {
			return err
		}
	}
	if err := m.run(); err != nil {
		return err
	}
	for _, part := range l.out {
		if err := ctx.CopyOnDevice(result, part.ptr(), part.extent(), m.stream); err != nil {
			return err
		}
		result = result.Offset(part.extent())
	}
	if err := ctx.SyncStream(m.stream); err != nil {
		return err
	}
	return m.settle()
}

// check reads ids back, and says of them what the op would say on the CPU.
func (l *loneOp) check(in *input) error {
	if len(in.ids) == 0 {
		return nil
	}
	ids := in.staging[:in.array.extent()]
	ctx, stream := l.m.device.ctx, l.m.stream
	if err := errors.Join(ctx.CopyToHost(ids, in.array.ptr(), stream), ctx.SyncStream(stream)); err != nil {
		return err
	}
	for _, r := range in.ids {
		if err := r.check(gpu.View[int64](ids)[:in.array.len()]); err != nil {
			return err
		}
	}
	return nil
}

func (l *loneOp) close() error { return l.m.Close() }
