package run

import (
	"errors"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// Attendant does the work of a run outside of its calls, and distinguishes kinds of runs.
type Attendant interface {
	// AppendMode adds to b what tells this run's work from that of other runs, which are captured
	// apart.
	AppendMode(b []byte) []byte
	// OnHost reports whether the run under way computes something of the attendant's on the host.
	OnHost() bool
}

// Beside is work on another stream that goes along with the calls of a run, such as an exchange
// with other GPUs.
type Beside interface {
	// Due is what the run under way has beside it, by which runs are captured apart. Where captured
	// is false it is enqueued as it is.
	Due() (kind byte, captured bool)
	// Along enqueues the calls of a run, with what is due.
	Along(calls []*program.Call) error
	Done() // the run, or what was captured of it, is on its way
}

// Scale is the loss scale of a machine.
type Scale struct {
	Now optimizer.LossScale // as on the device
	// the scale that the gradients of the last run carry; 0 where they were dropped
	Carried float32
}

// Runner runs a program: as it is the first time, which loads what the kernels need, and then as
// what was captured of that.
type Runner struct {
	*Executor
	Program   *program.Program
	Inputs    *Inputs
	Attendant Attendant
	Beside    Beside // nil for none
	State     State
	Scale     Scale

	Recorded Recordings[string] // by what the attendant does
	Now      *Recording         // that of the run under way, or of the last one
}

// Recording is what was captured of runs, or of updates, that do the same work.
type Recording struct {
	Loaded    bool // one of them was enqueued as it is, so that a capture loads no modules
	graph     gpu.Graph
	Monitored gpu.Graph // with a monitor's marks
}

// Recordings are those of several kinds of work.
type Recordings[K comparable] map[K]*Recording

// Of is the recording of a kind, a new one where there is none.
func (all *Recordings[K]) Of(kind K) *Recording {
	if *all == nil {
		*all = Recordings[K]{}
	}
	if (*all)[kind] == nil {
		(*all)[kind] = new(Recording)
	}
	return (*all)[kind]
}

// Drop gives back what was captured.
func (all Recordings[K]) Drop(ctx gpu.Context) error {
	var errs []error
	for _, rec := range all {
		errs = append(errs, ctx.DestroyGraph(rec.graph), ctx.DestroyGraph(rec.Monitored))
	}
	clear(all)
	return errors.Join(errs...)
}

// recordings is how many kinds of runs are kept. Kasmina layers seldom have more than two modes,
// and change them together.
const recordings = 16

// Compute enqueues a run through an observer. The optimizer is the machine's, nil if it has none.
func (r *Runner) Compute(o Observer, optimizer any) error {
	defer r.State.On(Run) // also where it fails: some of its work may be on its way
	r.Scale.Carried = r.Scale.Now.Scale
	mode, captured := r.Attendant.AppendMode(nil), !r.OnHost()
	if r.Beside != nil {
		kind, can := r.Beside.Due()
		mode, captured = append(mode, kind), captured && can
	}

	if len(r.Recorded) == recordings && r.Recorded[string(mode)] == nil {
		if err := r.DropCaptures(); err != nil {
			return err
		}
	}

	r.Now = r.Recorded.Of(string(mode))

	return o.Run(Work{
		Replay: func() error {
			err := r.Replay(r.Now, captured, r.Enqueue)
			if err == nil && r.Beside != nil {
				r.Beside.Done()
			}
			return err
		},
		Plain:     r.Enqueue,
		Captured:  r.Now.Loaded && captured,
		Optimizer: optimizer,
	})
}

// OnHost reports whether the run under way computes something on the host, so that it cannot be
// captured.
func (r *Runner) OnHost() bool {
	return slices.ContainsFunc(r.Program.Calls, func(c *program.Call) bool {
		_, host := c.Params.(*program.HostOp)
		return host
	}) || r.Attendant.OnHost()
}

// Replay enqueues work as it is the first time, which loads modules: a capture does not allow that.
// The second time records it, and later ones replay that, unless it cannot be captured.
func (r *Runner) Replay(rec *Recording, captured bool, enqueue func() error) error {
	if !rec.Loaded || !captured {
		err := enqueue()
		rec.Loaded = rec.Loaded || err == nil
		return err
	}
	return r.Repeat(&rec.graph, enqueue)
}

// Repeat launches a graph. If there is none yet, it first captures one from the enqueued calls.
func (r *Runner) Repeat(g *gpu.Graph, enqueue func() error) (err error) {
	if *g == 0 {
		if *g, err = r.capture(enqueue); err != nil {
			return err
		}
	}
	return r.Ctx.LaunchGraph(*g, r.Stream)
}

// Enqueue enqueues all calls.
func (r *Runner) Enqueue() error {
	if r.Beside != nil {
		return r.Beside.Along(r.Program.Calls)
	}
	return r.Calls(r.Program.Calls)
}

// capture records what is enqueued as a graph.
func (r *Runner) capture(enqueue func() error) (gpu.Graph, error) {
	if err := r.Ctx.BeginCapture(r.Stream); err != nil {
		return 0, err
	}

	r.State.capturing = true
	err := enqueue()
	r.State.capturing = false
	g, endErr := r.Ctx.EndCapture(r.Stream)
	if err != nil { // it is a part of what was asked for
		endErr = errors.Join(endErr, r.Ctx.DestroyGraph(g))
	}

	if err := Joined(err, endErr); err != nil {
		return 0, err
	}

	return g, nil
}

// DropCaptures waits for the stream, and drops what was captured, since later runs differ from it.
func (r *Runner) DropCaptures() error {
	r.Now = nil
	return Joined(r.Ctx.SyncStream(r.Stream), r.Recorded.Drop(r.Ctx))
}
