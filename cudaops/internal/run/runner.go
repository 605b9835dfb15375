package run

import (
	"errors"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// Attendant performs work around the calls of a run, and distinguishes modes of runs that need separate
// captures.
type Attendant interface {
	// AppendMode appends to b a description of the current run's work. Runs with different modes are
	// captured separately.
	AppendMode(b []byte) []byte
	// OnHost reports whether the attendant computes part of the current run on the host.
	OnHost() bool
}

// Overlap is work on a second stream that overlaps the calls of a run, such as an exchange with other
// GPUs.
type Overlap interface {
	// NextMode returns the kind of work that overlaps the current run; each kind is captured
	// separately. If captured is false, the run is enqueued call by call instead.
	NextMode() (kind byte, captured bool)
	// EnqueueCalls enqueues the calls of a run together with the overlapping work.
	EnqueueCalls(calls []*program.Call) error
	Done() // called after the run, or its captured graph, has been enqueued
}

// Scale is the loss scale of a machine.
type Scale struct {
	Current optimizer.LossScale // current state, as on the device
	// scale of the last run's gradients; 0 if they were discarded
	Carried float32
}

// Runner runs a program. The first run enqueues the calls one by one, which loads the kernels; later runs
// replay a captured graph.
type Runner struct {
	*Executor
	Program   *program.Program
	Inputs    *Inputs
	Attendant Attendant
	Overlap   Overlap // nil if nothing overlaps the runs
	State     State
	Scale     Scale

	Recorded Recordings[string] // by mode
	Current  *Recording         // recording of the current or last run
}

// Recording is a captured graph shared by runs, or updates, that do the same work.
type Recording struct {
	Loaded    bool // the work has been enqueued without capture once, so a capture loads no modules
	graph     gpu.Graph
	Monitored gpu.Graph // graph that includes a monitor's timing events
}

// Recordings maps kinds of work to their recordings.
type Recordings[K comparable] map[K]*Recording

// Get returns the recording of a kind, adding an empty one if necessary.
func (all *Recordings[K]) Get(kind K) *Recording {
	if *all == nil {
		*all = Recordings[K]{}
	}
	if (*all)[kind] == nil {
		(*all)[kind] = new(Recording)
	}
	return (*all)[kind]
}

// Drop destroys all captured graphs.
func (all Recordings[K]) Drop(ctx gpu.Context) error {
	var errs []error
	for _, rec := range all {
		errs = append(errs, ctx.DestroyGraph(rec.graph), ctx.DestroyGraph(rec.Monitored))
	}
	clear(all)
	return errors.Join(errs...)
}

// maxRecordings is the maximum number of modes with a stored recording. Kasmina layers seldom have more
// than two modes, and they change mode together.
const maxRecordings = 16

// Compute enqueues a run through an observer. optimizer is the machine's optimizer, or nil.
func (r *Runner) Compute(o Observer, optimizer any) error {
	defer r.State.On(Run) // even on failure: part of the run may have been enqueued
	r.Scale.Carried = r.Scale.Current.Scale
	mode, captured := r.Attendant.AppendMode(nil), !r.OnHost()
	if r.Overlap != nil {
		kind, can := r.Overlap.NextMode()
		mode, captured = append(mode, kind), captured && can
	}

	if len(r.Recorded) == maxRecordings && r.Recorded[string(mode)] == nil {
		if err := r.DropCaptures(); err != nil {
			return err
		}
	}

	r.Current = r.Recorded.Get(string(mode))

	return o.Run(Work{
		Replay: func() error {
			err := r.Replay(r.Current, captured, r.Enqueue)
			if err == nil && r.Overlap != nil {
				r.Overlap.Done()
			}
			return err
		},
		Plain:     r.Enqueue,
		Captured:  r.Current.Loaded && captured,
		Optimizer: optimizer,
	})
}

// OnHost reports whether any part of the current run is computed on the host, which rules out a capture.
func (r *Runner) OnHost() bool {
	return slices.ContainsFunc(r.Program.Calls, func(c *program.Call) bool {
		_, host := c.Params.(*program.HostOp)
		return host
	}) || r.Attendant.OnHost()
}

// Replay enqueues work. The first time, it enqueues the work directly, because modules cannot be loaded
// during a capture. The second time, it captures and launches a graph, which later calls launch again. If
// captured is false, the work is always enqueued directly.
func (r *Runner) Replay(rec *Recording, captured bool, enqueue func() error) error {
	if !rec.Loaded || !captured {
		err := enqueue()
		rec.Loaded = rec.Loaded || err == nil
		return err
	}
	return r.Repeat(&rec.graph, enqueue)
}

// Repeat launches graph g. If g is zero, Repeat first captures the work that enqueue submits.
func (r *Runner) Repeat(g *gpu.Graph, enqueue func() error) (err error) {
	if *g == 0 {
		if *g, err = r.capture(enqueue); err != nil {
			return err
		}
	}
	return r.Ctx.LaunchGraph(*g, r.Stream)
}

// Enqueue enqueues all calls of the program.
func (r *Runner) Enqueue() error {
	if r.Overlap != nil {
		return r.Overlap.EnqueueCalls(r.Program.Calls)
	}
	return r.Calls(r.Program.Calls)
}

// capture captures the work that enqueue submits as a graph.
func (r *Runner) capture(enqueue func() error) (gpu.Graph, error) {
	if err := r.Ctx.BeginCapture(r.Stream); err != nil {
		return 0, err
	}

	r.State.capturing = true
	err := enqueue()
	r.State.capturing = false
	g, endErr := r.Ctx.EndCapture(r.Stream)
	if err != nil { // the graph is incomplete
		endErr = errors.Join(endErr, r.Ctx.DestroyGraph(g))
	}

	if err := Joined(err, endErr); err != nil {
		return 0, err
	}

	return g, nil
}

// DropCaptures waits for the stream and discards all captured graphs. Call it when later runs will differ
// from them.
func (r *Runner) DropCaptures() error {
	r.Current = nil
	return Joined(r.Ctx.SyncStream(r.Stream), r.Recorded.Drop(r.Ctx))
}
