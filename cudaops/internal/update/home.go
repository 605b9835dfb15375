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

// load is parameters that come back together from those who have updated them. They come beside the
// next run, which waits for them where it first reads one.
type load struct {
	pack  // ordered by these calls
	route comm.Route
	home  gpu.Event // they are there
}

// arrange puts the parameters in loads, and gives what comes from others a place in one piece of
// memory. It makes the routes by which that comes.
func (x *Optimizer) arrange() error {
	s := x.share
	if s.group.Size() == 1 {
		return nil
	}
	total := 0
	for i := range x.Params {
		total += x.traveller(i).Extent()
	}
	for _, p := range x.packs(max(s.least, total/mostHeld), x.traveller, x.firstTouch) {
		s.loads = append(s.loads, &load{pack: p})
	}
	if err := x.lay(); err != nil {
		return err
	}
	for i, l := range s.loads {
		var err error
		if l.home, err = x.memory.NewEvent(false); err != nil {
			return err
		}
		if l.route, err = x.routeOf(l, s.slots+i); err != nil {
			return err
		}
		l.route.Open() // all runs are over: the sums of squares were added up behind them
	}
	return nil
}

// firstTouch is the number of a run's first call that touches an array's buffer, behind all where
// none does.
func (x *Optimizer) firstTouch(a *program.Array) int {
	calls := x.m.Program.Calls
	touches := func(c *program.Call) bool { return c.Touches(a.Buffer) }
	if i := slices.IndexFunc(calls, touches); i >= 0 {
		return i
	}
	return len(calls)
}

// lay gives what comes from other ranks places one behind the other.
func (x *Optimizer) lay() error {
	if x.m.Inputs.Laid {
		return nil
	}
	var buffers []*program.Buffer
	var room kernel.Carve
	for _, l := range x.share.loads {
		for _, i := range l.params {
			a := x.traveller(i)
			if slices.Contains(buffers, a.Buffer) {
				continue
			}
			if !x.m.Memory.Owns(a.Base) {
				return fmt.Errorf("%s lies in memory that is not the machine's: ranks that train "+
					"together cannot bind parameters", x.Params[i].Input.Node.Name())
			}
			buffers = append(buffers, a.Buffer)
			room.Take(a.Bytes)
		}
	}
	var err error
	if room.At, err = x.m.Memory.Alloc(max(1, int(room.At)), "parameters"); err != nil {
		return err
	}
	x.m.Inputs.Laid = true
	for _, b := range buffers {
		at := room.Take(b.Bytes)
		if err := run.InTurn(
			func() error { return x.m.Ctx.CopyOnDevice(at, b.Base, b.Bytes, x.m.Stream) },
			func() error { return x.m.Ctx.SyncStream(x.m.Stream) },
			func() error { return x.m.Memory.Free(b.Base) }); err != nil {
			return err
		}
		b.Base = at
	}
	return nil
}

// routeOf is the route of a load: what lies side by side goes at once.
func (x *Optimizer) routeOf(l *load, slot int) (comm.Route, error) {
	s, me := x.share, x.share.group.Rank()
	have := make([][]stretch, s.group.Size()) // what each rank has, as it lies here
	for _, i := range l.params {
		a := x.traveller(i)
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
		for _, own := range joined(have[me]) {
			sends = append(sends, own.leg(r))
		}
		for _, theirs := range joined(have[r]) {
			receives = append(receives, theirs.leg(r))
		}
	}
	return comm.NewRoute(s.group, slot, sends, receives)
}

// stretch is memory of a buffer, or of several that lie one behind the other, of which it is the
// last.
type stretch struct {
	of       *program.Buffer
	from, to gpu.Ptr
}

func (s stretch) leg(rank int) comm.Leg {
	return comm.Leg{Rank: rank, At: ptr(s.from), Bytes: int(s.to - s.from)}
}

// joined are stretches in the order of addresses, as one where there is nothing between them, or
// nothing but what aligns the second.
func joined(some []stretch) (all []stretch) {
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

// hides reports whether parameters come back beside the next run: nothing has to be made of them
// when they are there.
func (x *Optimizer) hides() bool {
	return len(x.renew) == 0 && len(x.m.Program.Weights) == 0
}

// bringHome brings the parameters to all ranks. Beside the next run they come behind what the
// machine's stream has been given, where nothing else is to wait for that; else as a part of the
// update. It does nothing where they come in the other way.
func (x *Optimizer) bringHome(beside bool) error {
	s, ctx, on := x.share, x.m.Ctx, x.m.Stream
	if s == nil || len(s.loads) == 0 || x.hides() != beside {
		return nil
	}
	if beside {
		on = s.side.Stream
		if err := x.fork(); err != nil {
			return err
		}
	}
	for _, l := range s.loads {
		err := l.route.Enqueue(comm.Stream(on))
		if err == nil && beside {
			err = ctx.Record(l.home, on)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// await has a run wait for the parameters that its next call is the first to read.
func (x *Optimizer) await(call int) error {
	for _, l := range x.share.loads {
		if l.first != call {
			continue
		}
		wait := x.m.Ctx.WaitEvent
		if x.m.State.Capturing() {
			wait = x.m.Ctx.Await
		}
		if err := wait(x.m.Stream, l.home); err != nil {
			return err
		}
	}
	return nil
}

// Arrive has a stream wait for all parameters: for an update under way, where that is on another
// stream, and for what comes from other ranks. Whatever reads or writes parameters, but for a run of
// the machine's own, comes behind it.
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
	return x.m.Ctx.WaitEvent(stream, loads[len(loads)-1].home)
}
