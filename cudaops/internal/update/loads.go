package update

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
)

// load is a set of parameters that travel together from their owners to all ranks. They arrive during
// the next run, which waits for the load before the first call that reads one of its parameters.
type load struct {
	pack    // in the order of the calls that first read the parameters
	route   comm.Route
	arrived gpu.Event // the parameters have arrived
}

// planLoads groups the parameters into loads, places incoming parameters next to each other, and
// creates the routes of the loads.
func (x *Optimizer) planLoads() error {
	s := x.share
	if s.group.Size() == 1 {
		return nil
	}

	total := 0
	for i := range x.Params {
		total += x.sentArray(i).Extent()
	}

	for _, p := range x.packs(max(s.minBytes, total/maxPacks), x.sentArray, x.firstTouch) {
		s.loads = append(s.loads, &load{pack: p})
	}

	if err := x.makeContiguous(); err != nil {
		return err
	}

	for i, l := range s.loads {
		var err error
		if l.arrived, err = x.memory.NewEvent(false); err != nil {
			return err
		}
		if l.route, err = x.routeOf(l, s.slots+i); err != nil {
			return err
		}
		l.route.Open() // no run is in progress, since the sums of squares come after all runs
	}

	return nil
}

// firstTouch returns the index of the first call of a run that touches an array's buffer, or the
// number of calls if none does.
func (x *Optimizer) firstTouch(a *program.Array) int {
	calls := x.m.Program.Calls
	touches := func(c *program.Call) bool { return c.Touches(a.Buffer) }
	if i := slices.IndexFunc(calls, touches); i >= 0 {
		return i
	}
	return len(calls)
}

// makeContiguous moves the arrays that come from other ranks to consecutive memory.
func (x *Optimizer) makeContiguous() error {
	if x.m.Inputs.Contiguous {
		return nil
	}

	var buffers []*program.Buffer
	var room kernel.Carve
	for _, l := range x.share.loads {
		for _, i := range l.params {
			a := x.sentArray(i)
			if slices.Contains(buffers, a.Buffer) {
				continue
			}
			if !x.m.Memory.Owns(a.Base) {
				return fmt.Errorf("%s lies in memory that is not the machine's: ranks that train "+
					"together cannot use bound parameters", x.Params[i].Input.Node.Name())
			}
			buffers = append(buffers, a.Buffer)
			room.Take(a.Bytes)
		}
	}

	var err error
	if room.At, err = x.m.Memory.Alloc(max(1, int(room.At)), "parameters"); err != nil {
		return err
	}

	x.m.Inputs.Contiguous = true
	for _, b := range buffers {
		at := room.Take(b.Bytes)
		if err := run.InOrder(
			func() error { return x.m.Ctx.CopyOnDevice(at, b.Base, b.Bytes, x.m.Stream) },
			func() error { return x.m.Ctx.SyncStream(x.m.Stream) },
			func() error { return x.m.Memory.Free(b.Base) }); err != nil {
			return err
		}
		b.Base = at
	}

	return nil
}

// routeOf returns the route of a load. Adjacent parts are sent together.
func (x *Optimizer) routeOf(l *load, slot int) (comm.Route, error) {
	s, me := x.share, x.share.group.Rank()
	have := make([][]stretch, s.group.Size()) // each rank's parts, at their addresses here
	for _, i := range l.params {
		a := x.sentArray(i)
		at := func(element int) gpu.Ptr { return a.Ptr().Offset(element * a.Type.Size()) }
		for r, p := range s.parts[i] {
			if p.len() > 0 {
				have[r] = append(have[r], stretch{a.Buffer, at(p.from), at(p.to)})
			}
		}
	}

	var sends, receives []comm.Leg
	for r := range have {
		if r == me {
			continue
		}
		for _, own := range mergeStretches(have[me]) {
			sends = append(sends, own.leg(r))
		}
		for _, theirs := range mergeStretches(have[r]) {
			receives = append(receives, theirs.leg(r))
		}
	}

	return comm.NewRoute(s.group, slot, sends, receives)
}

// A stretch is a range of device memory. It lies in one buffer or extends over consecutive ones, the last of
// which is the field of.
type stretch struct {
	of       *program.Buffer
	from, to gpu.Ptr
}

func (s stretch) leg(rank int) comm.Leg {
	return comm.Leg{Rank: rank, At: ptr(s.from), Bytes: int(s.to - s.from)}
}

// mergeStretches sorts stretches by address and merges adjacent ones, even if they are separated by padding for
// alignment.
func mergeStretches(some []stretch) (all []stretch) {
	some = slices.SortedFunc(slices.Values(some), func(a, b stretch) int {
		return cmp.Compare(a.from, b.from)
	})
	for _, l := range some {
		if n := len(all); n > 0 {
			last := &all[n-1]
			end := last.of.Base.Offset(last.of.Bytes)
			if l.from == last.to || last.to == end && l.from == l.of.Base &&
				l.from-end < program.Alignment {
				last.of, last.to = l.of, l.to
				continue
			}
		}
		all = append(all, l)
	}

	return all
}

// canOverlap reports whether parameters can be transferred during the next run. They cannot if something
// must be computed from them before the run.
func (x *Optimizer) canOverlap() bool {
	return len(x.copyUpdates) == 0 && len(x.m.Program.Weights) == 0
}

// sendLoads sends the parameters to all ranks. If during is true, they are transferred during the next
// run, after the work that has already been enqueued on the machine's stream. Otherwise, the transfer
// is part of the update. Machines support only one of the two, and the other call does nothing.
func (x *Optimizer) sendLoads(during bool) error {
	s, ctx, on := x.share, x.m.Ctx, x.m.Stream
	if s == nil || len(s.loads) == 0 || x.canOverlap() != during {
		return nil
	}

	if during {
		on = s.side.Stream
		if err := x.fork(); err != nil {
			return err
		}
	}

	for _, l := range s.loads {
		err := l.route.Enqueue(comm.Stream(on))
		if err == nil && during {
			err = ctx.Record(l.arrived, on)
		}
		if err != nil {
			return err
		}
	}

	return nil
}

// awaitLoads makes a run wait for the parameters that its next call is the first to read.
func (x *Optimizer) awaitLoads(call int) error {
	for _, l := range x.share.loads {
		if l.first != call {
			continue
		}
		wait := x.m.Ctx.WaitEvent
		if x.m.State.Capturing() {
			wait = x.m.Ctx.Await
		}
		if err := wait(x.m.Stream, l.arrived); err != nil {
			return err
		}
	}

	return nil
}

// Arrive makes a stream wait until all parameters are up to date: for an update in progress on another
// stream, and for parameters from other ranks. Anything but a run of the machine itself must call it
// before it reads or writes parameters.
func (x *Optimizer) Arrive(stream gpu.Stream) error {
	if x == nil {
		return nil
	}

	if stream != x.m.Stream {
		if err := x.m.Ctx.WaitEvent(stream, x.updated); err != nil {
			return err
		}
	}

	if x.share == nil || len(x.share.loads) == 0 {
		return nil
	}

	loads := x.share.loads
	return x.m.Ctx.WaitEvent(stream, loads[len(loads)-1].arrived)
}
