package update

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
)

// An exchange of gradients takes place on a separate stream, during the run that computes the
// gradients. A bucket is sent as soon as its gradients are complete, while the run continues.
type exchange struct {
	side           run.Executor // on the stream of the exchange
	forked, joined gpu.Event
	expected       round // of the next run; without contributors, the run sends nothing
	sent           bool  // the last run's gradients have been sent and added
}

// round describes a round of contributions. Each kind of round is captured separately.
type round struct {
	contributors int
	first        bool
}

// openExchange creates the exchange's stream, events and routes.
func (x *Optimizer) openExchange() (err error) {
	s := x.share
	s.side = *x.m.Executor
	if s.side.Stream, err = x.m.Ctx.NewStream(true); err != nil {
		return err
	}

	for _, e := range []*gpu.Event{&s.forked, &s.joined} {
		if *e, err = x.memory.NewEvent(false); err != nil {
			return err
		}
	}

	return x.connect(s.group.Size())
}

// connect creates the routes for rounds with the given number of contributors, unless they exist.
// All ranks call it.
func (x *Optimizer) connect(contributors int) error {
	for _, b := range x.share.buckets {
		if b.routes[contributors] != nil {
			continue
		}
		route, err := x.contribution(b, contributors)
		if err != nil {
			return err
		}
		b.routes[contributors] = route
		if x.share.twoRanks {
			if err := route.Hold(); err != nil {
				return err
			}
		}
	}

	return nil
}

// contribution returns the route that takes a bucket's gradients to their owners.
func (x *Optimizer) contribution(b *bucket, contributors int) (comm.Route, error) {
	s, me := x.share, x.share.group.Rank()
	var sends, receives []comm.Leg

	for r := range s.group.Size() {
		if r != me && me < contributors {
			for _, p := range s.partsOf(b, r) {
				sends = append(sends,
					comm.Leg{Rank: r, At: ptr(p.contributed[me]), Bytes: x.bytes(p)})
			}
		}
		if r != me && r < contributors {
			for _, p := range s.partsOf(b, me) {
				receives = append(receives,
					comm.Leg{Rank: r, At: ptr(p.contributed[r]), Bytes: x.bytes(p)})
			}
		}
	}

	return comm.NewRoute(s.group, b.slot, sends, receives)
}

// bytes returns the size of a part's gradient.
func (x *Optimizer) bytes(p *part) int { return p.len() * x.Params[p.param].Grad.Type.Size() }

// closeExchange waits for the exchange, closes its routes and destroys its stream.
func (x *Optimizer) closeExchange() error {
	if x.share == nil || x.share.side.Stream == 0 {
		return nil
	}

	s := x.share

	errs := []error{x.m.Ctx.SyncStream(s.side.Stream)}
	for _, b := range s.buckets {
		for _, r := range b.routes {
			errs = append(errs, r.Close())
		}
	}

	for _, l := range s.loads {
		if l.route != nil {
			errs = append(errs, l.route.Close())
		}
	}

	errs = append(errs, x.m.Ctx.DestroyStream(s.side.Stream))
	return run.Joined(append(errs, s.rounds.Drop(x.m.Ctx))...)
}

// Expect announces the round of the next run. If all ranks contribute to it, gradients are sent
// during the run.
func (x *Optimizer) Expect(contributors int, first bool) error {
	s := x.share
	if err := s.checkRound(contributors, first); err != nil {
		return err
	}

	s.sent, s.expected = false, round{}
	if contributors == s.group.Size() && contributors > 1 {
		s.expected = round{contributors, first}
	}
	return nil
}

// checkRound returns an error if a round is not possible.
func (s *share) checkRound(contributors int, first bool) error {
	if contributors < 1 || contributors > s.group.Size() {
		return fmt.Errorf("%d contributions by %d ranks, want 1 to the number of ranks",
			contributors, s.group.Size())
	}
	if s.twoRanks && (contributors != 2 || !first) {
		return errors.New("WithRanks says that a step is one round of two ranks")
	}
	return nil
}

// NextMode implements run.Overlap.
func (x *Optimizer) NextMode() (kind byte, captured bool) {
	switch r := x.share.expected; {
	case r.contributors == 0:
		return 0, true
	case r.first:
		return 'f', !x.uncaptured
	}
	return 'g', !x.uncaptured
}

// EnqueueCalls enqueues the calls of a run. Before a call that is the first to read certain
// parameters, it waits for these parameters.
//
// If gradients are sent during the run, each bucket is sent as soon as its gradients are complete, and
// the machine's stream finally waits for the exchange.
func (x *Optimizer) EnqueueCalls(calls []*program.Call) error {
	s, ctx := x.share, x.m.Ctx
	var left []*bucket
	if s.expected.contributors > 0 {
		left = s.buckets
	}

	for i, c := range calls {
		if err := run.InOrder(func() error { return x.awaitLoads(i) },
			func() error { return x.m.Call(c) }); err != nil {
			return err
		}
		for ; len(left) > 0 && left[0].last <= i; left = left[1:] {
			if err := run.InOrder(x.fork, func() error {
				return x.send(left[0], s.expected, &s.side)
			}); err != nil {
				return err
			}
		}
	}

	if s.expected.contributors == 0 {
		return nil
	}

	return run.InOrder(func() error { return ctx.Record(s.joined, s.side.Stream) },
		func() error { return ctx.WaitEvent(x.m.Stream, s.joined) })
}

// fork makes the exchange stream wait for the work enqueued so far on the machine's stream.
func (x *Optimizer) fork() error {
	s, ctx := x.share, x.m.Ctx
	return run.InOrder(func() error { return ctx.Record(s.forked, x.m.Stream) },
		func() error { return ctx.WaitEvent(s.side.Stream, s.forked) })
}

// Done notes whether the run has sent its gradients.
func (x *Optimizer) Done() {
	x.share.sent, x.share.expected = x.share.expected.contributors > 0, round{}
}

// Contribute enqueues the sending of the last run's gradients to their owners, if this rank is one
// of the first contributors, and the addition of the gradients that arrive. It does nothing if both
// happened during the run. All ranks call it after every round.
func (x *Optimizer) Contribute(contributors int, first bool) error {
	s := x.share
	if err := s.checkRound(contributors, first); err != nil {
		return err
	}

	s.expected = round{}
	if s.sent {
		s.sent = false
		return nil
	}

	if err := x.connect(contributors); err != nil {
		return err
	}

	k := round{contributors, first}
	return x.m.Replay(s.rounds.Get(k), !x.uncaptured, func() error {
		for _, b := range s.buckets {
			if err := x.send(b, k, x.m.Executor); err != nil {
				return err
			}
		}
		return nil
	})
}

// send exchanges the gradients of a bucket and sums the contributions to this rank's parts.
func (x *Optimizer) send(b *bucket, r round, on *run.Executor) error {
	at, route := comm.Stream(on.Stream), b.routes[r.contributors]
	if x.share.twoRanks { // incoming gradients may use memory of the run
		if err := route.Release(at); err != nil {
			return err
		}
		return route.Enqueue(at)
	}

	if err := route.Enqueue(at); err != nil {
		return err
	}

	for _, p := range x.share.partsOf(b, x.share.group.Rank()) {
		if err := x.addUp(p, r, on); err != nil {
			return err
		}
	}

	return route.Release(at)
}

func ptr(p gpu.Ptr) comm.Ptr { return comm.Ptr(p) }

// addUp adds the contributions of a round to the sum of a part, in the order of ranks.
func (x *Optimizer) addUp(p *part, r round, on *run.Executor) error {
	beta := 1.0
	if r.first {
		beta = 0
	}

	for _, at := range p.contributed[:r.contributors] {
		if err := on.Launch(elementwise.Axpby{Y: p.sum, YType: gpu.Float32, X: at,
			XType: x.Params[p.param].Grad.Type, Alpha: 1, Beta: beta, N: p.len()}); err != nil {
			return err
		}
		beta = 1
	}

	return nil
}
