package cudaops

import (
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Other CUDA libraries in the same process take part through plain handles: a CUcontext, a CUstream and a CUdeviceptr, each
// as the number that it is in C. The package cuinterop gives them the types of gorgonia.org/cu.

// WithContext makes Open use a context that the program made elsewhere, and with it that context's GPU, whatever
// [WithOrdinal] says: handle is a CUcontext. [Device.Close] leaves it alone; it must outlive the Device, and whoever made it
// destroys it.
//
// The package makes the context current on the calling thread for the length of each call, and leaves it so. A goroutine
// that locked its thread to work in another context must make that one current again after calling into this package.
func WithContext(handle uintptr) DeviceOption {
	return func(o *deviceOptions) { o.adopt, o.context = true, handle }
}

// Context is the CUcontext in which the device's work is done, for other libraries to share. It is valid until Close.
func (d *Device) Context() uintptr {
	if d.ctx == nil {
		return 0
	}
	return d.ctx.Handle()
}

// WithStream makes a machine put all its work on a stream that the program made elsewhere, in the device's context: handle
// is a CUstream. What was put there before a run is done before it, and what is put there after it sees its results. It
// must not be one of the default streams, whose work cannot be captured. The machine does not destroy it; it must outlive
// the machine.
func WithStream(handle uintptr) MachineOption {
	return func(c *machineConfig) error {
		const perThread = 2 // CU_STREAM_PER_THREAD; 0 and 1 are the stream that all threads share
		if handle <= perThread {
			return fmt.Errorf("WithStream: got %d, a default stream, whose work cannot be captured; make one with cuStreamCreate", handle)
		}
		c.stream = gpu.Stream(handle)
		return nil
	}
}

// Stream is the CUstream that the machine's work is on. Another library that uses the machine's memory must order its work
// by it: on the stream itself, with an event, or by waiting. It is valid until Close, if the machine made it.
func (m *Machine) Stream() uintptr { return uintptr(m.stream) }

// Address is the CUdeviceptr at which a node's value lies, and the bytes it takes: float32 and bfloat16 as the machine's
// [Precision] and [WithGradientPrecision] have it, integers as int64, in row-major order. The node must be one that
// [Machine.Value] takes. The memory remains the machine's. It is valid until Close, or the next [Machine.Bind] of the node, and
// holds what the last run left once the machine's stream has come to its end. With [Float16], gradients lie there multiplied by
// the loss scale.
func (m *Machine) Address(n *gorgonia.Node) (ptr uintptr, bytes int, err error) {
	a, err := m.lasting(n)
	if err != nil {
		return 0, 0, fmt.Errorf("cudaops.Machine.Address: %w", err)
	}
	return uintptr(a.ptr()), a.extent(), nil
}

// Bind makes a node's value lie in device memory that the program holds, from the next run on: ptr is a CUdeviceptr that is
// a multiple of 256, as cuMemAlloc's are, and bytes must be what [Machine.Address] says the value takes. The node is
//
//   - an input: runs read the memory as it is then, and no longer the value that gorgonia.Let gave the node;
//   - a parameter: the same, and [Machine.Update] writes it, so it must hold the parameter's value before the next run.
//     Bind comes before [Machine.SetOptimizer], and before another machine shares the parameter;
//   - an output, which must be one that has memory of its own: runs write it.
//
// Nothing is copied. The memory remains the caller's, who frees it, after Close or after binding the node to other memory.
// It must be accessible in the device's context, and is used on the machine's stream. An input that holds integers cannot be
// bound: the machine checks them before it sends them.
func (m *Machine) Bind(n *gorgonia.Node, ptr uintptr, bytes int) error {
	if err := m.bind(n, gpu.Ptr(ptr), bytes); err != nil {
		return fmt.Errorf("cudaops.Machine.Bind: %w", err)
	}
	return nil
}

func (m *Machine) bind(n *gorgonia.Node, ptr gpu.Ptr, bytes int) error {
	a, err := m.lasting(n)
	if err != nil {
		return err
	}
	size := a.extent()
	switch {
	case ptr == 0 || ptr%alignment != 0:
		return fmt.Errorf("%s: got the address %#x, want a multiple of %d", describe(n), uint64(ptr), alignment)
	case bytes != size:
		return fmt.Errorf("%s: got %d bytes, want %d: %d elements of %v", describe(n), bytes, size, a.len(), a.elem)
	}
	i := slices.IndexFunc(m.program.inputs, func(in *input) bool { return in.array.block == a.block })
	if i < 0 {
		return m.bindOutput(n, a, ptr)
	}
	in := m.program.inputs[i]
	switch {
	case in.node != n:
		return fmt.Errorf("%s is part of %s: bind that", describe(n), describe(in.node))
	case n.Op() != nil:
		return fmt.Errorf("%s is a constant", describe(n))
	case len(in.ids) > 0:
		return fmt.Errorf("%s holds %s of %s, which are checked before they are sent: give it a value with gorgonia.Let",
			describe(n), in.ids[0].argument, in.ids[0].op)
	case in.sharers > 0:
		return fmt.Errorf("%s: another machine uses its memory, see WithParamsOf", describe(n))
	case in.constant && m.optimizer != nil:
		return fmt.Errorf("%s is a parameter that an optimiser updates: bind it before SetOptimizer", describe(n))
	}
	return m.move(a.block, ptr, func() { in.bound = true })
}

func (m *Machine) bindOutput(n *gorgonia.Node, a *array, ptr gpu.Ptr) error {
	switch {
	case m.config.share != nil && a.resident:
		return fmt.Errorf("%s belongs to the machine that WithParamsOf names", describe(n))
	case a.resident, a.at != 0, a.len()*a.elem.size() != a.block.Bytes:
		return fmt.Errorf("%s has no memory of its own, it is part of another value: copy it from its Address", describe(n))
	case m.optimizer != nil && slices.ContainsFunc(m.config.params, func(p *gorgonia.Node) bool { return p.Deriv() == n }):
		return fmt.Errorf("%s is a gradient that an optimiser reads: bind it before SetOptimizer", describe(n))
	}
	return m.move(a.block, ptr, func() {})
}

// move puts a block elsewhere, and gives back what the machine has allocated for it alone.
func (m *Machine) move(b *block, ptr gpu.Ptr, done func()) error {
	m.bound = true
	if b.base == ptr {
		done()
		return nil
	}
	if err := m.device.ctx.SyncStream(m.stream); err != nil {
		return err
	}
	if err := m.forget(); err != nil {
		return err
	}
	old := b.base
	b.base = ptr
	done()
	if _, ok := m.owned[old]; ok && b.resident {
		return m.free(old)
	}
	return nil
}

// refresh takes an input as the program that holds its memory has left it.
func (in *input) refresh() error {
	for _, c := range in.copies {
		if err := c.renew(); err != nil {
			return err
		}
	}
	return nil
}

// lasting returns the memory of a node whose value outlives a run.
func (m *Machine) lasting(n *gorgonia.Node) (*array, error) {
	if m.closed {
		return nil, errClosed
	}
	a, ok := m.program.values[n]
	switch {
	case n == nil || !ok:
		return nil, errors.New("the node is not part of the graph that the machine runs")
	case a.block == nil && len(a.parts) > 0:
		return nil, fmt.Errorf("%s packs several values: ask for those", describe(n))
	case a.block == nil:
		return nil, fmt.Errorf("%s is computed within another node: name it with WithOutputs", describe(n))
	case !a.resident && a.Last < len(m.program.tasks):
		return nil, fmt.Errorf("%s is not kept: name it with WithOutputs", describe(n))
	}
	return a, nil
}
