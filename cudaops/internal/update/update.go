// Package update applies optimisers on the device: their moments, their control block, and the
// calls of an update, which are a program of their own. It knows the runner and the inputs of its
// machine, and they know nothing of it.
package update

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/cudaops/internal/choose"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/optim"
)

// Machine is what an optimiser needs of the machine whose parameters it updates.
type Machine struct {
	*run.Runner
	Chooser    *choose.Chooser
	Activation gpu.DType // what activations are stored as
	// what a parameter's moments are to begin with, nil where the optimiser knows
	Kept func(*program.Input) *run.KeptParam
}

// Param is a parameter and what the optimiser remembers of it, on the device.
type Param struct {
	Input   *program.Input
	Grad    *program.Array
	Rule    optim.Rule
	Moments []*program.Array // in the order of the kernel's
	Step    int64            // updates before those that the device counts
	Apart   bool             // its gradient is clipped with those of others that are apart
}

// Optimizer updates a machine's parameters.
type Optimizer struct {
	optim.Rules
	Params []*Param
	Steps  int // updates on the device
	// Abandoned is whether an update was begun and not waited for, so that Steps is not known.
	Abandoned bool

	m          Machine
	memory     run.Memory
	families   []*family
	all        *optimizer.Table // of the gradients' squares
	chunks     []*Param         // of which the chunks of all gradients are, in the order of Params
	control    gpu.Ptr          // optimizer.Control
	staging    []byte           // the same, pinned
	squares    gpu.Ptr          // of all chunks and of the loss; then the families' workspace
	apart      gpu.Ptr          // of each, whether its gradients are apart; null where none are
	settings   optimizer.Control
	loss       []byte                  // pinned, of a step
	ran        gpu.Event               // the run before the update is done
	judged     gpu.Event               // the control block is back
	updated    gpu.Event               // the parameters of this rank are up to date
	recorded   run.Recordings[gpu.Ptr] // by the loss that is looked at; 0 for none, rest behind the norm
	renew      []*program.Call         // copies of parameters that the update does not write
	share      *share                  // of several ranks; nil for the only one
	uncaptured bool                    // collectives are enqueued as they are
	newer      bool                    // the device has moments that the host does not know
}

// Ranks are those that make an update together.
type Ranks struct {
	Group      comm.Group
	Uncaptured bool // the group's work cannot be captured
	Bucket     int  // bytes of gradients that travel together at least; 0 for what is fast
	Rounds     int  // of a step; 0 for any number
}

// New puts an optimiser, with what it remembers so far, on the device. Where ranks are not nil it
// updates this rank's part.
func New(m Machine, rules optim.Rules, params []*Param, maxNorm float64, ranks *Ranks) (*Optimizer,
	error) {
	if !slices.ContainsFunc(params, func(p *Param) bool { return !p.Apart }) {
		for _, p := range params { // there is nothing to be apart from
			p.Apart = false
		}
	}
	x := &Optimizer{Rules: rules, Params: params, m: m,
		memory:   run.Memory{Ctx: m.Ctx, Kept: m.Memory.Kept},
		settings: optimizer.Control{MaxNorm: maxNorm, GradScale: 1}}
	divide := func() error { return x.divide(ranks) }
	if err := run.InTurn(divide, x.loadState, x.buildTables, x.allocate, x.flag); err != nil {
		return nil, run.Joined(err, m.Ctx.SyncStream(m.Stream), x.Close())
	}
	return x, nil
}

// allocate takes what an update needs beside the tables.
func (x *Optimizer) allocate() (err error) {
	x.control, err = x.memory.Alloc(optimizer.ControlBytes+4*(x.sums()+x.workspace()),
		"the optimiser")
	if err != nil {
		return err
	}
	x.squares = x.control.Offset(optimizer.ControlBytes)
	host, err := x.memory.AllocHost(optimizer.ControlBytes + 4)
	if err != nil {
		return err
	}
	clear(host)
	x.staging, x.loss = host[:optimizer.ControlBytes], host[optimizer.ControlBytes:]
	for _, e := range []*gpu.Event{&x.ran, &x.judged, &x.updated} {
		if *e, err = x.memory.NewEvent(false); err != nil {
			return err
		}
	}
	return nil
}

// flag tells the device which sums of squares are of gradients that are clipped apart: in the order
// in which the update adds them up. The last, of the loss, is of none.
func (x *Optimizer) flag() (err error) {
	flags := make([]byte, x.sums())
	for i, p := range x.chunks {
		if p.Apart {
			flags[i] = 1
		}
	}
	if !slices.Contains(flags, 1) {
		return nil
	}
	if x.apart, err = x.memory.Alloc(len(flags), "the optimiser"); err != nil {
		return err
	}
	return x.m.Ctx.CopyToDevice(x.apart, flags, x.m.Stream)
}

// Updates reports whether the optimiser changes an input.
func (x *Optimizer) Updates(in *program.Input) bool {
	return slices.ContainsFunc(x.Params, func(p *Param) bool { return p.Input == in })
}

// Bytes is what an update has to move. It reads gradients for their norm, and then these,
// parameters and moments, and writes the last two and the parameters' copies. Those of float8,
// which are made of the others, it does not count. Without an optimiser it is 0.
func (x *Optimizer) Bytes() (n float64) {
	if x == nil {
		return 0
	}
	n = 2 * x.gradientBytes()
	for _, p := range x.Params {
		for _, a := range append([]*program.Array{p.Input.Array}, p.Moments...) {
			n += 2 * float64(a.Extent())
		}
		for _, c := range p.Input.Copies {
			n += float64(c.Extent())
		}
	}
	return n
}

func (x *Optimizer) gradientBytes() (n float64) {
	for _, p := range x.Params {
		n += float64(p.Grad.Extent())
	}
	return n
}

// Held is the bytes of device memory that the optimiser holds.
func (x *Optimizer) Held() int {
	if x == nil {
		return 0
	}
	return x.memory.Held()
}

// sums is how many sums of squares an update adds up: of all chunks, and of the loss.
func (x *Optimizer) sums() int { return len(x.chunks) + 1 }

// Newer reports whether the device remembers what the host does not.
func (x *Optimizer) Newer() bool { return x.Steps > 0 || x.newer }

// Forgot notes that the device has forgotten something that the host remembers.
func (x *Optimizer) Forgot() { x.newer = true }

// loadState gives the device what the optimiser remembers, or what a machine before has left there.
func (x *Optimizer) loadState() error {
	var known map[string]optim.Tensor // asked for when it is needed: it is copied
	for i, p := range x.Params {
		name, kept := p.Input.Node.Name(), x.m.Kept(p.Input)
		if kept != nil {
			x.newer, p.Step = true, kept.Step
		} else if known == nil {
			known = map[string]optim.Tensor{}
			for _, t := range x.State() {
				known[t.Name] = t
			}
		}
		if t, ok := known[name+".step"]; ok && kept == nil {
			p.Step = t.Data.([]int64)[0]
		}
		for _, m := range p.Rule.Kernel.Moments {
			a, err := x.loadMoment(i, m, kept, known[name+"."+m.Name])
			if err != nil {
				return err
			}
			p.Moments = append(p.Moments, a)
		}
	}
	return x.m.Ctx.SyncStream(x.m.Stream)
}

// loadMoment puts a moment of this rank's part of a parameter on the device. It takes over the memory
// in which another machine has kept the moment, or copies it if the memory cannot be taken over. If
// none has, the moment is what the optimizer knows, or zero.
func (x *Optimizer) loadMoment(i int, m optim.Moment, kept *run.KeptParam,
	known optim.Tensor) (a *program.Array, err error) {
	ctx, s := x.m.Ctx, x.m.Stream
	a, from := x.newMoment(i, m)
	if kept != nil {
		if a.Base = kept.Moments[m.Name]; a.Base == 0 {
			return nil, fmt.Errorf("%s has no %s, which another optimizer remembers",
				x.Params[i].Input.Node.Name(), m.Name)
		}
		if x.memory.Take(a.Base, a.Bytes) {
			return a, nil
		}
	}

	before := a.Base
	if a.Base, err = x.memory.Alloc(a.Bytes, "the optimizer's state"); err != nil {
		return nil, err
	}
	if kept != nil {
		at := before.Offset(from * a.Type.Size())
		return a, ctx.CopyOnDevice(a.Base, at, a.Extent(), s)
	}

	var data []byte
	switch known := known.Data.(type) {
	case []float32:
		data = gpu.Bytes(known[from : from+a.Len()])
	case []uint8:
		data = known[from : from+a.Len()]
	}
	if len(data) == 0 {
		return a, ctx.Memset8(a.Base, m.Zero(), a.Bytes, s)
	}
	return a, ctx.CopyToDevice(a.Base, data, s)
}

// newMoment returns an array, without memory, for a moment of this rank's part of a parameter, and the
// first element of the moment that belongs to the part.
func (x *Optimizer) newMoment(i int, m optim.Moment) (a *program.Array, from int) {
	own := x.own(i)
	from, to := m.Part(optim.Part{From: own.from, To: own.to})
	t := gpu.Float32
	if m.Codes != nil {
		t = gpu.Uint8
	}
	return new(program.Program).NewResident(t, max(0, to-from)), from
}

// Forget makes zero what this rank remembers of the elements from ≤ e < to of parameter number i. Scales
// stay, as [optim.Moment.Forget] says.
func (x *Optimizer) Forget(i, from, to int) error {
	own := x.own(i)
	if from, to = max(from, own.from)-own.from, min(to, own.to)-own.from; from >= to {
		return nil
	}

	p := x.Params[i]
	for k, m := range p.Rule.Kernel.Moments {
		if m.Block > 1 {
			continue
		}
		a := p.Moments[k]
		size := a.Type.Size()
		if err := x.m.Ctx.Memset8(a.Ptr().Offset(from*size), m.Zero(), (to-from)*size,
			x.m.Stream); err != nil {
			return err
		}
	}
	return nil
}

// Leave hands the parameters, which are in a memory, and their moments to k. The stream is idle.
func (x *Optimizer) Leave(k *run.Kept, values *run.Memory) {
	for _, p := range x.Params {
		kept := &run.KeptParam{Value: p.Input.Array.Ptr(), Len: p.Input.Array.Len(),
			Moments: map[string]gpu.Ptr{}, Step: p.Step + int64(x.Steps)}
		values.Leave(k, kept.Value)
		for i, m := range p.Rule.Kernel.Moments {
			kept.Moments[m.Name] = p.Moments[i].Ptr()
			x.memory.Leave(k, p.Moments[i].Ptr())
		}
		k.Params[p.Input.Node.Name()] = kept
	}
}

// buildTables lays out the parameters for the kernels. The chunks of squares are in an order that
// does not depend on the number of ranks.
func (x *Optimizer) buildTables() error {
	if err := x.sort(); err != nil {
		return err
	}

	var all []optimizer.Tensor
	for i, p := range x.Params {
		t := x.tensorOf(i)
		t.FirstChunk = int32(len(x.chunks) + x.own(i).from/optimizer.Chunk)
		x.copies(p, &t)
		for range kernel.CeilDiv(p.Grad.Len(), optimizer.Chunk) {
			x.chunks = append(x.chunks, p)
		}
		x.settings.Eps = cmp.Or(p.Rule.Eps, x.settings.Eps)

		if t.Size > 0 { // otherwise it is another rank's
			f := x.familyOf(p)
			f.tensors, f.params = append(f.tensors, t), append(f.params, p)
			all = append(all, t)
		}
	}

	for _, f := range x.families {
		if f.prepare == nil {
			continue
		}
		if err := f.prepare(x, f); err != nil {
			return err
		}
	}

	ctx, alloc := x.m.Ctx, x.memory.For("the optimiser")
	var errs []error
	for _, f := range x.families {
		table, err := optimizer.NewTable(ctx, alloc, f.tensors)
		f.table, errs = table, append(errs, err)
	}
	scattered, err := optimizer.NewScattered(ctx, alloc, all, len(x.chunks))
	x.all = scattered
	return run.Joined(append(errs, err)...)
}

// Enqueue puts an update at the present learning rate on its way. Its norm comes back before the
// rest of it begins, which so hides what the host does until the next run. With a loss that is not
// finite the parameters stay as they are, and its value comes back too. The observer enqueues the
// parts of the update.
func (x *Optimizer) Enqueue(loss *program.Array, o run.Observer) error {
	ctx, s := x.m.Ctx, x.m.Stream
	x.settings.LR = x.LR()
	if want := x.settings.Bytes(); !bytes.HasPrefix(x.staging, want[:optimizer.ControlSettings]) {
		copy(x.staging, want)
		if err := ctx.CopyToDevice(x.control, x.staging, s); err != nil {
			clear(x.staging)
			return err
		}
	}
	var at gpu.Ptr
	if loss != nil {
		at = loss.Ptr()
		if err := ctx.CopyToHost(x.loss, loss.Ptr(), s); err != nil {
			return err
		}
	}
	if err := ctx.Record(x.ran, s); err != nil {
		return err
	}
	part := func(at gpu.Ptr, bytes float64, plain func() error) error {
		r := x.recorded.Of(at)
		return o.UpdatePart(run.Work{
			Replay:    func() error { return x.m.Replay(r, !x.uncaptured, plain) },
			Plain:     plain,
			Captured:  r.Loaded && !x.uncaptured,
			Optimizer: x,
			Bytes:     bytes,
		})
	}
	looking := x.gradientBytes()
	return run.InTurn(
		func() error { return x.Arrive(s) }, // what came has been waited for when all meet in it
		func() error { return part(at, looking, func() error { return x.judge(loss) }) },
		func() error {
			x.m.State.On(run.Look) // also where judge was captured before
			return ctx.CopyToHost(x.staging, x.control, s)
		},
		func() error { return ctx.Record(x.judged, s) },
		func() error { return part(rest, x.Bytes()-looking, x.apply) },
		func() error { return x.bringHome(true) },
		func() error { return ctx.Record(x.updated, s) })
}

// rest is no loss's address.
const rest gpu.Ptr = 1

// WaitForRun waits for the run before the update.
func (x *Optimizer) WaitForRun() error { return x.m.Ctx.SyncEvent(x.ran) }

// Loss is what the update looks at, when the run has been waited for.
func (x *Optimizer) Loss() float32 { return gpu.View[float32](x.loss)[0] }

// Wait waits until it is known whether the update is made, and returns its control block.
func (x *Optimizer) Wait() (optimizer.Control, error) {
	if err := x.m.Ctx.SyncEvent(x.judged); err != nil {
		return optimizer.Control{}, err
	}
	c := optimizer.DecodeControl(x.staging)
	if !c.Skipped {
		x.Steps++
	}
	return c, nil
}

// judge forms the norm of the gradients, of those of all ranks. Where there is a loss, 0·loss stands
// among the squares: 0, which leaves their sum as it is, or NaN, at which the update is not made, at
// any rank.
func (x *Optimizer) judge(loss *program.Array) error {
	at := x.squares.Offset(4 * len(x.chunks))
	byLoss := program.Prepared(program.Zero{Ptr: at, Bytes: 4})
	if loss != nil {
		l := elementwise.Unary{Op: elementwise.MulScalar, Y: at, N: 1, Type: gpu.Float32}
		byLoss = program.NewCall(&l, program.Reads(&l.X, loss))
	}
	squares := program.Prepared(x.squared())
	norm := optimizer.GradNorm{Control: x.control, Squares: x.squares, Count: x.sums(),
		Apart: x.apart}
	judge := program.NewCall(&norm, program.Updates(&norm.Scale, x.m.Program.Scale))
	return run.InTurn(
		func() error { return x.m.Calls([]*program.Call{named(squares), named(byLoss)}) },
		x.gatherSquares,
		func() error { return x.m.Call(named(judge)) })
}

// apply makes the calls that change the parameters, all of them, or with other ranks those of this
// rank, and brings the others'. Then it makes anew what is made of them. A table without tensors
// launches nothing.
func (x *Optimizer) apply() error {
	var calls []*program.Call
	for _, f := range x.families {
		calls = append(calls, f.calls(x, f)...)
	}
	return run.InTurn(
		func() error { return x.m.Calls(calls) },
		func() error { return x.bringHome(false) },
		func() error { return x.m.Calls(x.renew) },
		func() error { return x.m.Inputs.Quantize(x.Updates) },
		func() error { return ClearSums(x.m.Runner) })
}

// ClearSums sets the gathered gradients of a program to zero.
func ClearSums(r *run.Runner) error {
	params := slices.SortedFunc(maps.Keys(r.Program.Sums),
		func(a, b *gorgonia.Node) int { return cmp.Compare(a.ID(), b.ID()) })
	for _, p := range params {
		s := r.Program.Sums[p]
		if err := r.Launch(program.Zero{Ptr: s.Ptr(), Bytes: s.Buffer.Bytes}); err != nil {
			return err
		}
	}
	return nil
}

// named gives a call the names of the update.
func named(c *program.Call) *program.Call {
	c.Op, c.Node = "Update", "the update"
	return c
}

// squared is the launch that forms all sums of squares that this rank has to form.
func (x *Optimizer) squared() optimizer.GradSquares {
	return optimizer.GradSquares{Squares: x.squares, Table: x.all}
}

// Close gives back all memory, once nothing moves there any more. The machine's stream is idle, but
// not that of the exchange, nor other ranks, which may still write here.
func (x *Optimizer) Close() error {
	if x == nil {
		return nil
	}
	return run.Joined(x.recorded.Drop(x.m.Ctx), x.shut(), x.memory.Close())
}

// NonFinite returns the parameters whose gradients have an element that is NaN or infinite, or are so
// large that their norm is. Of other ranks' parts it knows when an update has looked at them.
func (x *Optimizer) NonFinite() (map[*gorgonia.Node]bool, error) {
	if !x.m.State.Looked() {
		if err := x.m.Launch(x.squared()); err != nil {
			return nil, err
		}
	}
	squares := make([]float32, len(x.chunks))
	if err := x.m.Ctx.CopyToHost(gpu.Bytes(squares), x.squares, x.m.Stream); err != nil {
		return nil, err
	}
	bad := map[*gorgonia.Node]bool{}
	for chunk, v := range squares {
		if v-v != 0 {
			bad[x.chunks[chunk].Input.Node] = true
		}
	}
	return bad, nil
}
