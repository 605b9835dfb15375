package cudaops

import (
	"errors"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
)

// Tasks may leave tails: short kernels with a few blocks, for results that the tasks right behind do not need. Where a run is
// captured, tails are a branch of the graph, and run beside the tasks that follow, until one that touches the same memory joins them
// or the run ends. Where each task is enqueued by itself, or timed, its tail comes with it.

// tailed adds a task that may leave a tail, which works on some of the touched arrays. Their memory lasts until a join.
func (c *compiler) tailed(n *gorgonia.Node, begin func(later func(kernels.KasminaTail)) error, tail []*array, touched ...*array) {
	c.do(n, func() error { return begin(nil) }, touched...)
	c.tasks[len(c.tasks)-1].begin = begin
	for _, a := range tail {
		if a.block != nil && !a.resident { // what is resident is the optimiser's or the attendants' to change, between runs
			c.tails[a.block] = true
		}
	}
}

// inTail reports whether a tail that has not been joined works on an array's memory.
func (c *compiler) inTail(a *array) bool {
	return a != nil && (a.block != nil && c.tails[a.block] || slices.ContainsFunc(a.parts, c.inTail))
}

// join ends the branch of the tails before the next task.
func (c *compiler) join() {
	for b := range c.tails {
		b.Last = max(b.Last, len(c.tasks)-1)
	}
	clear(c.tails)
}

// aside is where the tails of a machine go.
type aside struct {
	stream         driver.Stream // 0 in a machine without any
	forked, joined driver.Event
	behind         bool // the machine's stream has not waited for all that is there
}

// open makes what the tails need.
func (a *aside) open(m *Machine) (err error) {
	if !slices.ContainsFunc(m.program.tasks, func(t task) bool { return t.begin != nil }) {
		return nil
	}
	ctx := m.device.ctx
	if a.stream, err = ctx.NewStream(); err != nil {
		return err
	}
	for _, e := range []*driver.Event{&a.forked, &a.joined} {
		if *e, err = ctx.NewEvent(false); err != nil {
			return err
		}
	}
	return nil
}

func (a *aside) close(ctx driver.Context) error {
	var errs []error
	for _, e := range []driver.Event{a.forked, a.joined} {
		if e != 0 {
			errs = append(errs, ctx.DestroyEvent(e))
		}
	}
	if a.stream != 0 {
		errs = append(errs, ctx.DestroyStream(a.stream))
	}
	return errors.Join(errs...)
}

// enqueueTask enqueues a task, and in a capture its tail aside.
func (m *Machine) enqueueTask(t task) error {
	if t.joins {
		if err := m.joinTails(); err != nil {
			return err
		}
	}
	if t.begin == nil || !m.capturing {
		return t.run()
	}
	var tail kernels.KasminaTail
	if err := t.begin(func(f kernels.KasminaTail) { tail = f }); err != nil || tail == nil {
		return err
	}
	ctx, a := m.device.ctx, &m.aside
	a.behind = true
	return inTurn(
		func() error { return ctx.Record(a.forked, m.stream) },
		func() error { return ctx.Wait(a.stream, a.forked) },
		func() error { return tail(a.stream) },
		func() error { return ctx.Record(a.joined, a.stream) })
}

// joinTails holds the machine's stream back until the tails so far are done.
func (m *Machine) joinTails() error {
	a := &m.aside
	if !a.behind {
		return nil
	}
	a.behind = false
	return m.device.ctx.Wait(m.stream, a.joined)
}
