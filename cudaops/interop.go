package cudaops

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
)

// Other CUDA libraries in the same process take part through plain handles. These are a CUcontext,
// a CUstream and a CUdeviceptr, each as the number that it is in C. The package cuinterop gives
// them the types of gorgonia.org/cu.

// WithContext makes Open use a context that the program made elsewhere, and with it that context's
// GPU, whatever [WithOrdinal] says: handle is a CUcontext. [Device.Close] leaves it alone; it must
// outlive the Device, and whoever made it destroys it.
//
// The package makes the context current on the calling thread for the length of each call, and
// leaves it so. A goroutine that locked its thread to work in another context must make that one
// current again after calling into this package.
func WithContext(handle uintptr) DeviceOption {
	return func(o *deviceOptions) { o.adopt, o.context = true, handle }
}

// Context is the CUcontext in which the device's work is done, for other libraries to share. It is
// valid until Close.
func (d *Device) Context() uintptr {
	if d.ctx == nil {
		return 0
	}
	return d.ctx.Handle()
}

// Do runs f on a thread on which the device's context is current. That is for other libraries that
// work in the current context, as NCCL does (package comm/nccl).
func (d *Device) Do(f func() error) error {
	if d.ctx == nil {
		return fmt.Errorf("cudaops.Device.Do: %w", errNotOpened)
	}
	return d.ctx.Do(f)
}

// WithStream makes a machine put all its work on a stream that the program made elsewhere, in the
// device's context: handle is a CUstream. What was put there before a run is done before it, and
// what is put there after it sees its results. It must not be one of the default streams, whose
// work cannot be captured. The machine does not destroy it; it must outlive the machine.
func WithStream(handle uintptr) MachineOption {
	return func(c *machineConfig) error {
		const perThread = 2 // CU_STREAM_PER_THREAD; 0 and 1 are the stream that all threads share
		if handle <= perThread {
			return fmt.Errorf("WithStream: got %d, a default stream, whose work cannot be "+
				"captured; make one with cuStreamCreate", handle)
		}
		c.stream = gpu.Stream(handle)
		return nil
	}
}

// Stream is the CUstream that the machine's work is on. Another library that uses the machine's
// memory must order its work by it: on the stream itself, with an event, or by waiting. It is valid
// until Close, if the machine made it.
func (m *Machine) Stream() uintptr {
	if m.runner == nil {
		return 0
	}
	return uintptr(m.runner.Stream)
}

// Address is the CUdeviceptr at which a node's value lies, and the bytes it takes. Elements are
// float32 and bfloat16 as the machine's [Precision] and [WithGradientPrecision] have it, integers
// int64, in row-major order. The node must be one that [Machine.Value] takes. The memory remains
// the machine's. It is valid until Close, or the next [Machine.Bind] of the node. It holds what the
// last run left once the machine's stream has come to its end. With [Float16], gradients lie there
// multiplied by the loss scale.
func (m *Machine) Address(n *gorgonia.Node) (ptr uintptr, bytes int, err error) {
	defer in("Address", &err)
	if err = usable(m); err != nil {
		return
	}
	a, err := m.whole(n)
	if err != nil {
		return 0, 0, err
	}
	return uintptr(a.Ptr()), a.Extent(), nil
}

// whole is the memory of a node whose value outlives a run, and is here as a whole.
func (m *Machine) whole(n *gorgonia.Node) (*program.Array, error) {
	a, err := lasting(m, n)
	if err != nil {
		return nil, err
	}
	if in := m.inputs.Of(n); in != nil && in.Part != nil {
		return nil, fmt.Errorf("%s is divided among ranks (WithRanks): its values have no one "+
			"address", graph.Describe(n))
	}
	return a, nil
}

// Bind makes a node's value lie in device memory that the program holds, from the next run on. The
// address ptr is a CUdeviceptr that is a multiple of 256, as cuMemAlloc's are. The bytes must be
// what [Machine.Address] says the value takes. The node is
//
//   - an input: runs read the memory as it is then, and no longer the value that gorgonia.Let gave the node;
//   - a parameter: the same, and [Machine.Update] writes it, so it must hold the parameter's value before the next run.
//     Bind comes before [Machine.SetOptimizer], and before another machine shares the parameter;
//   - an output, which must be one that has memory of its own: runs write it.
//
// Nothing is copied. The memory remains the caller's, who frees it, after Close or after binding
// the node to other memory. It must be accessible in the device's context, and is used on the
// machine's stream. An input that holds integers cannot be bound: the machine checks them before it
// sends them.
func (m *Machine) Bind(n *gorgonia.Node, ptr uintptr, bytes int) (err error) {
	defer in("Bind", &err)
	if err = usable(m); err != nil {
		return
	}
	a, err := m.whole(n)
	if err != nil {
		return err
	}
	switch {
	case ptr == 0 || ptr%program.Alignment != 0:
		return fmt.Errorf("%s: got the address %#x, want a multiple of %d", graph.Describe(n),
			uint64(ptr), program.Alignment)
	case bytes != a.Extent():
		return fmt.Errorf("%s: got %d bytes, want %d: %d elements of %v", graph.Describe(n), bytes,
			a.Extent(), a.Len(), a.Type)
	}
	i := slices.IndexFunc(m.inputs.All, func(i *program.Input) bool {
		return i.Array.Buffer == a.Buffer
	})
	if i < 0 {
		if err := canBindOutput(m, n, a); err != nil {
			return err
		}
		return moveBuffer(m, a.Buffer, gpu.Ptr(ptr))
	}
	input := m.inputs.All[i]
	if err := canBindInput(m, n, input); err != nil {
		return err
	}
	if err := moveBuffer(m, a.Buffer, gpu.Ptr(ptr)); err != nil {
		return err
	}
	m.inputs.Bind(input)
	return nil
}

// canBindInput returns why an input, of which node n is, cannot lie elsewhere.
func canBindInput(m *Machine, n *gorgonia.Node, i *program.Input) error {
	switch {
	case i.Node != n:
		return fmt.Errorf("%s is part of %s: bind that", graph.Describe(n), graph.Describe(i.Node))
	case n.Op() != nil:
		return fmt.Errorf("%s is a constant", graph.Describe(n))
	case len(i.IDs) > 0:
		return fmt.Errorf("%s holds %s of %s, which are checked before they are sent: give it a "+
			"value with gorgonia.Let",
			graph.Describe(n), i.IDs[0].Argument, i.IDs[0].Op)
	case m.inputs.Shared(i):
		return fmt.Errorf("%s: another machine uses its memory, see WithParamsOf",
			graph.Describe(n))
	case i.Constant && m.optimizer != nil:
		return fmt.Errorf("%s is a parameter that an optimiser updates: bind it before "+
			"SetOptimizer", graph.Describe(n))
	}
	return nil
}

// canBindOutput returns why an output cannot lie elsewhere.
func canBindOutput(m *Machine, n *gorgonia.Node, a *program.Array) error {
	switch {
	case m.config.share != nil && a.Resident:
		return fmt.Errorf("%s belongs to the machine that WithParamsOf names", graph.Describe(n))
	case a.Resident, a.At != 0, a.Extent() != a.Buffer.Bytes:
		return fmt.Errorf("%s has no memory of its own, it is part of another value: copy it "+
			"from its Address", graph.Describe(n))
	case m.optimizer != nil && slices.ContainsFunc(m.config.Params, func(p *gorgonia.Node) bool {
		return p.Deriv() == n
	}):
		return fmt.Errorf("%s is a gradient that an optimiser reads: bind it before SetOptimizer",
			graph.Describe(n))
	}
	return nil
}

// moveBuffer puts a buffer elsewhere, and gives back what the machine has allocated for it alone.
func moveBuffer(m *Machine, b *program.Buffer, to gpu.Ptr) error {
	if b.Base == to {
		return nil
	}
	if err := m.device.ctx.SyncStream(m.runner.Stream); err != nil {
		return err
	}
	if err := m.runner.Forget(); err != nil {
		return err
	}
	old := b.Base
	b.Base = to
	if b.Resident && m.memory.Owns(old) {
		return m.memory.Free(old)
	}
	return nil
}
