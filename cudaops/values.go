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

// Value waits for the device and copies a node's value back. The node must be an input, an output
// (see [WithOutputs]), the gradient of a parameter, or one that no other node needs. Other values
// give way to later ones during a run. Before the first run parameters and what is bound have
// values, and nothing else. Of a parameter whose float32 values are divided among ranks
// ([WithRanks]) it is what runs compute with, in a narrower type.
func (m *Machine) Value(n *gorgonia.Node) (v gorgonia.Value, err error) {
	defer in("Machine.Value", &err)
	a, err := lasting(m, n)
	if err != nil {
		return nil, err
	}
	defer m.profiler.Call("Value")()

	in, owner, err := inputIn(m, a)
	if err != nil {
		return nil, err
	}

	if !m.runner.State.Ran() && (in == nil || in.Sent()) {
		return nil, errors.New("the machine has not run")
	}

	if in != nil {
		if in.Part != nil {
			a = in.Copies[0].Array
		}
		if err := owner.optimizer.Arrive(m.runner.Stream); err != nil {
			return nil, err
		}
	}

	scale := m.runner.Carried(n)
	if scale == 0 {
		return nil, fmt.Errorf("%s was dropped with the loss scale that it carried",
			graph.Describe(n))
	}

	if v, err = m.runner.Fetch(a, scale); err == nil {
		err = m.layers.Settle()
	}
	if err != nil {
		return nil, err
	}

	return v, nil
}

// Keep copies the keys and values of the first positions to where an attention of this machine's
// graph keeps them. They are outputs of another machine on the device that has run. The node cached
// is one of [kvcache.Attention]. Their rows are its keys turned by their positions, and its values,
// at most as many as it can keep. Where keys and values both are such an attention of the other
// machine's graph, it is what that keeps, of its runs or by Keep.
func (m *Machine) Keep(cached *gorgonia.Node, from gorgonia.VM, keys,
	values *gorgonia.Node) (err error) {
	defer in("Machine.Keep", &err)
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
		return errors.New("the node is no attention of this machine's that keeps keys and values")
	}

	ctx := m.device.ctx
	if err := ctx.SyncStream(other.runner.Stream); err != nil {
		return err
	}

	before, again := other.runner.Program.Caches[keys]
	if again && values != keys {
		return errors.New("keys is an attention that keeps both: name it as values too")
	}

	for i, to := range []*program.Array{cache.Keys, cache.Values} {
		n := []*gorgonia.Node{keys, values}[i]
		a := []*program.Array{before.Keys, before.Values}[i]
		if !again {
			if a, err = lasting(other, n); err != nil {
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

// lasting returns the memory of a node whose value outlives a run.
func lasting(m *Machine, n *gorgonia.Node) (*program.Array, error) {
	if err := usable(m); err != nil {
		return nil, err
	}

	a, ok := m.runner.Program.Values[n]
	switch {
	case n == nil || !ok:
		return nil, errors.New("the node is not part of the graph that the machine runs")
	case a.Buffer == nil && len(a.Parts) > 0:
		return nil, fmt.Errorf("%s packs several values: ask for those", graph.Describe(n))
	case a.Buffer == nil:
		return nil, fmt.Errorf("%s is computed within another node: name it with WithOutputs",
			graph.Describe(n))
	case !a.Resident && a.Last < len(m.runner.Program.Calls):
		return nil, fmt.Errorf("%s is not kept: name it with WithOutputs", graph.Describe(n))
	}

	return a, nil
}

// inputIn is the input whose values lie in an array, nil if none do, and the machine whose input it
// is: of a parameter WithParamsOf the other one.
func inputIn(m *Machine, a *program.Array) (*program.Input, *Machine, error) {
	lies := func(in *program.Input) bool { return in.Array == a }
	p := m.runner.Program
	if i := slices.IndexFunc(p.Inputs, lies); i >= 0 {
		return p.Inputs[i], m, nil
	}
	if i := slices.IndexFunc(p.Borrowed, lies); i >= 0 {
		owner, err := ownerOf(m)
		return p.Borrowed[i], owner, err
	}
	return nil, nil, nil
}

// ownerOf is the machine whose parameters a machine uses: its own, or another's.
func ownerOf(m *Machine) (*Machine, error) {
	if m.config.share == nil {
		return m, nil
	}
	if m.config.share.runner.State.Closed() {
		return nil, errors.New("the machine whose parameters this one uses (WithParamsOf) is closed")
	}
	return m.config.share, nil
}

// Upload copies the values of parameters to the device again, after the host has changed them. If
// one of them has no value that can be sent, none is copied.
func (m *Machine) Upload(params ...*gorgonia.Node) (err error) {
	defer in("Machine.Upload", &err)
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

	hosts := func(*program.Input) *run.KeptParam { return nil }
	return m.runner.Inputs.SendSome(inputs, hosts)
}

// inputOf is what the graph has of a parameter.
func inputOf(m *Machine, p *gorgonia.Node) (*program.Input, error) {
	if p == nil {
		return nil, errors.New("a node is nil")
	}
	i := m.runner.Inputs.Of(p)
	if i == nil {
		return nil, fmt.Errorf("%s is no input of the graph", graph.Describe(p))
	}
	return i, nil
}

// Download waits for the device and copies parameters, but frozen ones, back into their nodes'
// values: those that are named, and then it waits for no other rank. Of one whose float32 values
// are divided among ranks ([WithRanks]) that is what runs compute with. Without names it copies
// all, and what an optimiser remembers into that. All ranks of a machine made [WithRanks] must call
// it then.
func (m *Machine) Download(some ...*gorgonia.Node) (err error) {
	defer in("Machine.Download", &err)
	if err = usable(m); err != nil {
		return
	}

	all := some
	if len(some) == 0 { // but what nobody needs, and what another machine has
		all = slices.DeleteFunc(slices.Clone(m.config.Params), func(p *gorgonia.Node) bool {
			return m.runner.Inputs.Of(p) == nil
		})
	}

	var inputs []*program.Input
	var memory [][]float32
	for _, p := range all {
		i, err := inputOf(m, p)
		if err != nil {
			return err
		}
		if i.Frozen {
			continue
		}
		if !slices.Contains(m.config.Params, p) {
			return fmt.Errorf("%s is no parameter of the machine", graph.Describe(p))
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

	x := m.optimizer
	if len(some) > 0 || x == nil || x.Shared() {
		return nil
	}

	return stateOf(x, x.Own)
}

// download copies a parameter: of one that is divided among ranks what each of them has, if all
// ask, else what runs compute with.
func download(m *Machine, i *program.Input, to []float32, all bool) error {
	x := m.optimizer
	switch {
	case i.Part == nil:
		return m.runner.FetchFloats(i.Array, to)
	case !all:
		return m.runner.FetchFloats(i.Copies[0].Array, to)
	case x == nil:
		return errNoOptimizer
	}

	whole, err := x.Gathered(slices.IndexFunc(x.Params,
		func(p *update.Param) bool { return p.Input == i }), i.Part.Ptr())
	copy(to, whole)
	return err
}

// stateOf sets the optimiser's state to moments that fetch returns, if the device knows others.
func stateOf(x *update.Optimizer, fetch func(param, moment int) (any, error)) error {
	if !x.Newer() {
		return nil
	}

	var state []optim.Tensor
	for n, p := range x.Params {
		name, step := p.Input.Node.Name(), p.Step+int64(x.Steps)
		if step == 0 {
			continue // nothing to remember yet
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
	// which refuses nothing else of what these kernels leave
	if err := x.SetState(state); err != nil {
		return fmt.Errorf("%w: %w", ErrNonFinite, err)
	}

	return nil
}

// Kept is device memory that a machine has left: its parameters and what its optimiser remembered
// of them. Machines made [WithKept] go on with it. The device must stay open until it is closed.
type Kept struct{ memory *run.Kept }

// CloseKept is Close but for the parameters and what the optimiser remembers of them, which stay on
// the device. It is for a machine with an optimiser, of a single GPU, whose parameters lie in
// memory of its own, which no other machine uses. Else it changes nothing, and the error says why.
// After another error everything has been given back.
func (m *Machine) CloseKept() (_ *Kept, err error) {
	defer in("Machine.CloseKept", &err)
	x, err := optimizerOf(m)
	switch {
	case err != nil:
		return nil, err
	case x.Shared():
		return nil, errors.New("the parameters are divided among ranks")
	}

	for _, p := range x.Params {
		switch in := p.Input; {
		case !m.runner.Memory.Owns(in.Array.Base):
			return nil, fmt.Errorf("%s lies in memory of its user's", graph.Describe(in.Node))
		case in.Sharers > 0:
			return nil, fmt.Errorf("another machine uses %s (WithParamsOf): close it before",
				graph.Describe(in.Node))
		}
	}

	if err := m.device.ctx.SyncStream(m.runner.Stream); err != nil {
		return nil, err
	}

	k := run.NewKept(m.device.ctx)
	x.Leave(k, m.runner.Memory)
	if err := m.Close(); err != nil {
		return nil, run.Joined(err, k.Close())
	}

	return &Kept{k}, nil
}

// Close gives back what no machine has taken over. What was taken is its machine's then.
func (k *Kept) Close() (err error) {
	defer in("Kept.Close", &err)
	if k == nil || k.memory == nil {
		return nil
	}
	return k.memory.Close()
}

// WithKept has parameters begin with the values, and with what an optimiser remembers, of
// parameters of a machine that was closed by [Machine.CloseKept]. The map from has the name there
// for the name here. Where a value is wanted once its memory is taken over, else it is copied on
// the device. All other parameters begin with the values of their nodes, and what the optimiser
// that comes first remembers of them. A machine that is closed before k returns what it has taken
// to k, as it is then.
func WithKept(k *Kept, from map[string]string) MachineOption {
	return func(c *machineConfig) error {
		if k == nil || k.memory == nil || len(k.memory.Params) == 0 {
			return errors.New("WithKept: there is nothing that was kept")
		}
		c.kept, c.inherits = k.memory, maps.Clone(from)
		return nil
	}
}

// missing names a parameter that one of the machine's was to begin with, and that another machine
// has left to a Kept of its own since; "" for none.
func (c *machineConfig) missing() string {
	for _, p := range c.Params {
		if name := c.inherits[p.Name()]; c.kept.Left[name] {
			return name
		}
	}
	return ""
}

// inherited is what an input begins with, nil if that is its node's value.
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

// Stream is the CUstream that the machine's work is on. Another library that uses the machine's
// memory must order its work by it: on the stream itself, with an event, or by waiting. It is valid
// until Close, if the machine made it.
func (m *Machine) Stream() uintptr {
	if m == nil || m.runner == nil {
		return 0
	}
	return uintptr(m.runner.Stream)
}

// Address is the CUdeviceptr at which a node's value lies, and the bytes it takes. Elements are
// float32 and bfloat16 as the machine's [Precision] and [WithGradientPrecision] have it, integers
// int64, in row-major order. The node must be one that [Machine.Value] takes. The memory remains
// the machine's. It is valid until Close, or the next [Machine.Bind] of the node. It holds what the
// last run left once the machine's stream has come to its end, and a parameter of another machine
// ([WithParamsOf]) what the last update left once that one's has. With [Float16], gradients lie
// there multiplied by the loss scale.
func (m *Machine) Address(n *gorgonia.Node) (ptr uintptr, bytes int, err error) {
	defer in("Machine.Address", &err)
	a, err := whole(m, n)
	if err != nil {
		return 0, 0, err
	}
	return uintptr(a.Ptr()), a.Extent(), nil
}

// whole is the memory of a node whose value outlives a run, and is here as a whole.
func whole(m *Machine, n *gorgonia.Node) (*program.Array, error) {
	a, err := lasting(m, n)
	if err != nil {
		return nil, err
	}

	in, _, err := inputIn(m, a)
	if err != nil {
		return nil, err
	}

	if in != nil && in.Part != nil {
		return nil, fmt.Errorf("%s is divided among ranks (WithRanks): its values have no one "+
			"address", graph.Describe(n))
	}

	return a, nil
}

// Bind makes a node's value lie in device memory that the program holds, from the next run on. The
// address ptr is a CUdeviceptr that is a multiple of 256, as cuMemAlloc's are. The bytes must be
// what [Machine.Address] says the value takes. The node is
//
//   - an input: runs read the memory as it is then, and no longer the value that gorgonia.Let gave
//     the node;
//   - a parameter: the same, and [Machine.Update] writes it, so it must hold the parameter's value
//     before the next run. Bind comes before [Machine.SetOptimizer], and before another machine
//     shares the parameter;
//   - an output, which must be one that has memory of its own: runs write it.
//
// Nothing is copied. The memory remains the caller's, who frees it, after Close or after binding
// the node to other memory. It must be accessible in the device's context, and is used on the
// machine's stream. An input that holds integers cannot be bound: the machine checks them before it
// sends them.
func (m *Machine) Bind(n *gorgonia.Node, ptr uintptr, bytes int) (err error) {
	defer in("Machine.Bind", &err)
	a, err := whole(m, n)
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

// canBindInput returns why an input, of which node n is, cannot lie elsewhere.
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
		return errors.New("is what another machine uses too, see WithParamsOf")
	case i.Constant && m.optimizer != nil:
		return errors.New("is a parameter that an optimiser updates: bind it before SetOptimizer")
	}

	return nil
}

// canBindOutput returns why an output cannot lie elsewhere.
func canBindOutput(m *Machine, n *gorgonia.Node, a *program.Array) error {
	switch {
	case m.config.share != nil && a.Resident:
		return errors.New("belongs to the machine that WithParamsOf names")
	case a.Resident, a.At != 0, a.Extent() != a.Buffer.Bytes:
		return errors.New("has no memory of its own, it is part of another value: copy it from " +
			"its Address")
	case m.optimizer != nil && slices.ContainsFunc(m.config.Params, func(p *gorgonia.Node) bool {
		return p.Deriv() == n
	}):
		return errors.New("is a gradient that an optimiser reads: bind it before SetOptimizer")
	}

	return nil
}

// moveBuffer puts a buffer elsewhere, and gives back what the machine has allocated for it alone.
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
