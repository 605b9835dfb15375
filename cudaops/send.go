package cudaops

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/params"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// send copies an input's value to the device, by way of pinned memory.
func (m *Machine) send(in *input) error {
	if err := stage(in); err != nil {
		return err
	}
	return m.transmit(in)
}

// stage writes an input's value to pinned memory, if it can be sent.
func stage(in *input) error {
	v := in.node.Value()
	if v == nil {
		return fmt.Errorf("%s has no value: bind one with gorgonia.Let", describe(in.node))
	}
	if err := encode(in.staging, in.array.elem, v, in.array.len()); err != nil {
		return fmt.Errorf("%s: %w", describe(in.node), err)
	}
	for _, r := range in.ids {
		if err := r.check(gpu.View[int64](in.staging)[:in.array.len()]); err != nil {
			return err
		}
	}
	return nil
}

// transmit copies what stage has written.
func (m *Machine) transmit(in *input) error {
	if err := m.device.ctx.CopyToDevice(in.array.ptr(), in.staging[:in.array.extent()], m.stream); err != nil {
		return err
	}
	return in.refresh()
}

// check says of ids what the op would say on the CPU; a kernel cannot.
func (r idRange) check(ids []int64) error {
	if r.seq > 0 {
		return r.checkStarts(ids)
	}
	all := int64(-1) // whose sign is that of all of them, if they have the same
	for i, id := range ids {
		if uint64(id) >= uint64(r.vocab) && (id >= 0 || !r.negative) {
			return fmt.Errorf("%s: %s[%d] is %d, want an id of the vocabulary, 0 to %d", r.op, r.argument, i, id, r.vocab-1)
		}
		all &= id
	}
	if all < 0 {
		return fmt.Errorf("%s: all %d %s are negative: %w", r.op, len(ids), r.argument, op.ErrNoTargets)
	}
	return nil
}

// checkStarts is check for where documents start.
func (r idRange) checkStarts(starts []int64) error {
	least := int64(0)
	for row, start := range starts {
		i := row % r.seq
		if i == 0 {
			least = 0
		}
		if start < least || start > int64(i) {
			return fmt.Errorf("%s: %s[%d] is %d, want %d, the start before it, to %d, its own position in the sequence", r.op, r.argument,
				row, start, least, i)
		}
		least = start
	}
	return nil
}

// Upload copies the values of parameters to the device again, after the host has changed them. If one of them
// has no value that can be sent, none is copied.
func (m *Machine) Upload(params ...*gorgonia.Node) error {
	if err := m.upload(params); err != nil {
		return fmt.Errorf("cudaops.Machine.Upload: %w", err)
	}
	return nil
}

func (m *Machine) upload(params gorgonia.Nodes) error {
	if m.closed {
		return errClosed
	}
	if err := m.device.ctx.SyncStream(m.stream); err != nil {
		return err
	}
	var inputs []*input
	for _, p := range params {
		if p == nil {
			return errors.New("a node is nil")
		}
		i := slices.IndexFunc(m.program.inputs, func(in *input) bool { return in.node == p })
		if i < 0 {
			return fmt.Errorf("%s is no input of the graph", describe(p))
		}
		inputs = append(inputs, m.program.inputs[i])
	}
	for _, in := range inputs {
		if err := stage(in); err != nil {
			return err
		}
	}
	var err error
	for i := 0; i < len(inputs) && err == nil; i++ {
		err = m.transmit(inputs[i])
	}
	sent := func(in *input) bool { return slices.Contains(inputs, in) } // also some of them
	return joined(err, m.quantizeAgain(sent), m.device.ctx.SyncStream(m.stream))
}

// Download waits for the device and copies the parameters back into their nodes' values and, if there is an optimiser, what
// it remembers into that.
func (m *Machine) Download() error {
	if err := m.download(); err != nil {
		return fmt.Errorf("cudaops.Machine.Download: %w", err)
	}
	return nil
}

func (m *Machine) download() error {
	if m.closed {
		return errClosed
	}
	for _, in := range m.program.inputs {
		if !slices.Contains(m.config.params, in.node) {
			continue
		}
		if err := m.copyBack(in); err != nil {
			return err
		}
	}
	x := m.optimizer
	if x == nil || x.steps == 0 {
		return nil
	}
	var state []optim.Tensor
	for _, p := range x.states {
		name := p.input.node.Name()
		state = append(state, optim.Tensor{Name: name + ".step", Shape: []int{1}, Data: []int64{p.step + int64(x.steps)}})
		for i, moment := range p.names() {
			v, err := m.fetch(p.moments[i], p.input.node.Dtype())
			if err != nil {
				return err
			}
			data := v.Data()
			if f, ok := data.(float32); ok {
				data = []float32{f}
			}
			state = append(state, optim.Tensor{Name: name + "." + moment, Shape: slices.Clone(p.input.array.shape), Data: data})
		}
	}
	slices.SortFunc(state, func(a, b optim.Tensor) int { return cmp.Compare(a.Name, b.Name) })
	if err := x.rules.SetState(state); err != nil { // which refuses nothing else of what these kernels leave
		return fmt.Errorf("%w: %w", ErrNonFinite, err)
	}
	return nil
}

// copyBack copies a parameter into the memory of its node's value.
func (m *Machine) copyBack(in *input) error {
	v, err := m.fetch(in.array, in.node.Dtype())
	if err != nil {
		return err
	}
	return setValue(in.node, v)
}

// setValue copies v into the memory of the node's own value, which others may share.
func setValue(n *gorgonia.Node, v gorgonia.Value) error {
	to, err := params.Memory(n.Value())
	if err != nil {
		return fmt.Errorf("%s: its value %w", describe(n), err)
	}
	from, err := params.Memory(v)
	if err != nil {
		return err
	}
	copy(to.([]float32), from.([]float32))
	return nil
}
