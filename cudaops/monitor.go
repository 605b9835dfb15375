package cudaops

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/optime"
)

const (
	// monitorShare is how much of the time the monitor may take.
	monitorShare = 0.004
	// monitorDrift is the multiple of its tuned time from which on an op counts as having drifted, if it is also more than
	// monitorNoise above it, in monitorTimes samples on end.
	monitorDrift, monitorNoise, monitorTimes = 1.5, 10 * time.Microsecond, 3
)

// WithMonitor makes the machine time its ops while it runs: one run in every so many is replayed with a time stamp between
// one task and the next, and computes the same bits; in it the passes of Kasmina layers that measure also run without
// telemetry, and end each by itself, for what the lattices' reports say of the layer. Where all this would take more than 0.4 %
// of the time, fewer runs have it. [Machine.Monitor] returns the times. An op that takes much longer than when it was tuned is
// logged as a warning.
func WithMonitor(every int) MachineOption {
	return func(c *machineConfig) error {
		if every < 2 {
			return fmt.Errorf("WithMonitor: every %d runs, want at least 2", every)
		}
		c.monitor = every
		return nil
	}
}

// monitor times one run in every so many.
type monitor struct {
	m     *Machine
	every int
	runs  int // since the last sample

	marks  []gpu.Event  // before the first task, and after each
	around [2]gpu.Event // the run without marks; the second one also the end of that with marks
	state  monitorState
	plain  time.Duration // of a run without marks
	cost   float64       // of a run with marks, as a share of that
	update updateMarks

	samples int
	tasks   []taskTime
}

// monitorState is what the device is at.
type monitorState uint8

const (
	monitorIdle   monitorState = iota
	monitorPlain               // a run without marks, between two events
	monitorSample              // a run with marks
)

// taskTime is what is known of a task.
type taskTime struct {
	latest  time.Duration // in the latest sample
	total   time.Duration // in all samples
	tuned   time.Duration // 0 for one that has not been timed
	ways    []string
	drifted int // samples on end
	bare    bareTime
}

// updateMarks stand around an update.
type updateMarks struct {
	events  [2]gpu.Event
	busy    bool
	total   time.Duration
	samples int
}

func newMonitor(m *Machine) (*monitor, error) {
	o := &monitor{m: m, every: m.config.monitor, runs: m.config.monitor - 2, cost: math.Inf(1)}
	events := []*gpu.Event{&o.around[0], &o.around[1], &o.update.events[0], &o.update.events[1]}
	o.marks = make([]gpu.Event, len(m.program.tasks)+1)
	o.tasks = make([]taskTime, len(m.program.tasks))
	for i := range o.marks {
		events = append(events, &o.marks[i])
	}
	for i, t := range m.program.tasks {
		if t.bare != nil {
			b := &o.tasks[i].bare
			events = append(events, &b.from, &b.to)
		}
	}
	for _, e := range events {
		var err error
		if *e, err = m.device.ctx.NewEvent(true); err != nil {
			return nil, errors.Join(err, o.close())
		}
	}
	return o, nil
}

func (o *monitor) close() error {
	ctx := o.m.device.ctx
	var errs []error
	all := append(append(o.marks, o.around[:]...), o.update.events[:]...)
	for _, t := range o.tasks {
		all = append(all, t.bare.from, t.bare.to)
	}
	for _, e := range all {
		if e != 0 {
			errs = append(errs, ctx.DestroyEvent(e))
		}
	}
	return errors.Join(errs...)
}

// compute enqueues a run of the program, which has been loaded.
func (o *monitor) compute() error {
	if err := o.collect(); err != nil {
		return err
	}
	if o.runs++; o.state != monitorIdle || o.runs < o.every-1 || len(o.m.program.tasks) == 0 {
		return o.m.replay()
	}
	record := func(e gpu.Event) func() error {
		return func() error { return o.m.device.ctx.Record(e, o.m.stream) }
	}
	calls, state := []func() error{record(o.around[0]), o.m.replay, record(o.around[1])}, monitorPlain
	if o.runs >= o.every {
		o.runs = 0
		calls, state = []func() error{o.sample, record(o.around[1])}, monitorSample
	}
	err := inTurn(calls...)
	if err == nil {
		o.state = state
	}
	return err
}

// sample enqueues a run with marks.
func (o *monitor) sample() error {
	ctx, s := o.m.device.ctx, o.m.stream
	for i, t := range o.m.program.tasks {
		o.tasks[i].bare.on = t.bare != nil && t.layer.mode.telemetry
	}
	if o.m.onHost() {
		return o.enqueue(ctx.Record)
	}
	if o.m.now.monitored == nil {
		err := o.loadBare()
		if err != nil {
			return err
		}
		if o.m.now.monitored, err = o.m.capture(func() error { return o.enqueue(ctx.Mark) }); err != nil {
			return err
		}
	}
	return ctx.LaunchGraph(o.m.now.monitored, s)
}

// enqueue enqueues the tasks with marks between them, and notes how each is computed.
func (o *monitor) enqueue(mark func(gpu.Event, gpu.Stream) error) error {
	s, t := o.m.stream, o.m.tuner
	o.m.apart = true
	defer func() { o.m.apart = false }()
	if err := errors.Join(o.m.zero(), mark(o.marks[0], s)); err != nil {
		return err
	}
	for i, task := range o.m.program.tasks {
		if err := o.runBare(i, mark); err != nil {
			return err
		}
		t.used = t.used[:0]
		if err := errors.Join(task.run(), mark(o.marks[i+1], s)); err != nil {
			return fmt.Errorf("%s: %w", describe(task.node), err)
		}
		known := &o.tasks[i]
		known.ways, known.tuned = nil, 0
		for _, c := range t.used {
			c := t.made[c]
			if c.Of > 1 {
				known.ways = append(known.ways, c.Way)
			}
			known.tuned += max(c.Cold, c.Warm)
		}
	}
	return nil
}

// collect takes in what has been timed, if the device is done with it.
func (o *monitor) collect() error {
	ctx := o.m.device.ctx
	if u := &o.update; u.busy {
		done, err := ctx.EventDone(u.events[1])
		if err != nil {
			return err
		}
		if done {
			d, err := ctx.Elapsed(u.events[0], u.events[1])
			if err != nil {
				return err
			}
			u.total, u.samples, u.busy = u.total+d, u.samples+1, false
		}
	}
	if o.state == monitorIdle {
		return nil
	}
	if done, err := ctx.EventDone(o.around[1]); err != nil || !done {
		return err
	}
	from, to := o.around[0], o.around[1]
	if o.state == monitorSample {
		from, to = o.marks[0], o.marks[len(o.marks)-1]
	}
	state := o.state
	o.state = monitorIdle
	whole, err := ctx.Elapsed(from, to)
	if err != nil {
		return err
	}
	if state == monitorPlain {
		o.plain = whole
		return nil
	}
	if err := o.read(); err != nil { // before anything is taken in: a sample counts as a whole or not at all
		return err
	}
	for i := range o.tasks {
		o.note(i)
		o.noteBare(i)
	}
	o.samples++
	if o.plain > 0 { // the least cost: runs differ for other reasons too
		o.cost = min(o.cost, max(0, float64(whole-o.plain)/float64(o.plain)))
		o.every = max(o.m.config.monitor, int(o.cost/monitorShare))
	}
	return nil
}

// read asks the device for the times of a sample.
func (o *monitor) read() (err error) {
	ctx := o.m.device.ctx
	for i := range o.tasks {
		t, from := &o.tasks[i], o.marks[i]
		if b := &t.bare; b.on {
			if b.latest, err = ctx.Elapsed(b.from, b.to); err != nil {
				return err
			}
			from = b.to
		}
		if t.latest, err = ctx.Elapsed(from, o.marks[i+1]); err != nil {
			return err
		}
	}
	return nil
}

// note takes in the time of a task.
func (o *monitor) note(i int) {
	t := &o.tasks[i]
	d := t.latest
	t.total += d
	if t.tuned == 0 || float64(d) < monitorDrift*float64(t.tuned) || d < t.tuned+monitorNoise {
		t.drifted = 0
		return
	}
	if t.drifted++; t.drifted == monitorTimes {
		o.m.warn(fmt.Sprintf("%s takes %v in the way %s, and took %v when it was tuned", describe(o.m.program.tasks[i].node), d,
			strings.Join(t.ways, ", "), t.tuned))
	}
}

// updating enqueues an update, and times it after a run that is timed.
func (o *monitor) updating(enqueue func() error) error {
	if o == nil || o.state != monitorSample || o.update.busy {
		return enqueue()
	}
	ctx, s := o.m.device.ctx, o.m.stream
	if err := inTurn(func() error { return ctx.Record(o.update.events[0], s) }, enqueue); err != nil {
		return err
	}
	o.update.busy = ctx.Record(o.update.events[1], s) == nil // an update that is on its way is no error for want of a mark
	return nil
}

// Monitor returns what the ops of a run have taken so far on average, the longest first, with the ways in which they are
// computed, and under the name Update what the optimiser took. It is empty before the first sample, and without [WithMonitor].
func (m *Machine) Monitor() ([]OpTime, error) {
	times, err := m.monitored()
	if err != nil {
		return nil, fmt.Errorf("cudaops.Machine.Monitor: %w", err)
	}
	return times, nil
}

func (m *Machine) monitored() ([]OpTime, error) {
	o := m.monitor
	switch {
	case m.closed:
		return nil, errClosed
	case o == nil:
		return nil, nil
	}
	if err := o.collect(); err != nil || o.samples == 0 {
		return nil, err
	}
	times := byOp(m.program.tasks, func(i int, t *OpTime) {
		known := o.tasks[i]
		t.Time += known.total / time.Duration(o.samples)
		t.Tuned += known.tuned
		for _, w := range known.ways {
			if !slices.Contains(t.Ways, w) {
				t.Ways = append(t.Ways, w)
			}
		}
	})
	if u := o.update; u.samples > 0 {
		times = append(times, OpTime{Op: "Update", Tasks: 1, Time: u.total / time.Duration(u.samples), Bytes: m.optimizer.bytes()})
	}
	optime.SortTimes(times)
	return times, nil
}
