// Package profile measures where the time of runs goes. A monitor does so now and then, in the
// background, and a profiler of a few steps, kernel by kernel. Both enqueue the program's calls
// with marks between them, and change no result.
package profile

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/choose"
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
	*Machine
	memory run.Memory // events
	least  int        // runs from one sample to the next
	Every  int        // likewise, where samples cost much
	runs   int        // since the last sample

	marks  []gpu.Event   // before the first task, and after each
	around [2]gpu.Event  // the last run that is timed
	timing bool          // the last run, whose time is not known
	plain  time.Duration // of a run without marks
	cost   float64       // of a run with marks, as a share of that
	update updateMarks

	Sampling bool // the run that is timed has marks

	Samples int // runs that were timed
	tasks   []taskTime
}

// taskTime is what is known of a task.
type taskTime struct {
	latest     time.Duration // in the latest sample
	total      time.Duration // in all samples
	tuned      time.Duration // 0 for one that has not been timed
	ways       []string
	drifted    int // samples on end
	unmeasured unmeasuredTime
}

// updateMarks stand around an update.
type updateMarks struct {
	events        [2]gpu.Event
	on            bool // in the sample under way
	latest, total time.Duration
	samples       int
}

// NewMonitor prepares a monitor of one run in so many.
func NewMonitor(m *Machine, every int) (*Monitor, error) {
	o := &Monitor{Machine: m, memory: run.Memory{Ctx: m.Ctx}, least: every, Every: every,
		runs: every - 2, cost: math.Inf(1)}
	events := []*gpu.Event{&o.around[0], &o.around[1], &o.update.events[0], &o.update.events[1]}
	o.marks = make([]gpu.Event, len(m.Program.Calls)+1)
	o.tasks = make([]taskTime, len(m.Program.Calls))
	for i := range o.marks {
		events = append(events, &o.marks[i])
	}
	for i, c := range m.Program.Calls {
		if _, ok := c.Params.(program.KasminaPass); ok {
			b := &o.tasks[i].unmeasured
			events = append(events, &b.from, &b.to)
		}
	}
	for _, e := range events {
		var err error
		if *e, err = o.memory.NewEvent(true); err != nil {
			return nil, errors.Join(err, o.Close())
		}
	}
	return o, nil
}

// Close gives back events.
func (o *Monitor) Close() error {
	if o == nil {
		return nil
	}
	return o.memory.Close()
}

// Run enqueues a run of the program, which has been loaded: replay, or the same with marks.
func (o *Monitor) Run(replay func() error) error {
	if err := o.collect(); err != nil {
		return err
	}
	if o.runs++; o.timing || o.runs < o.Every-1 || len(o.Program.Calls) == 0 {
		return replay()
	}
	compute, sampling := replay, o.runs >= o.Every
	if sampling {
		o.runs, compute = 0, o.sample
	}
	err := run.InTurn(o.marking(o.around[0]), compute, o.marking(o.around[1]))
	o.timing = err == nil
	o.Sampling, o.update.on = o.timing && sampling, false
	return err
}

// sample enqueues a run with marks.
func (o *Monitor) sample() error {
	now := o.Now()
	captures := !o.OnHost() && now.Monitored == nil
	for i, c := range o.Program.Calls {
		on := o.Layers.Measures(c)
		o.tasks[i].unmeasured.on = on
		if !on || !captures {
			continue
		}
		// What is captured must have its modules loaded. Nothing that a run has computed is alive
		// between two runs.
		if err := o.Layers.Unmeasured(c); err != nil {
			return fmt.Errorf("%s: %w", c.Node, err)
		}
	}
	if o.OnHost() {
		return o.enqueue()
	}
	if captures {
		var err error
		if now.Monitored, err = o.Capture(o.enqueue); err != nil {
			return err
		}
	}
	return o.Ctx.LaunchGraph(now.Monitored, o.Stream)
}

// runBare enqueues what comes ahead of a pass in a sample: the pass without telemetry, twice, the
// first time only for the caches.
func (o *Monitor) runBare(i int) error {
	b, c := o.tasks[i].unmeasured, o.Program.Calls[i]
	if !b.on {
		return nil
	}
	unmeasured := func() error { return o.Layers.Unmeasured(c) }
	if err := run.InTurn(func() error { return o.Layers.Save(c) }, unmeasured,
		o.marking(b.from), unmeasured, o.marking(b.to)); err != nil {
		return fmt.Errorf("%s: %w", c.Node, err)
	}
	return nil
}

// enqueue enqueues the calls with marks between them, and notes how each is computed.
func (o *Monitor) enqueue() error {
	if err := o.mark(o.marks[0]); err != nil {
		return err
	}
	for i, c := range o.Program.Calls {
		if err := run.InTurn(func() error { return o.runBare(i) },
			func() error { return o.Call(c) }, o.marking(o.marks[i+1])); err != nil {
			return err
		}
		known := &o.tasks[i]
		known.ways, known.tuned = nil, 0
		if chosen, ok := o.Chooser.Of(c.Choice); ok {
			if chosen.Of > 1 {
				known.ways = []string{chosen.Way}
			}
			known.tuned = max(chosen.Cold, chosen.Warm)
		}
	}
	return nil
}

// collect takes in what has been timed, if the device is done with it.
func (o *Monitor) collect() error {
	ctx := o.Ctx
	if !o.timing {
		return nil
	}
	last, u := o.around[1], &o.update
	if u.on {
		last = u.events[1]
	}
	if done, err := ctx.EventDone(last); err != nil || !done {
		return err
	}
	sampling := o.Sampling
	o.timing, o.Sampling = false, false
	whole, err := ctx.Elapsed(o.around[0], o.around[1])
	if err != nil {
		return err
	}
	if !sampling {
		o.plain = whole
		return nil
	}
	// before anything is taken in: a sample counts as a whole or not at all
	if err := o.read(); err != nil {
		return err
	}
	for i := range o.tasks {
		o.note(i)
		if b := o.tasks[i].unmeasured; b.on {
			o.Layers.Note(o.Program.Calls[i], b.latest, o.tasks[i].latest)
		}
	}
	if u.on {
		u.total, u.samples = u.total+u.latest, u.samples+1
	}
	o.Samples++
	if o.plain > 0 { // the least cost: runs differ for other reasons too
		o.cost = min(o.cost, max(0, float64(whole-o.plain)/float64(o.plain)))
		o.Every = max(o.least, int(o.cost/monitorShare))
	}
	return nil
}

// read asks the device for the times of a sample.
func (o *Monitor) read() (err error) {
	ctx := o.Ctx
	for i := range o.tasks {
		t, from := &o.tasks[i], o.marks[i]
		if b := &t.unmeasured; b.on {
			if b.latest, err = ctx.Elapsed(b.from, b.to); err != nil {
				return err
			}
			from = b.to
		}
		if t.latest, err = ctx.Elapsed(from, o.marks[i+1]); err != nil {
			return err
		}
	}
	if u := &o.update; u.on {
		u.latest, err = ctx.Elapsed(u.events[0], u.events[1])
	}
	return err
}

// note takes in the time of a task.
func (o *Monitor) note(i int) {
	t := &o.tasks[i]
	d := t.latest
	t.total += d
	if t.tuned == 0 || float64(d) < monitorDrift*float64(t.tuned) || d < t.tuned+monitorNoise {
		t.drifted = 0
		return
	}
	if t.drifted++; t.drifted == monitorTimes {
		o.Warn(fmt.Sprintf("%s takes %v in the way %s, and took %v when it was tuned",
			o.Program.Calls[i].Node, d,
			strings.Join(t.ways, ", "), t.tuned))
	}
}

// Updating enqueues an update, and times it after a run that is timed.
func (o *Monitor) Updating(enqueue func() error) error {
	if o == nil || !o.Sampling || o.update.on {
		return enqueue()
	}
	if err := run.InTurn(o.marking(o.update.events[0]), enqueue); err != nil {
		return err
	}
	// an update that is on its way is no error for want of a mark
	o.update.on = o.mark(o.update.events[1]) == nil
	return nil
}

// Times returns what the ops of a run have taken so far on average, the longest first, with the
// ways in which they are computed. Under the name Update is what the optimiser took, which moves so
// many bytes. It is empty before the first sample.
func (o *Monitor) Times(updateBytes float64) ([]optime.OpTime, error) {
	if err := o.collect(); err != nil || o.Samples == 0 {
		return nil, err
	}
	var times []optime.OpTime
	for i, c := range o.Program.Calls {
		known := o.tasks[i]
		times = append(times, optime.OpTime{Op: c.Op, Tasks: 1, Bytes: c.Bytes(), FLOPs: c.FLOPs,
			Time: known.total / time.Duration(o.Samples), Tuned: known.tuned, Ways: known.ways})
	}
	if u := o.update; u.samples > 0 {
		times = append(times, optime.OpTime{Op: update, Tasks: 1,
			Time: u.total / time.Duration(u.samples), Bytes: updateBytes})
	}
	return optime.Gather(times), nil
}

// Machine is the machine whose runs are measured.
type Machine struct {
	*run.Runner
	Layers   *kasmina.Layers
	Chooser  *choose.Chooser
	Warn     func(message string)
	Name     string    // of the device
	Operands gpu.DType // of products
	Float8   bool      // products of float8 are measured too
	Copy     int       // bytes of the copy that measures the card; 0 for the usual
}

// mark has the stream record an event when it gets there, in what is captured at each launch.
func (m *Machine) mark(e gpu.Event) error {
	if m.State.Capturing() {
		return m.Ctx.Mark(e, m.Stream)
	}
	return m.Ctx.Record(e, m.Stream)
}

func (m *Machine) marking(e gpu.Event) func() error { return func() error { return m.mark(e) } }

// unmeasuredTime is a pass without telemetry.
type unmeasuredTime struct {
	on       bool          // in the sample under way
	from, to gpu.Event     // around the second run
	latest   time.Duration // of that, in the latest sample
}
