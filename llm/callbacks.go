package llm

import (
	"context"
	"io"
	"sync"
	"time"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/callback"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/engine"
	"github.com/kasmina-go/kasmina/llm/infer"
	"github.com/kasmina-go/kasmina/llm/model"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/state"
)

// Callbacks are in package callback.
type (
	// An EvaluateOption changes what Evaluate does.
	EvaluateOption = callback.EvaluateOption
	// A CheckpointOption changes what Checkpoint does.
	CheckpointOption = callback.CheckpointOption
)

// ErrFolderInUse is wrapped by the error of an output folder that another program has claimed.
var ErrFolderInUse = callback.ErrFolderInUse

// WithQuick scores another text, such as a part of the held-out text, before the last step.
func WithQuick(text *data.Evaluation) EvaluateOption {
	return callback.WithQuick(text)
}

// Evaluate scores the held-out text every so many steps (0 for never) and at the last step, and
// tells the callbacks. Of a run whose context ends it scores nothing more.
func Evaluate(t *Trainer, text *data.Evaluation, every int, opts ...EvaluateOption) Callback {
	return callback.Evaluate(access{t}, text, every, opts...)
}

// InBackground writes a checkpoint while the run goes on, if there is a step to come. It writes
// from a copy of everything in it that takes memory until the file is complete. Its Saved event has
// the step that was saved, and comes after a later one.
func InBackground() CheckpointOption {
	return callback.InBackground()
}

// InParts lets several ranks write a checkpoint together, a file each: see [Trainer.SaveParts]. The
// run waits for them, InBackground or not.
func InParts() CheckpointOption {
	return callback.InParts()
}

// OptimizerApart writes the optimiser's moments to a file of their own: see [Trainer.SaveApart].
func OptimizerApart() CheckpointOption {
	return callback.OptimizerApart()
}

// Checkpoint saves everything needed to go on to the file at path. It does so every so many steps
// (0 for never), at the last step, and when the run is interrupted. After a callback or a step has
// failed it tries to save the last step, unless that is ErrDiverged. Then the file's old contents
// are better. The file is replaced as a whole: there is always a complete one. Folders that it
// needs are made. A place where it cannot be written ends the run before its first step, and so
// does a folder that another program has claimed. It is claimed for the run, as by [ClaimFolder].
func Checkpoint(t *Trainer, path string, every int, opts ...CheckpointOption) Callback {
	return callback.Checkpoint(access{t}, path, every, opts...)
}

// MergeAtEnd has the blueprints which learn fully blended in, as those of control.Adapters do,
// fossilized behind the last step of a run. As the run ends they become a part of the model. Let it
// stand before callbacks that save.
func MergeAtEnd(t *Trainer) Callback { return callback.MergeAtEnd(access{t}) }

// SampleText draws n tokens after the prompt every so many steps (0 for never) and at the last
// step, and tells the callbacks. It writes the text of the latest sample to the file at path, whose
// folders it makes, unless that is empty. With an empty prompt a document begins, if the tokenizer
// is a BPE, or has a method EndOfDocument() int as a BPE has. Ids outside the tokenizer's
// vocabulary are not drawn. Every sample starts from the same random seed. Arguments that cannot be
// used end the run before its first step, and so does a place where the file cannot be written.
func SampleText(t *Trainer, tok tokenizer.Tokenizer, prompt string, n int, c sampler.Config,
	path string, every int) Callback {
	return callback.SampleText(access{t}, tok, prompt, n, c, path, every)
}

// ClaimFolder makes an output folder, which must exist, this program's until release is called or
// the program ends. So no two programs write one run's files: to all others it is an
// ErrFolderInUse. Within the program any number of callers may claim it, from any goroutine, and it
// is the program's until all have released it. A run with a [Checkpoint] claims its folder by
// itself; a program that reads or writes there before the run claims it first.
//
// It works on Linux, macOS, the BSDs and Windows. Where the system or the file system cannot lock,
// it is an errors.ErrUnsupported, and a Checkpoint goes on without.
func ClaimFolder(dir string) (release func() error, err error) {
	return callback.ClaimFolder(dir)
}

// Monitor tells the callbacks what the ops of the trainer's engine take, as a Profiled event. It
// does so every so many steps (0 for never) and after the last one. At the end of the run it prints
// them as a table. It does nothing for an engine that is no [Profiler] or has timed nothing.
// Engines on CPU and GPU want the option WithMonitor of cpuops and cudaops.
func Monitor(t *Trainer, w io.Writer, every int) Callback {
	return callback.Monitor(access{t}, w, every)
}

// Ceilings measures, behind the first step of a run, what the engine's device reaches at best, and
// tells the callbacks of it: see [Measured]. Of several ranks the devices count as alike. It does
// nothing for an engine that is no [Measurer].
func Ceilings(t *Trainer) Callback {
	return callback.Ceilings(access{t})
}

// ProfileStep profiles a step of the run. It begins when that many steps have been made (at least
// 1), which load kernels and warm the GPU up. It writes the trace (see [Profile.WriteTrace]) to the
// file at path, whose folders it makes, and prints a summary. The trainer's engine must be a
// [Tracer]. Of a run that ends before, it writes nothing and says so.
func ProfileStep(t *Trainer, w io.Writer, path string, after int) Callback {
	return callback.ProfileStep(access{t}, w, path, after)
}

// Scrub verifies the checksums of all seeds when a run begins, and then once every period while it
// goes on. What it finds it writes to w, a line for each layer or part of a large one, and tells
// the callbacks of (Corrupted). Both happen behind the next step and once. It changes nothing: a
// corrupt seed ends the run with state.ErrCorrupt when the epoch does, unless the lattices are made
// with [state.WithQuarantine].
func Scrub(t *Trainer, w io.Writer, period time.Duration) Callback {
	return callback.Scrub(access{t}, w, period)
}

// access is the view of a trainer that callbacks have.
type access struct{ *Trainer }

func (a access) Made() error                              { return a.made() }
func (a access) Model() *Model                            { return a.Trainer.Model }
func (a access) Note(set func(*Event))                    { a.note(set) }
func (a access) Emit(k EventKind, set func(*Event)) error { return a.emit(k, set) }
func (a access) InTurn(f func() error) error              { return a.inTurn(f) }
func (a access) Context() context.Context                 { return a.context() }
func (a access) Stopped() error                           { return a.stopped() }
func (a access) Decoder() (infer.Logits, error)           { return a.decoder() }
func (a access) Saves() int                               { return a.saves() }

func (a access) OpTimes(p engine.Profiler) ([]OpTime, error) { return a.opTimes(p) }

// The engine and the configuration are read in the model's turn, since a Resume on another goroutine
// may replace them.

func (a access) Engine() Engine {
	defer model.Take(a.Trainer.Model)()
	return a.engine
}

func (a access) Config() Config {
	defer model.Take(a.Trainer.Model)()
	return a.Trainer.Model.Config
}

func (a access) CanEvaluate(text *data.Evaluation) error {
	if err := a.made(); err != nil {
		return err
	}
	defer model.Take(a.Trainer.Model)()
	return a.canEvaluate(text)
}

func (a access) Agree(err error) error {
	e, _ := a.Engine().(Parallel)
	return agreed(e, err)
}

func (a access) Busy(what string) (done func()) { return busy(a.Engine(), what) }

func (a access) Parallel() bool {
	_, parallel := a.Engine().(Parallel)
	return parallel
}

func (a access) Writes() bool {
	e, parallel := a.Engine().(Parallel)
	return !parallel || e.Rank() == 0
}

func (a access) Ranks() int {
	if e, parallel := a.Engine().(Parallel); parallel {
		return e.Ranks()
	}
	return 1
}

func (a access) AddSaver() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.steering.savers++
}

func (a access) SaveBy(path string, write callback.WriteFunc) error { return a.saveBy(path, write) }

func (a access) Copied() ([]safetensors.Tensor, map[string]string, error) { return a.copied() }

// decoder returns a decoder whose every call is a turn of its own. When the model or the engine has
// changed since the last call, as by a Resume on another goroutine, it starts again with those.
func (t *Trainer) decoder() (infer.Logits, error) {
	var next infer.Logits
	var changes uint64
	renew := func() (err error) {
		if now := model.Changes(t.Model); next == nil || now != changes {
			next, err = t.engine.Decoder()
			changes = now
		}
		return err
	}
	if err := t.inTurn(renew); err != nil {
		return nil, err
	}
	return func(ctx context.Context, tokens []int) (logits any, err error) {
		err = t.inTurn(func() error {
			if err := renew(); err != nil {
				return err
			}
			logits, err = next(ctx, tokens)
			return err
		})
		return logits, err
	}, nil
}

// opTimes is that of the trainer's engine, also when a step has failed.
func (t *Trainer) opTimes(p Profiler) ([]OpTime, error) {
	defer model.Take(t.Model)()
	if t.phase == closed {
		return nil, nil
	}
	return p.OpTimes()
}

// seedEvents gathers what happens to seeds during a run. Whoever makes it happen adds to it, on
// whatever goroutine.
type seedEvents struct {
	mu   sync.Mutex
	list []state.Event
}

func (s *seedEvents) add(e state.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, e)
}

// take returns the gathered events and empties the list.
func (s *seedEvents) take() []state.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.list
	s.list = nil
	return list
}

// tellEpoch tells the callbacks of the seeds if the last step has ended an epoch of the lattices,
// or somebody has steered behind it.
func (t *Trainer) tellEpoch() error {
	steered := t.steering.told
	t.steering.told = false
	if t.Step()%t.Config.Epoch != 0 && !steered {
		return nil
	}
	return t.tellSeeds(t.happened.take())
}

// tellRest tells the callbacks what has happened to seeds since the last epoch, if anything has.
func (t *Trainer) tellRest() error {
	happened := t.happened.take()
	if len(happened) == 0 {
		return nil
	}
	return t.tellSeeds(happened)
}

func (t *Trainer) tellSeeds(happened []state.Event) error {
	if t.Model.Kasmina.Layers() == 0 {
		return nil
	}
	reports := t.Model.Kasmina.Report()
	return t.emit(EpochEnd, func(e *Event) { e.Reports, e.SeedEvents = reports, happened })
}
