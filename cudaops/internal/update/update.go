// Package update applies optimizers on the device. An Optimizer owns the moments, the control block
// and the calls of an update, which form a separate program. It uses the machine's runner and inputs,
// but they don't depend on it.
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

// Runtime is the part of a machine that an optimizer needs to update its parameters.
type Runtime struct {
	*run.Runner
	Chooser    *choose.Chooser
	Activation gpu.DType // type of activations

	// Kept returns the moments that an earlier machine left for a parameter, or nil.
	Kept func(*program.Input) *run.KeptParam
}

// Param is a parameter and its optimizer state on the device.
type Param struct {
	Input          *program.Input
	Grad           *program.Array
	Rule           optim.Rule
	Moments        []*program.Array // in the order of the kernel's moments
	Step           int64            // updates before the first on this device
	ClipSeparately bool             // the gradient is clipped together with other gradients with this setting only
}

// Optimizer updates a machine's parameters on the device.
type Optimizer struct {
	optim.Rules
	Params []*Param
	Steps  int // updates on the device

	// Abandoned reports whether an update was started but not waited for, so that Steps is unknown.
	Abandoned bool

	m           Runtime
	memory      run.Memory
	families    []*family
	all         *optimizer.Table // for the gradients' squares
	chunks      []*Param         // the parameter of each chunk, in the order of Params
	control     gpu.Ptr          // optimizer.Control
	staging     []byte           // the control block in pinned memory
	squares     gpu.Ptr          // sums of all chunks and of the loss, then the families' workspace
	apart       gpu.Ptr          // flags the sums of separately clipped gradients; null if there are none
	settings    optimizer.Control
	loss        []byte                  // the loss of a step in pinned memory
	ran         gpu.Event               // the run before the update has ended
	judged      gpu.Event               // the control block has returned to the host
	updated     gpu.Event               // this rank's parameters are up to date
	recorded    run.Recordings[gpu.Ptr] // first halves by the loss's address or 0, second half by rest
	copyUpdates []*program.Call         // calls that update the copies not written by the update kernels
	share       *share                  // this rank's share; nil if it is the only rank
	uncaptured  bool                    // collectives cannot be captured
	newer       bool                    // the state on the device is newer than the host's
}

// Ranks describes the ranks that make an update together.
type Ranks struct {
	Group      comm.Group
	Uncaptured bool // the group's work cannot be captured
	Bucket     int  // least size of a bucket in bytes; 0 for a size that is fast
	Rounds     int  // rounds of a step; 0 for any number
}

// New moves an optimizer with its state to the device. If ranks is not nil, the optimizer updates
// this rank's part of the parameters.
func New(m Runtime, rules optim.Rules, params []*Param, maxNorm float64, ranks *Ranks) (*Optimizer,
	error) {
	if !slices.ContainsFunc(params, func(p *Param) bool { return !p.ClipSeparately }) {
		for _, p := range params { // if all are apart, none is
			p.ClipSeparately = false
		}
	}

	x := &Optimizer{Rules: rules, Params: params, m: m,
		memory:   run.Memory{Ctx: m.Ctx, Kept: m.Memory.Kept},
		settings: optimizer.Control{MaxNorm: maxNorm, GradScale: 1}}

	divide := func() error { return x.divide(ranks) }
	if err := run.InOrder(divide, x.loadState, x.buildTables, x.allocate, x.uploadApartFlags); err != nil {
		return nil, run.Joined(err, m.Ctx.SyncStream(m.Stream), x.Close())
	}

	return x, nil
}

// allocate takes the memory and events that an update needs besides the tables.
func (x *Optimizer) allocate() (err error) {
	x.control, err = x.memory.Alloc(optimizer.ControlBytes+4*(x.sums()+x.workspace()),
		"the optimizer")
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

// uploadApartFlags informs the device which sums of squares belong to gradients that are clipped
// separately. The flags are in the order of the sums. The last sum belongs to the loss rather than to
// a gradient.
func (x *Optimizer) uploadApartFlags() (err error) {
	flags := make([]byte, x.sums())
	for i, p := range x.chunks {
		if p.ClipSeparately {
			flags[i] = 1
		}
	}

	if !slices.Contains(flags, 1) {
		return nil
	}

	if x.apart, err = x.memory.Alloc(len(flags), "the optimizer"); err != nil {
		return err
	}

	return x.m.Ctx.CopyToDevice(x.apart, flags, x.m.Stream)
}

// Updates reports whether the optimizer changes an input.
func (x *Optimizer) Updates(in *program.Input) bool {
	return slices.ContainsFunc(x.Params, func(p *Param) bool { return p.Input == in })
}

// Bytes returns the number of bytes that an update moves. It reads the gradients for their norm, reads
// gradients, parameters and moments, and writes parameters, moments and the parameters' copies. Float8
// copies, which derive from the other copies, do not count. A nil Optimizer moves nothing.
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

// Held returns the number of bytes of device memory that the optimizer holds.
func (x *Optimizer) Held() int {
	if x == nil {
		return 0
	}
	return x.memory.Held()
}

// sums returns the number of sums of squares that an update adds up: one for each chunk, and one
// for the loss.
func (x *Optimizer) sums() int { return len(x.chunks) + 1 }

// Newer reports whether the state on the device is newer than the host's.
func (x *Optimizer) Newer() bool { return x.Steps > 0 || x.newer }

// StateCleared notes that part of the state on the device has been cleared.
func (x *Optimizer) StateCleared() { x.newer = true }

// loadState copies the optimizer's state to the device, or adopts the state that an earlier machine
// left there.
func (x *Optimizer) loadState() error {
	var known map[string]optim.Tensor // the optimizer's state, copied when it is first needed
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
// of another machine's moment, or copies the moment if the memory cannot be taken over. If no machine
// left the moment, its value comes from the optimizer, or is zero.
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

// Forget clears this rank's moments of the elements from ≤ e < to of parameter number i. Scales are
// not cleared: see [optim.Moment.Forget].
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

// HandOver hands over to k the parameters, owned by values, and their moments. The stream must be idle.
func (x *Optimizer) HandOver(k *run.Kept, values *run.Memory) {
	for _, p := range x.Params {
		kept := &run.KeptParam{Value: p.Input.Array.Ptr(), Len: p.Input.Array.Len(),
			Moments: map[string]gpu.Ptr{}, Step: p.Step + int64(x.Steps)}
		values.HandOver(k, kept.Value)
		for i, m := range p.Rule.Kernel.Moments {
			kept.Moments[m.Name] = p.Moments[i].Ptr()
			x.memory.HandOver(k, p.Moments[i].Ptr())
		}
		k.Params[p.Input.Node.Name()] = kept
	}
}

// buildTables lays out the parameters for the kernels. The order of the chunks does not depend on
// the number of ranks.
func (x *Optimizer) buildTables() error {
	if err := x.createFamilies(); err != nil {
		return err
	}

	var all []optimizer.Tensor
	for i, p := range x.Params {
		t := x.tensorOf(i)
		t.FirstChunk = int32(len(x.chunks) + x.own(i).from/optimizer.Chunk)
		x.planCopies(p, &t)
		for range kernel.CeilDiv(p.Grad.Len(), optimizer.Chunk) {
			x.chunks = append(x.chunks, p)
		}
		x.settings.Eps = cmp.Or(p.Rule.Eps, x.settings.Eps)

		if t.Size > 0 { // otherwise it belongs to another rank
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

	ctx, alloc := x.m.Ctx, x.memory.For("the optimizer")
	var errs []error
	for _, f := range x.families {
		table, err := optimizer.NewTable(ctx, alloc, f.tensors)
		f.table, errs = table, append(errs, err)
	}

	scattered, err := optimizer.NewScattered(ctx, alloc, all, len(x.chunks))
	x.all = scattered
	return run.Joined(append(errs, err)...)
}

// Enqueue enqueues an update at the optimizer's current learning rate.
//
// The norm returns to the host before the second half of the update, which hides the host's work up to
// the next run. If the loss is not finite, no parameter changes. The value of the loss also returns to
// the host. The observer enqueues the halves of the update.
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
		r := x.recorded.Get(at)
		return o.UpdatePart(run.Work{
			Replay:    func() error { return x.m.Replay(r, !x.uncaptured, plain) },
			Plain:     plain,
			Captured:  r.Loaded && !x.uncaptured,
			Optimizer: x,
			Bytes:     bytes,
		})
	}

	looking := x.gradientBytes()
	return run.InOrder(
		func() error { return x.Arrive(s) }, // incoming parameters arrive before all ranks meet
		func() error { return part(at, looking, func() error { return x.judge(loss) }) },
		func() error {
			x.m.State.On(run.ComputeNorm) // also if judge was captured before
			return ctx.CopyToHost(x.staging, x.control, s)
		},
		func() error { return ctx.Record(x.judged, s) },
		func() error { return part(secondHalf, x.Bytes()-looking, x.apply) },
		func() error { return x.sendLoads(true) },
		func() error { return ctx.Record(x.updated, s) })
}

// secondHalf is the key of the second half's recording. No loss has this address.
const secondHalf gpu.Ptr = 1

// WaitForRun waits for the run that precedes the update.
func (x *Optimizer) WaitForRun() error { return x.m.Ctx.SyncEvent(x.ran) }

// Loss returns the loss of the update, after WaitForRun.
func (x *Optimizer) Loss() float32 { return gpu.View[float32](x.loss)[0] }

// Wait waits until the device has decided whether to apply the update, and returns the control block.
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

// judge computes the norm of all ranks' gradients. If there is a loss, the squares include 0·loss.
// This is 0 and does not change the sum, or it is NaN and prevents the update on all ranks.
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
	return run.InOrder(
		func() error { return x.m.Calls([]*program.Call{named(squares), named(byLoss)}) },
		x.gatherSquares,
		func() error { return x.m.Call(named(judge)) })
}

// apply enqueues the calls that update this rank's parameters, fetch the parameters of other ranks,
// and update everything that is computed from parameters. A table without tensors launches nothing.
func (x *Optimizer) apply() error {
	var calls []*program.Call
	for _, f := range x.families {
		calls = append(calls, f.calls(x, f)...)
	}
	return run.InOrder(
		func() error { return x.m.Calls(calls) },
		func() error { return x.sendLoads(false) },
		func() error { return x.m.Calls(x.copyUpdates) },
		func() error { return x.m.Inputs.Quantize(x.Updates) },
		func() error { return ClearSums(x.m.Runner) })
}

// ClearSums sets the accumulated gradients of a program to zero.
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

// named labels a call as part of the update.
func named(c *program.Call) *program.Call {
	c.Op, c.Node = "Update", "the update"
	return c
}

// squared returns the launch that computes this rank's sums of squares.
func (x *Optimizer) squared() optimizer.GradSquares {
	return optimizer.GradSquares{Squares: x.squares, Table: x.all}
}

// Close frees all memory once no transfer uses it. The machine's stream must be idle. The exchange
// stream, and other ranks that write to memory here, need not be.
func (x *Optimizer) Close() error {
	if x == nil {
		return nil
	}
	return run.Joined(x.recorded.Drop(x.m.Ctx), x.closeExchange(), x.memory.Close())
}

// NonFinite returns the parameters with gradients that contain NaN or infinity, or that are so large
// that their norm is infinite. Parts owned by other ranks are included only after the norm of an
// update has been computed.
func (x *Optimizer) NonFinite() (map[*gorgonia.Node]bool, error) {
	if !x.m.State.Normed() {
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
