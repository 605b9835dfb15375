// Package profile measures where the time of runs goes. A monitor does so now and then, in the
// background, and a profiler of a few steps, kernel by kernel. Both enqueue the program's calls
// with marks between them, and change no result.
package profile

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/optime"
)

// update is the name of updates among ops.
const update = "Update"

const (
	// monitorShare is how much of the time the monitor may take.
	monitorShare = 0.004
	// monitorDrift is the multiple of its tuned time from which on an op counts as having drifted.
	// It must also be more than monitorNoise above it, in monitorTimes samples on end.
	monitorDrift, monitorNoise, monitorTimes = 1.5, 10 * time.Microsecond, 3
)

// Monitor times one run in every so many.
type Monitor struct {
	marks
	least int // runs from one sample to the next
	Every int // likewise, where samples cost much
	runs  int // since the last sample

	timed []interval    // what is on its way, in order; a sample begins with the calls
	plain time.Duration // of a run without marks
	cost  float64       // of a run with marks, as a share of that

	Samples int    // runs that were timed
	tasks   []task // the calls, and the update
}

// interval is what passes between two marks.
type interval struct {
	from, to gpu.Event
	ahead    gpu.Event // until from it is the pass without telemetry; 0 for none
	task     *task     // nil for the whole run
}

// task is what is known of a call, or of the update.
type task struct {
	call    *program.Call // nil for the update
	chosen  optime.Choice
	total   time.Duration // in all samples
	samples int
	drifted int // samples on end
}

// NewMonitor prepares a monitor of one run in so many.
func NewMonitor(m *Machine, every int) *Monitor {
	o := &Monitor{marks: m.marks(), least: every, Every: every, runs: every - 2,
		cost: math.Inf(1), tasks: make([]task, len(m.Program.Calls)+1)}
	for i, c := range m.Program.Calls {
		if o.tasks[i].call = c; c.Choice != nil {
			o.tasks[i].chosen = *c.Choice
		}
	}
	return o
}

// Close gives back events.
func (o *Monitor) Close() error {
	if o == nil {
		return nil
	}
	return o.memory.Close()
}

// Sampling reports whether the run that is on its way has marks.
func (o *Monitor) Sampling() bool { return len(o.timed) > 1 }

// Run enqueues a run of the program, with marks if it is due. A run that has yet to load kernels is
// not measured.
func (o *Monitor) Run(w run.Work) error {
	replay := w.Replay
	if !o.Now.Loaded {
		return replay()
	}

	if err := o.collect(); err != nil {
		return err
	}

	if o.runs++; o.timed != nil || o.runs < o.Every-1 || len(o.Program.Calls) == 0 {
		return replay()
	}

	o.used = 0
	whole := interval{from: o.next(), to: o.next()}
	compute, timed := replay, []interval(nil)
	if o.runs >= o.Every {
		o.runs, timed = 0, o.intervals()
		compute = func() error { return o.sample(timed) }
	}

	o.mark(whole.from)
	o.do(compute)
	o.mark(whole.to)
	if o.err == nil {
		o.timed = append(timed, whole)
	}

	return o.failed()
}

// intervals are those of the calls. One begins where the one before it ends, or the pass without
// telemetry ahead of it.
func (o *Monitor) intervals() (all []interval) {
	last := o.next() // unless the first begins with such a pass
	for i, c := range o.Program.Calls {
		t := interval{from: last, task: &o.tasks[i]}
		if o.Layers.Measures(c) {
			t.ahead, t.from = o.next(), o.next()
		}
		t.to = o.next()
		all, last = append(all, t), t.to
	}
	return all
}

// sample enqueues a run with marks.
func (o *Monitor) sample(timed []interval) error {
	enqueue := func() error { return o.enqueue(timed) }
	if o.OnHost() {
		return enqueue()
	}

	if o.Now.Monitored == 0 {
		// What is captured must have its modules loaded. Nothing that a run has computed is alive
		// between two runs.
		for _, t := range timed {
			if t.ahead != 0 {
				o.do(func() error { return o.Layers.Unmeasured(t.task.call) })
			}
		}
		if err := o.failed(); err != nil {
			return err
		}
	}

	return o.Repeat(&o.Now.Monitored, enqueue)
}

// enqueue enqueues calls with marks between them. A pass without telemetry runs twice, the first
// time only for the caches.
func (o *Monitor) enqueue(timed []interval) error {
	for i, t := range timed {
		c := t.task.call
		if t.ahead != 0 {
			unmeasured := func() error { return o.Layers.Unmeasured(c) }
			o.do(func() error { return o.Layers.Save(c) })
			o.do(unmeasured)
			o.mark(t.ahead)
			o.do(unmeasured)
		}
		if i == 0 || t.ahead != 0 {
			o.mark(t.from)
		}
		o.do(func() error { return o.Call(c) })
		o.mark(t.to)
	}

	return o.failed()
}

// collect takes in what has been timed, if the device is done with it. A sample counts as a whole
// or not at all.
func (o *Monitor) collect() error {
	timed := o.timed
	if timed == nil {
		return nil
	}

	if done, err := o.Ctx.EventDone(timed[len(timed)-1].to); err != nil || !done {
		return err
	}

	o.timed = nil
	took, ahead := make([]time.Duration, len(timed)), make([]time.Duration, len(timed))
	for i, t := range timed {
		took[i] = o.between(t.from, t.to)
		if t.ahead != 0 {
			ahead[i] = o.between(t.ahead, t.from)
		}
	}

	if err := o.failed(); err != nil {
		return err
	}

	if len(timed) > 1 {
		o.Samples++
	}

	for i, t := range timed {
		switch {
		case t.task != nil:
			o.note(t.task, took[i])
		case len(timed) == 1:
			o.plain = took[i]
		case o.plain > 0: // the least cost: runs differ for other reasons too
			o.cost = min(o.cost, max(0, float64(took[i]-o.plain)/float64(o.plain)))
			o.Every = max(o.least, int(o.cost/monitorShare))
		}
		if t.ahead != 0 {
			o.Layers.Note(t.task.call, ahead[i], took[i])
		}
	}

	return nil
}

// note takes in the time of a task.
func (o *Monitor) note(t *task, d time.Duration) {
	t.total, t.samples = t.total+d, t.samples+1
	tuned := t.chosen.Cold
	if tuned == 0 || float64(d) < monitorDrift*float64(tuned) || d < tuned+monitorNoise {
		t.drifted = 0
		return
	}
	if t.drifted++; t.drifted == monitorTimes {
		o.Warn(fmt.Sprintf("%s takes %v in the variant %s, and took %v when it was tuned",
			t.call.Node, d, t.chosen.Variant, tuned))
	}
}

// Update enqueues an update, and times it if it follows a run that is timed.
func (o *Monitor) Update(enqueue func() error) error {
	if !o.Sampling() || o.timed[len(o.timed)-1].task != nil {
		return enqueue()
	}

	update := interval{from: o.next(), to: o.next(), task: &o.tasks[len(o.tasks)-1]}
	o.mark(update.from)
	o.do(enqueue)
	if err := o.failed(); err != nil {
		return err
	}

	// an update that is on its way is no error for want of a mark
	if o.mark(update.to); o.failed() == nil {
		o.timed = append(o.timed, update)
	}

	return nil
}

// UpdatePart enqueues a part of an update.
func (o *Monitor) UpdatePart(w run.Work) error { return w.Replay() }

// Times returns what the ops of a run have taken so far on average, the longest first, with the
// variants in which they are computed. Under the name Update is what the optimiser took, which moves so
// many bytes. It is empty before the first sample.
func (o *Monitor) Times(updateBytes float64) ([]optime.OpTime, error) {
	if err := o.collect(); err != nil {
		return nil, err
	}

	var times []optime.OpTime
	for _, t := range o.tasks {
		if t.samples == 0 {
			continue
		}
		op := optime.OpTime{Op: update, Tasks: 1, Bytes: updateBytes,
			Time: t.total / time.Duration(t.samples), Tuned: t.chosen.Cold}
		if c := t.call; c != nil {
			op.Op, op.Bytes, op.FLOPs = c.Op, c.Bytes(), c.FLOPs
		}
		if t.chosen.Of > 1 {
			op.Variants = []string{t.chosen.Variant}
		}
		times = append(times, op)
	}

	return optime.Gather(times), nil
}

// Machine is the machine whose runs are measured.
type Machine struct {
	*run.Runner
	Layers   *kasmina.Layers
	Warn     func(message string)
	Operands gpu.DType // of products
	Float8   bool      // products of float8 are measured too
	Copy     int       // bytes of the copy that measures the card; 0 for the usual
}

// marks are events that the stream records when it gets there. Once something has failed nothing
// more is done, until failed has told it.
type marks struct {
	*Machine
	memory run.Memory
	all    []gpu.Event
	used   int // of these
	err    error
}

func (m *Machine) marks() marks { return marks{Machine: m, memory: run.Memory{Ctx: m.Ctx}} }

// failed is what has failed, from now on nothing.
func (m *marks) failed() error {
	err := m.err
	m.err = nil
	return err
}

// do does something, unless something has failed.
func (m *marks) do(work func() error) {
	if m.err == nil {
		m.err = work()
	}
}

// next is a mark that is not in use; there is none where it fails.
func (m *marks) next() gpu.Event {
	if m.used == len(m.all) {
		e, err := m.memory.NewEvent(true)
		if err != nil {
			m.err = cmp.Or(m.err, err)
			return 0
		}
		m.all = append(m.all, e)
	}
	m.used++
	return m.all[m.used-1]
}

// put is the next mark, put on the stream.
func (m *marks) put() gpu.Event {
	e := m.next()
	m.mark(e)
	return e
}

// mark has the stream record an event when it gets there, in what is captured at each launch.
func (m *marks) mark(e gpu.Event) {
	record := m.Ctx.Record
	if m.State.Capturing() {
		record = m.Ctx.Mark
	}
	m.do(func() error { return record(e, m.Stream) })
}

// between is the time from one mark to another.
func (m *marks) between(from, to gpu.Event) (d time.Duration) {
	m.do(func() (err error) {
		d, err = m.Ctx.Elapsed(from, to)
		return err
	})
	return d
}
