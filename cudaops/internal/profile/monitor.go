// Package profile measures how runs spend their time. A Monitor samples runs in the background, and a
// Profiler examines a few steps kernel by kernel. Both enqueue the program's calls with timing events
// between them and don't affect results.
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
	"github.com/kasmina-go/kasmina/optime"
)

// update is the op name of updates.
const update = "Update"

const (
	// monitorShare is the maximum share of time that the monitor may take.
	monitorShare = 0.004
	// An op has drifted if it takes more than monitorDrift times its tuned time, and exceeds that time
	// by more than monitorNoise, in monitorTimes consecutive samples.
	monitorDrift, monitorNoise, monitorTimes = 1.5, 10 * time.Microsecond, 3
)

// A Monitor times one run out of every Every runs.
type Monitor struct {
	marks
	minEvery int // configured number of runs per sample
	Every    int // current number of runs per sample, raised if samples are expensive
	runs     int // runs since the last sample

	timed []interval    // pending intervals in order; in a sample, the calls come first
	plain time.Duration // time of a run without marks
	cost  float64       // extra time of a run with marks, as a share of plain

	Samples int    // number of timed runs
	tasks   []task // one per call, followed by the update
}

// interval is the time between two marks.
type interval struct {
	from, to      gpu.Event
	untelemetered gpu.Event // start of the preceding pass without telemetry, which lasts until from; 0 if none
	task          *task     // nil for the whole run
}

// task collects the samples of a call or of the update.
type task struct {
	call    *program.Call // nil for the update
	chosen  optime.Choice
	total   time.Duration // sum of all samples
	samples int
	drifted int // consecutive samples
}

// NewMonitor returns a monitor that times one run out of every runs.
func NewMonitor(m *Target, every int) *Monitor {
	o := &Monitor{marks: m.marks(), minEvery: every, Every: every, runs: every - 2,
		cost: math.Inf(1), tasks: make([]task, len(m.Program.Calls)+1)}
	for i, c := range m.Program.Calls {
		if o.tasks[i].call = c; c.Choice != nil {
			o.tasks[i].chosen = *c.Choice
		}
	}
	return o
}

// Close destroys the monitor's events. A nil Monitor has none.
func (o *Monitor) Close() error {
	if o == nil {
		return nil
	}
	return o.memory.Close()
}

// Sampling reports whether the current run has marks.
func (o *Monitor) Sampling() bool { return len(o.timed) > 1 }

// Run enqueues a run of the program, with marks if a sample is due. The first run in each mode, which
// still loads kernels, is not measured.
func (o *Monitor) Run(w run.Work) error {
	replay := w.Replay
	if !o.Current.Loaded {
		return replay()
	}

	if err := o.collect(); err != nil {
		return err
	}

	if o.runs++; o.timed != nil || o.runs < o.Every-1 || len(o.Program.Calls) == 0 {
		return replay()
	}

	o.used = 0
	whole := interval{from: o.unused(), to: o.unused()}
	compute, timed := replay, []interval(nil)
	if o.runs >= o.Every {
		o.runs, timed = 0, o.intervals()
		compute = func() error { return o.sample(timed) }
	}

	o.mark(whole.from)
	o.try(compute)
	o.mark(whole.to)
	if o.err == nil {
		o.timed = append(timed, whole)
	}

	return o.takeErr()
}

// intervals returns the intervals of the calls. Each starts at the end of the preceding call or, if a
// pass without telemetry comes first, at the end of that pass.
func (o *Monitor) intervals() (all []interval) {
	last := o.unused() // not used if the first call has a pass without telemetry
	for i, c := range o.Program.Calls {
		t := interval{from: last, task: &o.tasks[i]}
		if o.Layers.Measures(c) {
			t.untelemetered, t.from = o.unused(), o.unused()
		}
		t.to = o.unused()
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

	if o.Current.Monitored == 0 {
		// Load the modules before the capture. The launches may overwrite results, since no result is
		// needed between runs.
		for _, t := range timed {
			if t.untelemetered != 0 {
				o.try(func() error { return o.Layers.RunWithoutTelemetry(t.task.call) })
			}
		}
		if err := o.takeErr(); err != nil {
			return err
		}
	}

	return o.Repeat(&o.Current.Monitored, enqueue)
}

// enqueue enqueues calls with marks between them. The extra pass without telemetry runs twice, because
// the first only warms up the caches.
func (o *Monitor) enqueue(timed []interval) error {
	for i, t := range timed {
		c := t.task.call
		if t.untelemetered != 0 {
			unmeasured := func() error { return o.Layers.RunWithoutTelemetry(c) }
			o.try(func() error { return o.Layers.Save(c) })
			o.try(unmeasured)
			o.mark(t.untelemetered)
			o.try(unmeasured)
		}
		if i == 0 || t.untelemetered != 0 {
			o.mark(t.from)
		}
		o.try(func() error { return o.Call(c) })
		o.mark(t.to)
	}

	return o.takeErr()
}

// collect evaluates the pending intervals if the device has finished them. If one of the measurements
// fails, the whole sample is discarded.
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
		if t.untelemetered != 0 {
			ahead[i] = o.between(t.untelemetered, t.from)
		}
	}

	if err := o.takeErr(); err != nil {
		return err
	}

	if len(timed) > 1 {
		o.Samples++
	}

	for i, t := range timed {
		switch {
		case t.task != nil:
			o.addSample(t.task, took[i])
		case len(timed) == 1:
			o.plain = took[i]
		case o.plain > 0: // take the minimum, since runs differ for other reasons too
			o.cost = min(o.cost, max(0, float64(took[i]-o.plain)/float64(o.plain)))
			o.Every = max(o.minEvery, int(o.cost/monitorShare))
		}
		if t.untelemetered != 0 {
			o.Layers.RecordTiming(t.task.call, ahead[i], took[i])
		}
	}

	return nil
}

// addSample adds a sample to a task, and warns if the task has drifted.
func (o *Monitor) addSample(t *task, d time.Duration) {
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

// Update enqueues an update, and times it if it follows a timed run.
func (o *Monitor) Update(enqueue func() error) error {
	if !o.Sampling() || o.timed[len(o.timed)-1].task != nil {
		return enqueue()
	}

	update := interval{from: o.unused(), to: o.unused(), task: &o.tasks[len(o.tasks)-1]}
	o.mark(update.from)
	o.try(enqueue)
	if err := o.takeErr(); err != nil {
		return err
	}

	// The update has been enqueued, so a failure to mark its end is not an error.
	if o.mark(update.to); o.takeErr() == nil {
		o.timed = append(o.timed, update)
	}

	return nil
}

// UpdatePart enqueues part of an update.
func (o *Monitor) UpdatePart(w run.Work) error { return w.Replay() }

// Times returns the average times of the ops in a run, longest first, with their variants. The op
// Update is the optimizer's update, which moves updateBytes bytes. The result is empty before the
// first sample.
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

// Target is the machine being measured.
type Target struct {
	*run.Runner
	Layers   *kasmina.Layers
	Warn     func(message string)
	Operands gpu.DType // operand type of products
	Float8   bool      // also measure float8 products
	Copy     int       // size in bytes of the copy that measures bandwidth; 0 for the default
}

// marks manages timing events on the stream. After an error, its methods do nothing until takeErr has
// returned the error.
type marks struct {
	*Target
	memory run.Memory
	all    []gpu.Event
	used   int // number of events in use
	err    error
}

func (m *Target) marks() marks { return marks{Target: m, memory: run.Memory{Ctx: m.Ctx}} }

// takeErr returns the first error and clears it.
func (m *marks) takeErr() error {
	err := m.err
	m.err = nil
	return err
}

// try calls work unless an error has occurred.
func (m *marks) try(work func() error) {
	if m.err == nil {
		m.err = work()
	}
}

// unused returns an unused event, or 0 on error.
func (m *marks) unused() gpu.Event {
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

// markNext marks the stream with an unused event and returns the event.
func (m *marks) markNext() gpu.Event {
	e := m.unused()
	m.mark(e)
	return e
}

// mark records an event on the stream. In a captured graph, the event is recorded at every launch.
func (m *marks) mark(e gpu.Event) {
	record := m.Ctx.Record
	if m.State.Capturing() {
		record = m.Ctx.Mark
	}
	m.try(func() error { return record(e, m.Stream) })
}

// between returns the time between two marks.
func (m *marks) between(from, to gpu.Event) (d time.Duration) {
	m.try(func() (err error) {
		d, err = m.Ctx.Elapsed(from, to)
		return err
	})
	return d
}
