package cudaops

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/cudaops/internal/update"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/optim"
)

// Value waits for the device and returns a copy of a node's value. The node must be an input, an output
// (see [WithOutputs]), the gradient of a parameter, or a node that no other node reads. The memory of all
// other nodes is reused during a run. Before the first run, only parameters and bound inputs have a
// value.
//
// If the float32 values of a parameter are divided among ranks ([WithRanks]), Value returns the parameter
// in the narrower type that runs compute with.
func (m *Machine) Value(n *gorgonia.Node) (v gorgonia.Value, err error) {
	defer annotate("Machine.Value", &err)
	a, err := retained(m, n)
	if err != nil {
		return nil, err
	}
	defer m.profiler.Call("Value")()

	in, owner, err := inputIn(m, a)
	if err != nil {
		return nil, err
	}

	// Before the first run, only inputs that are not sent with each run have a value on the device.
	if !m.runner.State.Ran() && (in == nil || in.Sent()) {
		return nil, errors.New("the machine has not run")
	}

	if in == nil && a.Buffer != nil && !a.Resident {
		if err := m.hasValues(); err != nil {
			return nil, err
		}
	}

	if in != nil {
		if in.Part != nil {
			a = in.Copies[0].Array // holds all elements of a parameter that is divided among ranks
		}

		// An update of the parameters may still be in progress on another stream.
		if err := owner.optimizer.Arrive(m.runner.Stream); err != nil {
			return nil, err
		}
	}

	scale := m.runner.Carried(n) // Fetch divides by the loss scale
	if scale == 0 {
		return nil, fmt.Errorf("%s was dropped when the loss scale changed",
			graph.Describe(n))
	}

	if v, err = m.runner.Fetch(a, scale); err == nil {
		err = run.Joined(m.layers.Flush(), m.meters.read())
	}
	if err != nil {
		return nil, err
	}

	return v, nil
}

// Keep fills the cache of an attention of this machine's graph with keys and values that another machine
// on the device has computed. The node cached is a [kvcache.Attention]; the first positions of its cache
// are set.
//
// The nodes keys and values are outputs of the other machine, which must have run: the keys, already
// rotated by their positions, and the values, with at most as many rows as the cache has. If keys and
// values are both the same cached attention of the other machine's graph, Keep copies its cache.
func (m *Machine) Keep(cached *gorgonia.Node, from gorgonia.VM, keys,
	values *gorgonia.Node) (err error) {
	defer annotate("Machine.Keep", &err)
	if err = usable(m); err != nil {
		return
	}

	other, ok := from.(*Machine)
	if !ok {
		return fmt.Errorf("from is a %T, want a machine on the same device", from)
	}

	if err := usable(other); err != nil {
		return err
	}

	if other.device != m.device {
		return errors.New("from is a machine on another device")
	}

	if !other.runner.State.Ran() && !other.filled[keys] {
		return errors.New("from has not run")
	}

	cache, ok := m.runner.Program.Caches[cached]
	if !ok {
		return errors.New("cached is not an attention with a key-value cache in this machine's graph")
	}

	ctx := m.device.ctx
	if err := ctx.SyncStream(other.runner.Stream); err != nil {
		return err
	}

	source, copiesCache := other.runner.Program.Caches[keys]
	if copiesCache && values != keys {
		return errors.New("keys is a cached attention: pass it as values, too")
	}

	// Copy the keys, then the values.
	nodes := []*gorgonia.Node{keys, values}
	sources := []*program.Array{source.Keys, source.Values}
	for i, to := range []*program.Array{cache.Keys, cache.Values} {
		n, a := nodes[i], sources[i]
		if !copiesCache {
			if a, err = retained(other, n); err != nil {
				return err
			}
			if err = other.hasValues(); err != nil {
				return err
			}
		}

		if a.Type != to.Type || len(a.Shape) != 2 || a.Shape[1] != to.Shape[1] ||
			a.Shape[0] > to.Shape[0] || a.Stride != 0 {
			return fmt.Errorf("%s is %v of %v, want at most %v of %v", graph.Describe(n), a.Shape,
				a.Type, to.Shape, to.Type)
		}

		if err := ctx.CopyOnDevice(to.Ptr(), a.Ptr(), a.Extent(), m.runner.Stream); err != nil {
			return err
		}
	}

	if err := ctx.SyncStream(m.runner.Stream); err != nil {
		return err
	}

	if m.filled == nil {
		m.filled = map[*gorgonia.Node]bool{}
	}

	m.filled[cached] = true
	return nil
}

// retained returns the memory of a node that keeps its value after a run.
func retained(m *Machine, n *gorgonia.Node) (*program.Array, error) {
	if err := usable(m); err != nil {
		return nil, err
	}

	a, ok := m.runner.Program.Values[n]
	switch {
	case n == nil || !ok:
		return nil, errors.New("the node is not part of the graph that the machine runs")
	case a.Buffer == nil && len(a.Parts) > 0:
		return nil, fmt.Errorf("%s packs several values: request them individually", graph.Describe(n))
	case a.Buffer == nil:
		return nil, fmt.Errorf("%s is computed within another node: name it with WithOutputs",
			graph.Describe(n))
	case !a.Resident && a.Last < len(m.runner.Program.Calls):
		return nil, fmt.Errorf("%s is not kept: name it with WithOutputs", graph.Describe(n))
	}

	return a, nil
}

// inputIn returns the input that uses an array, or nil if the array belongs to no input, together with
// the input's machine. For a parameter shared by WithParamsOf, this is the other machine.
func inputIn(m *Machine, a *program.Array) (*program.Input, *Machine, error) {
	usesArray := func(in *program.Input) bool { return in.Array == a }
	p := m.runner.Program
	if i := slices.IndexFunc(p.Inputs, usesArray); i >= 0 {
		return p.Inputs[i], m, nil
	}
	if i := slices.IndexFunc(p.Borrowed, usesArray); i >= 0 {
		owner, err := ownerOf(m)
		return p.Borrowed[i], owner, err
	}
	return nil, nil, nil
}

// ownerOf returns the owner of the parameters that a machine uses: the machine itself, or the machine
// named by WithParamsOf.
func ownerOf(m *Machine) (*Machine, error) {
	if m.config.share == nil {
		return m, nil
	}
	if m.config.share.runner.State.Closed() {
		return nil, errors.New("the machine that owns the shared parameters (WithParamsOf) is closed")
	}
	return m.config.share, nil
}

// Upload copies the values of parameters to the device again, after the host has changed them. If one of
// the values cannot be copied, none is.
func (m *Machine) Upload(params ...*gorgonia.Node) (err error) {
	defer annotate("Machine.Upload", &err)
	if err = usable(m); err != nil {
		return
	}

	if err := run.Joined(m.optimizer.Arrive(m.runner.Stream),
		m.device.ctx.SyncStream(m.runner.Stream)); err != nil {
		return err
	}

	var inputs []*program.Input
	for _, p := range params {
		i, err := inputOf(m, p)
		if err != nil {
			return err
		}
		inputs = append(inputs, i)
	}

	fromHost := func(*program.Input) *run.KeptParam { return nil } // read every value from the host
	return m.runner.Inputs.SendSome(inputs, fromHost)
}

// inputOf returns the graph's input for a parameter.
func inputOf(m *Machine, p *gorgonia.Node) (*program.Input, error) {
	if p == nil {
		return nil, errors.New("a node is nil")
	}
	i := m.runner.Inputs.Find(p)
	if i == nil {
		return nil, fmt.Errorf("%s is not an input of the graph", graph.Describe(p))
	}
	return i, nil
}

// Download waits for the device and copies parameters, except frozen ones, back into the values of their
// nodes.
//
// With arguments it copies only these parameters and does not wait for other ranks. It copies a parameter
// in the type that runs compute with if the float32 values are divided among ranks ([WithRanks]).
//
// Without arguments it copies all parameters and, on a single GPU, also copies the optimizer state to the
// optimizer. On a machine made with WithRanks, all ranks must call it; [Rank.GatherState] copies their
// optimizer state.
func (m *Machine) Download(some ...*gorgonia.Node) (err error) {
	defer annotate("Machine.Download", &err)
	if err = usable(m); err != nil {
		return
	}

	params := some
	if len(some) == 0 { // all but unused and shared parameters
		params = slices.DeleteFunc(slices.Clone(m.config.Params), func(p *gorgonia.Node) bool {
			return m.runner.Inputs.Find(p) == nil
		})
	}

	var inputs []*program.Input
	var memory [][]float32 // where the values of inputs go
	for _, p := range params {
		i, err := inputOf(m, p)
		if err != nil {
			return err
		}
		if i.Frozen {
			continue
		}
		if !slices.Contains(m.config.Params, p) {
			return fmt.Errorf("%s is not a parameter of the machine", graph.Describe(p))
		}
		to, err := run.HostMemory(i)
		if err != nil {
			return err
		}
		inputs, memory = append(inputs, i), append(memory, to)
	}

	if err := m.optimizer.Arrive(m.runner.Stream); err != nil {
		return err
	}

	for k, i := range inputs {
		if err := download(m, i, memory[k], len(some) == 0); err != nil {
			return err
		}
	}

	// Several ranks call Rank.GatherState instead.
	if len(some) > 0 || m.optimizer == nil || m.optimizer.Shared() {
		return nil
	}

	return setOptimizerState(m.optimizer, m.optimizer.Own)
}

// download copies one parameter to the host. For a parameter divided among ranks, it gathers the parts of
// all ranks if all is true, which requires every rank to call it. Otherwise it copies the parameter in
// the type that runs compute with.
func download(m *Machine, i *program.Input, to []float32, all bool) error {
	optimizer := m.optimizer
	switch {
	case i.Part == nil:
		return m.runner.FetchFloats(i.Array, to)
	case !all:
		return m.runner.FetchFloats(i.Copies[0].Array, to)
	case optimizer == nil:
		return errNoOptimizer
	}

	number := slices.IndexFunc(optimizer.Params, func(p *update.Param) bool { return p.Input == i })
	whole, err := optimizer.Gathered(number, i.Part.Ptr())
	copy(to, whole)
	return err
}

// setOptimizerState sets the optimizer's state to the moments that fetch returns, if the device has newer
// ones.
func setOptimizerState(optimizer *update.Optimizer, fetch func(param, moment int) (any, error)) error {
	if !optimizer.Newer() {
		return nil
	}

	var state []optim.Tensor
	for n, p := range optimizer.Params {
		// p.Step counts the updates of the parameter before those on this device.
		name, step := p.Input.Node.Name(), p.Step+int64(optimizer.Steps)
		if step == 0 {
			continue // no state yet
		}

		state = append(state, optim.Tensor{Name: name + ".step", Shape: []int{1},
			Data: []int64{step}})
		for i, m := range p.Rule.Kernel.Moments {
			data, err := fetch(n, i)
			if err != nil {
				return err
			}
			state = append(state, optim.Tensor{Name: name + "." + m.Name,
				Shape: m.Shape(p.Input.Array.Shape), Data: data})
		}
	}

	slices.SortFunc(state, func(a, b optim.Tensor) int { return cmp.Compare(a.Name, b.Name) })
	// Names and shapes are right, so SetState can only reject numbers that are not finite.
	if err := optimizer.SetState(state); err != nil {
		return fmt.Errorf("%w: %w", ErrNonFinite, err)
	}

	return nil
}

// Kept holds the parameters and optimizer state that a closed machine has left on the device. Machines
// made with [WithKept] continue with them. Close it before the device.
type Kept struct{ memory *run.Kept }

// CloseKept closes the machine, but keeps the parameters and their optimizer state on the device. The machine must
// have an optimizer, must not be one of several ranks, and must own the memory of its parameters and share it with no
// other machine. If one of these conditions is violated, CloseKept changes nothing. After any other error, all memory
// has been freed.
func (m *Machine) CloseKept() (_ *Kept, err error) {
	defer annotate("Machine.CloseKept", &err)
	optimizer, err := optimizerOf(m)
	switch {
	case err != nil:
		return nil, err
	case optimizer.Shared():
		return nil, errors.New("the parameters are divided among ranks")
	}

	for _, p := range optimizer.Params {
		switch in := p.Input; {
		case !m.runner.Memory.Owns(in.Array.Base):
			return nil, fmt.Errorf("%s is bound to memory of the program", graph.Describe(in.Node))
		case in.Sharers > 0:
			return nil, fmt.Errorf("another machine uses %s (WithParamsOf): close that machine first",
				graph.Describe(in.Node))
		}
	}

	if err := m.device.ctx.SyncStream(m.runner.Stream); err != nil {
		return nil, err
	}

	k := run.NewKept(m.device.ctx)
	optimizer.HandOver(k, m.runner.Memory)
	if err := m.Close(); err != nil {
		return nil, run.Joined(err, k.Close())
	}

	return &Kept{k}, nil
}

// Close frees the memory that no machine has taken over. The rest belongs to the machines that took it.
func (k *Kept) Close() (err error) {
	defer annotate("Kept.Close", &err)
	if k == nil || k.memory == nil {
		return nil
	}
	return k.memory.Close()
}

// WithKept makes parameters start with the values and optimizer state of a machine that was closed by
// [Machine.CloseKept]. from maps the names of this machine's parameters to their names in the closed
// machine.
//
// The first parameter that uses a kept value takes over its memory, and further parameters receive a copy made on
// the device. Parameters that from does not name start with the values of their nodes, and with the state that
// the machine's first optimizer has for them.
//
// A machine that is closed before k returns the memory to k, with its present contents.
func WithKept(k *Kept, from map[string]string) MachineOption {
	return func(c *machineConfig) error {
		if k == nil || k.memory == nil || len(k.memory.Params) == 0 {
			return errors.New("WithKept: nothing was kept")
		}
		c.kept, c.inherits = k.memory, maps.Clone(from)
		return nil
	}
}

// missingParam returns the name of a kept parameter that one of the machine's parameters should start
// with, but that is gone because another machine has passed it on to a different Kept. It returns "" if
// every such parameter is available.
func (c *machineConfig) missingParam() string {
	for _, p := range c.Params {
		if name := c.inherits[p.Name()]; c.kept.HandedOver[name] {
			return name
		}
	}
	return ""
}

// inherited returns the kept parameter that provides an input's initial value, or nil if the node's value
// does.
func (c *machineConfig) inherited(in *program.Input) *run.KeptParam {
	if in.Part != nil || in.Frozen || !slices.Contains(c.Params, in.Node) {
		return nil
	}
	k := c.kept.Params[c.inherits[in.Node.Name()]]
	if k == nil || k.Len != in.Array.Len() {
		return nil
	}
	return k
}

// Stream returns the CUstream on which the machine works. Another library that uses the machine's memory
// must order its work accordingly: by using the same stream, with an event, or by waiting. If the machine
// created the stream, it is valid until Close.
func (m *Machine) Stream() uintptr {
	return uintptr(m.runner.Stream)
}

// Address returns the CUdeviceptr of a node's value and its size in bytes. Elements are in row-major
// order. Integers are int64, and floats have the type that [Precision] and [WithGradientPrecision]
// determine. The node must satisfy the conditions of [Machine.Value].
//
// The memory belongs to the machine and is valid until Close or the next [Machine.Bind] of the node. It
// contains the result of the last run once the work on the machine's stream is complete. For a parameter
// of another machine ([WithParamsOf]), it contains the result of the last update once the work on that
// machine's stream is complete. With [Float16], gradients are multiplied by the loss scale.
func (m *Machine) Address(n *gorgonia.Node) (ptr uintptr, bytes int, err error) {
	defer annotate("Machine.Address", &err)
	a, err := undivided(m, n)
	if err != nil {
		return 0, 0, err
	}
	return uintptr(a.Ptr()), a.Extent(), nil
}

// undivided returns the memory of a node that keeps its value after a run and is not divided among ranks.
func undivided(m *Machine, n *gorgonia.Node) (*program.Array, error) {
	a, err := retained(m, n)
	if err != nil {
		return nil, err
	}

	in, _, err := inputIn(m, a)
	if err != nil {
		return nil, err
	}

	if in != nil && in.Part != nil {
		return nil, fmt.Errorf("%s is divided among ranks (WithRanks), so it has no single "+
			"address", graph.Describe(n))
	}

	return a, nil
}

// Bind makes a node's value use device memory of the caller, starting with the next run. The
// address ptr is a CUdeviceptr and a multiple of 256, as all addresses from cuMemAlloc are. The size
// must be equal to the size that [Machine.Address] returns. The node may be
//
//   - an input: runs read the memory instead of the value that gorgonia.Let gave the node;
//   - a parameter: in addition, [Machine.Update] writes the memory. It must contain the parameter's
//     value before the next run. Call Bind before [Machine.SetOptimizer], and before another machine
//     shares the parameter;
//   - an output with separate memory, not part of another value: runs write the memory.
//
// Bind copies nothing. The memory still belongs to the caller, who may free it after Close or after
// binding the node to other memory. It must be accessible in the device's context, and the machine
// uses it on its stream. An input that holds integers cannot be bound, because the machine checks
// them before it sends them.
func (m *Machine) Bind(n *gorgonia.Node, ptr uintptr, bytes int) (err error) {
	defer annotate("Machine.Bind", &err)
	a, err := undivided(m, n)
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

	i := slices.IndexFunc(m.runner.Program.Inputs, func(i *program.Input) bool {
		return i.Array.Buffer == a.Buffer
	})
	if i < 0 {
		err = canBindOutput(m, n, a)
	} else {
		err = canBindInput(m, n, m.runner.Program.Inputs[i])
	}
	if err != nil {
		return fmt.Errorf("%s %w", graph.Describe(n), err)
	}

	if err := moveBuffer(m, a.Buffer, gpu.Ptr(ptr)); err != nil {
		return err
	}

	if i >= 0 {
		m.runner.Program.Inputs[i].Bound = true
	}

	return nil
}

// canBindInput returns an error if the memory of an input, which contains node n, cannot be replaced.
func canBindInput(m *Machine, n *gorgonia.Node, i *program.Input) error {
	switch {
	case i.Node != n:
		return fmt.Errorf("is part of %s: bind that", graph.Describe(i.Node))
	case n.Op() != nil:
		return errors.New("is a constant")
	case len(i.IDs) > 0:
		return fmt.Errorf("holds %s of %s, which are checked before they are sent: give it a "+
			"value with gorgonia.Let", i.IDs[0].Argument, i.IDs[0].Op)
	case i.Sharers > 0:
		return errors.New("is used by another machine, too (WithParamsOf)")
	case i.Constant && m.optimizer != nil:
		return errors.New("is a parameter that an optimizer updates: bind it before SetOptimizer")
	}

	return nil
}

// canBindOutput returns an error if the memory of an output cannot be replaced.
func canBindOutput(m *Machine, n *gorgonia.Node, a *program.Array) error {
	switch {
	case m.config.share != nil && a.Resident:
		return errors.New("belongs to the machine that WithParamsOf names")
	case a.Resident, a.At != 0, a.Extent() != a.Buffer.Bytes:
		return errors.New("has no separate memory, it is part of another value: copy it from " +
			"its Address")
	case m.optimizer != nil && slices.ContainsFunc(m.config.Params, func(p *gorgonia.Node) bool {
		return p.Deriv() == n
	}):
		return errors.New("is a gradient that an optimizer reads: bind it before SetOptimizer")
	}

	return nil
}

// moveBuffer gives a buffer a new address, and frees its old memory if the machine allocated it for this
// buffer alone.
func moveBuffer(m *Machine, b *program.Buffer, to gpu.Ptr) error {
	if b.Base == to {
		return nil
	}

	if err := m.runner.DropCaptures(); err != nil {
		return err
	}

	old := b.Base
	b.Base = to
	if b.Resident && m.runner.Memory.Owns(old) {
		return m.runner.Memory.Free(old)
	}

	return nil
}
