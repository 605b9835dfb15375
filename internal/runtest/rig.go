package runtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// Build creates an engine, like llm.TrainConfig.Engine.
type Build = func(*llm.Model, optim.Optimizer, llm.TrainConfig) (llm.Engine, error)

// A rig wraps a trainer with the callbacks and failures of a case, and observes its runs.
type rig struct {
	Case
	tr     *llm.Trainer
	in     *injector
	folder string // for the files of this rig

	scripted int    // step of the last orders that were given; -1 for none
	mergedAt int    // last step, once MergeAtEnd has received its event
	judgedAt int    // step of the last evaluation that parts have received
	rank     int    // 0 for a single process
	extra    []move // transitions to make after the orders of their steps

	figures  map[int]figures
	told     []told // growth, rejections
	record   bytes.Buffer
	problems []string

	saves   bool           // save after each step
	saveAt  int            // save after this step; 0 for none
	files   map[int]string // paths of the saved files, by step
	rest    bool           // the EpochEnd after a failure has been received
	failed  bool           // a callback has failed
	reshape bool           // growth was reported since the last StepEnd
	frozen  frozen
	moves   []move // transitions of seeds, with the last step before each
	waiting []waiting
	refused []int     // orders that were rejected because of the failure
	dropped []dropped // commands of the controller that were rejected because of the failure

	// The file of the callback Checkpoint, the step of its last version, and whether the orders of that
	// step had been given.
	checkpoint string
	written    int
	ordered    bool

	// resumedOrdered reports whether the checkpoint to resume from was written after the orders of its
	// step.
	resumedOrdered bool

	texts texts
	ema   *llm.EMA
	best  string // path of the best checkpoint
	bests []int  // steps of its versions

	beside sync.WaitGroup
	quit   chan struct{}
}

// figures holds the bits of the numbers in a StepEnd.
type figures struct{ loss, norm, rate uint64 }

// unstable reports whether the loss of any step is so large that the run may diverge if anything changes.
func (r *rig) unstable() bool {
	for _, f := range r.figures {
		if !(math.Float64frombits(f.loss) < 1000) {
			return true
		}
	}
	return false
}

// told is a report of growth or of a rejected command.
type told struct {
	step int
	text string
	err  error
}

// move is a transition of a seed.
type move struct {
	step        int
	layer, seed int
	from, to    state.Stage
}

// waiting is an order without an answer yet.
type waiting struct {
	step int
	done <-chan error
}

// newRig returns a rig for a case. It creates the model unless m is given.
func newRig(c Case, build Build, m *llm.Model, folder string, rank int) (r *rig, err error) {
	r = &rig{Case: c, in: newInjector(), folder: folder, scripted: -1, figures: map[int]figures{},
		files: map[int]string{}, written: -1, rank: rank}
	if err := os.MkdirAll(folder, 0o777); err != nil {
		return nil, err
	}

	if m == nil {
		if m, err = c.newModel(); err != nil {
			return nil, err
		}
	}

	if r.texts, err = c.newTexts(r.in); err != nil {
		return nil, err
	}

	o, err := c.newOptimizer(r.in)
	if err != nil {
		return nil, err
	}

	tc, err := c.config()
	if err != nil {
		return nil, err
	}

	tc.Engine = func(m *llm.Model, o optim.Optimizer, tc llm.TrainConfig) (llm.Engine, error) {
		if err := r.in.call("engine"); err != nil {
			return nil, err
		}
		e, err := build(m, o, tc)
		if err != nil {
			return nil, err
		}
		return wrap(e, r.in), nil
	}

	if r.tr, err = llm.NewTrainer(m, r.texts.loader, o, tc); err != nil {
		return nil, err
	}

	if c.Growth != nil {
		g, err := c.growthOf(r.in, r.texts.heldOut, func(c state.Command, err error) {
			r.told = append(r.told, told{r.tr.Step(), fmt.Sprintf("%v: %v", c, err), err})
			if errors.Is(err, ErrInjected) {
				epoch := r.tr.Model.Kasmina.Lattice(0).Epoch()
				r.dropped = append(r.dropped, dropped{epoch, c.String()})
			}
		}, &r.record)
		if err == nil {
			err = r.tr.Grow(g)
		}
		if err != nil {
			return nil, errors.Join(err, r.tr.Close())
		}
	}

	if err := errors.Join(r.listen(), r.use()); err != nil {
		return nil, errors.Join(err, r.tr.Close())
	}

	r.callbacks()
	return r, nil
}

// wrap puts an injector around an engine.
func wrap(e llm.Engine, in *injector) llm.Engine {
	switch e := e.(type) {
	case llm.ParallelStepper: // a rank on a GPU is not wrapped
		return e
	case parallelEngine:
		return faultyRank{e, in}
	case gpuEngine:
		return wrapGPU(e, in)
	case cpuEngine:
		return faulty{e, in}
	}

	return e
}

func (r *rig) problem(format string, args ...any) {
	r.problems = append(r.problems, fmt.Sprintf(format, args...))
}

// listen records the transitions of all seeds.
func (r *rig) listen() error {
	r.in.now = r.tr.Step
	r.in.stages = func() (all [][]state.Stage) {
		for _, l := range r.tr.Model.Kasmina.Lattices() {
			var own []state.Stage
			for seed := range l.Seeds() {
				stage, _ := l.Stage(seed)
				own = append(own, stage)
			}
			all = append(all, own)
		}
		return all
	}

	_, err := r.tr.Model.Kasmina.Listen(func(e state.Event) {
		if e.Kind == state.StageChanged {
			r.moves = append(r.moves, move{r.tr.Step(), e.Layer, e.Seed, e.From, e.To})
		}
	})
	return err
}

// callbackNames lists the names of callbacks that must leave no trace.
var callbackNames = []string{"evaluate", "score", "sample", "save", "notes", "scrub", "monitor", "readers",
	"save soon", "more checkpoints"}

// callbacks adds the case's callbacks to the trainer.
func (r *rig) callbacks() {
	t := r.tr
	if f := r.Fault; f != nil && f.Early {
		t.On(r.fail)
	}

	t.On(r.see, r.order)
	if r.Train.Merge {
		t.On(llm.MergeAtEnd(t), func(e llm.Event) error {
			if e.Kind == llm.StepEnd && e.Last {
				r.mergedAt = e.Step
			}
			return nil
		})
	}

	if r.Parts.evaluates() {
		evaluate := llm.Evaluate(t, r.texts.heldOut, evaluateEvery)
		t.On(func(e llm.Event) error {
			// If a callback failed after the last step, the step may not have been evaluated.
			if e.Kind == llm.RunStart && e.Step > 0 && !e.Last {
				e.Kind = llm.StepEnd
			}
			return evaluate(e)
		})
	}

	for _, b := range r.Callbacks {
		switch b {
		case "evaluate":
			t.On(llm.Evaluate(t, r.texts.heldOut, 2))
		case "score":
			t.On(func(e llm.Event) error {
				if e.Kind != llm.StepEnd {
					return nil
				}
				_, _, err := t.Evaluate(r.texts.heldOut)
				if errors.Is(err, llm.ErrDiverged) || errors.Is(err, llm.ErrStopped) {
					return nil // the run reports it
				}
				return err
			})
		case "sample":
			t.On(llm.SampleText(t, letters{}, "ab", 5, sampler.Config{Temperature: 1},
				filepath.Join(r.folder, "sample"), 3))
		case "save":
			t.On(func(e llm.Event) error {
				if e.Kind == llm.StepEnd {
					return t.Model.Save(filepath.Join(r.folder, "model"))
				}
				return nil
			})
		case "notes":
			t.On(func(e llm.Event) error {
				if e.Kind == llm.StepEnd {
					t.Note("a note")
				}
				return nil
			})
		case "scrub":
			t.On(llm.Scrub(t, io.Discard, time.Millisecond))
		case "monitor":
			t.On(llm.Monitor(t, io.Discard, 2), llm.Ceilings(t))
		case "readers":
			t.On(r.readers)
		case "save soon":
			t.On(llm.Checkpoint(t, filepath.Join(r.folder, "soon"), 0), func(e llm.Event) error {
				if e.Kind == llm.StepEnd && e.Step%3 == 0 && !e.Last {
					return t.SaveSoon()
				}
				return nil
			})
		case "more checkpoints":
			t.On(llm.Checkpoint(t, filepath.Join(r.folder, "more"), 1))
		}
	}

	if f := r.Fault; f != nil && f.Op == "callback Noted" && !slices.Contains(r.Callbacks, "notes") {
		t.On(func(e llm.Event) error {
			if e.Kind == llm.StepEnd && e.Step%2 == 0 {
				t.Note("a note")
			}
			return nil
		})
	}

	if k := r.Checkpoint; k != nil {
		r.checkpoint = filepath.Join(r.shared(), "checkpoint", "run")
		var opts []llm.CheckpointOption
		if k.Background {
			opts = append(opts, llm.InBackground())
		}
		if k.Apart {
			opts = append(opts, llm.OptimizerApart())
		}
		if k.Parts {
			opts = append(opts, llm.InParts())
		}
		t.On(r.disk, llm.Checkpoint(t, r.checkpoint, k.Every, opts...))
	}

	t.On(func(e llm.Event) error {
		due := r.saves || r.saveAt > 0 && r.saveAt == e.Step
		if due && (e.Kind == llm.StepEnd || e.Kind == llm.RunStart) {
			path := filepath.Join(r.folder, fmt.Sprint("step-", e.Step))
			err := t.Save(path)
			if errors.Is(err, llm.ErrDiverged) {
				return nil // the next step reports it
			}
			r.files[e.Step] = path
			return err
		}
		return nil
	})

	if f := r.Fault; f == nil || !f.Early {
		t.On(r.fail)
	}

	t.On(func(e llm.Event) error { // cancel or stop the run between two steps
		if e.Kind == llm.StepEnd {
			if r.in.due("cancel StepEnd") {
				r.in.cancel()
			}
			if r.in.due("stop StepEnd") {
				r.in.stop()
			}
		}
		return nil
	})
}

// shared returns the folder for files that all ranks write together. It is rank 0's folder.
func (r *rig) shared() string {
	if r.rank > 0 {
		return filepath.Join(filepath.Dir(r.folder), "0")
	}
	return r.folder
}

// fail is a callback that fails as specified by the fault.
func (r *rig) fail(e llm.Event) error {
	if r.in.due("panic " + e.Kind.String()) {
		panic(r.in.failure("panic " + e.Kind.String()))
	}

	op := opOfCallback(e.Kind)
	if r.rank > 0 || r.Ranks == 0 {
		if e.Kind == llm.StepEnd && r.in.due("rank StepEnd") {
			r.failed = true
			return r.in.failure("rank StepEnd")
		}
	}

	if r.in.due(op) {
		r.failed = true
		return r.in.failure(op)
	}

	return nil
}

// duration matches the duration in reports of growth, which differs from run to run.
var duration = regexp.MustCompile(`,? in [0-9.]+ s`)

// see records the events of the trainer and checks invariants.
func (r *rig) see(e llm.Event) error {
	// After a failure, there may be an EpochEnd with reports of seeds before the RunEnd.
	if r.failed && (r.rest && e.Kind != llm.RunEnd || !slices.Contains([]llm.EventKind{llm.Failed,
		llm.Interrupted, llm.Saved, llm.EpochEnd, llm.RunEnd}, e.Kind)) {
		r.problem("callbacks receive %v of step %d after a callback has failed", e.Kind, e.Step)
	}

	r.rest = r.failed && e.Kind == llm.EpochEnd
	switch e.Kind {
	case llm.RunStart:
		r.quit = make(chan struct{})
		r.frozen.forget()
	case llm.RunEnd:
		if r.quit != nil {
			close(r.quit)
			r.quit = nil
		}
		r.beside.Wait()
	case llm.StepEnd:
		r.figures[e.Step] = figures{math.Float64bits(e.Loss), math.Float64bits(e.GradNorm),
			math.Float64bits(e.LearningRate)}
		if !r.reshape {
			r.frozen.check(r)
		}
		r.reshape = false
	case llm.EvalEnd:
		r.judgedAt = e.Step
	case llm.Reshaped:
		r.reshape = true
		r.told = append(r.told, told{e.Step, "reshaped: " + duration.ReplaceAllString(e.Text, ""),
			e.Err})
	case llm.Saved:
		switch e.Path {
		case r.checkpoint:
			r.written, r.ordered = e.Step, r.scripted >= e.Step
		case r.best:
			r.bests = append(r.bests, e.Step)
		}
	}

	return nil
}

// readers starts a goroutine that calls methods that are allowed during a run.
func (r *rig) readers(e llm.Event) error {
	if e.Kind != llm.RunStart {
		return nil
	}

	quit := r.quit
	r.beside.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-quit:
				return
			case <-time.After(time.Millisecond):
			}
			switch i % 5 {
			case 0:
				_, _, _ = r.tr.Evaluate(r.texts.heldOut)
			case 1:
				_ = r.tr.Save(filepath.Join(r.folder, "reader"))
			case 2:
				r.tr.Model.Kasmina.Report()
				r.tr.Last()
			case 3:
				_ = r.tr.Model.Kasmina.Verify()
				_ = r.tr.Model.Save(filepath.Join(r.folder, "reader model"))
			case 4:
				if r.ema != nil {
					_, _ = r.ema.Model()
				}
			}
		}
	})

	return nil
}

// order gives the orders of a step once: after the step, or at the start of a run that was resumed from a
// checkpoint without them.
func (r *rig) order(e llm.Event) error {
	if e.Kind != llm.StepEnd && e.Kind != llm.RunStart {
		return nil
	}

	r.hear()
	r.in.unsettle()
	for i, o := range r.Orders {
		if o.Step != e.Step {
			continue
		}
		if o.Via == "" || r.Fault != nil { // submitted orders would also take effect when a run ends
			if r.scripted >= e.Step {
				continue
			}
			if err := r.tr.Model.Kasmina.Do(o.Commands...); err != nil {
				r.told = append(r.told, told{e.Step, err.Error(), err})
				if errors.Is(err, ErrInjected) {
					if r.Ranks > 0 {
						return err // the other ranks have carried the commands out
					}
					r.refused = append(r.refused, i)
				}
			}
			continue
		}
		if r.rank > 0 {
			continue
		}
		if o.Via == "steer" {
			r.waiting = append(r.waiting, waiting{e.Step, r.tr.Steer(o.Commands...)})
		} else {
			r.waiting = append(r.waiting, waiting{e.Step, r.tr.Model.Kasmina.Submit(o.Commands...)})
		}
	}

	if r.scripted < e.Step {
		for _, m := range r.extra {
			if m.step != e.Step {
				continue
			}
			if err := r.tr.Model.Kasmina.Lattice(m.layer).Transition(m.seed, m.to); err != nil {
				return err
			}
		}
	}

	r.scripted = max(r.scripted, e.Step)
	r.in.settle()
	r.frozen.look(r)
	return nil
}

// hear records the answers to submitted orders.
func (r *rig) hear() {
	for _, w := range r.waiting {
		select {
		case err := <-w.done:
			if err != nil {
				r.told = append(r.told, told{w.step, err.Error(), err})
			}
		default:
			r.told = append(r.told, told{w.step, "an order has not been answered after the next step", nil})
		}
	}

	r.waiting = nil
}

// disk makes the folder or the file of the checkpoint unwritable.
func (r *rig) disk(e llm.Event) error {
	if e.Kind != llm.StepEnd {
		return nil
	}

	folder := filepath.Dir(r.checkpoint)
	if r.in.due("checkpoint folder") {
		return os.Rename(folder, folder+" aside")
	}

	if r.in.due("checkpoint file") {
		if err := os.Rename(r.checkpoint, r.checkpoint+" aside"); err != nil && !errors.Is(err,
			os.ErrNotExist) {
			return err
		}
		return os.MkdirAll(filepath.Join(r.checkpoint, "in the way"), 0o777)
	}

	return nil
}

// repair undoes the effect of disk.
func (r *rig) repair() error {
	if r.checkpoint == "" {
		return nil
	}

	folder := filepath.Dir(r.checkpoint)
	if _, err := os.Stat(folder + " aside"); err == nil {
		if err := os.RemoveAll(folder); err != nil {
			return err
		}
		return os.Rename(folder+" aside", folder)
	}

	if _, err := os.Stat(filepath.Join(r.checkpoint, "in the way")); err == nil {
		if err := os.RemoveAll(r.checkpoint); err != nil {
			return err
		}
		if err := os.Rename(r.checkpoint+" aside", r.checkpoint); err != nil && !errors.Is(err,
			os.ErrNotExist) {
			return err
		}
	}

	return nil
}

// panicked wraps the value of a panic during a run.
type panicked struct{ error }

func (p panicked) Unwrap() error { return p.error }

// run trains until the run ends or fails.
func (r *rig) run() (err error) {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	r.in.cancel = func() { cancel(r.in.failure("cancel")) }
	r.in.stop = func() { r.tr.Stop("as the case says") }
	defer func() {
		if p := recover(); p != nil {
			e, ok := p.(error)
			if !ok || !errors.Is(e, ErrInjected) {
				panic(p)
			}
			if r.quit != nil {
				close(r.quit)
				r.quit = nil
			}
			r.beside.Wait()
			err = panicked{e}
		}
	}()

	r.failed, r.rest = false, false
	err = r.tr.Run(ctx)
	r.hear()
	if r.stoppedEarly(err) {
		return nil
	}
	return err
}

// resume resumes from the checkpoint of a step. The argument ordered reports whether the checkpoint was
// written after the orders of the step.
func (r *rig) resume(path string, step int, ordered bool, opts ...llm.ResumeOption) error {
	if err := r.tr.Resume(context.Background(), path, opts...); err != nil {
		return err
	}

	if have := r.tr.Step(); have != step {
		return fmt.Errorf("the trainer is at step %d, and the checkpoint is of step %d", have, step)
	}

	if r.scripted = step - 1; ordered {
		r.scripted = step
	}

	r.frozen.forget()
	return nil
}

// save returns a checkpoint of the trainer.
func (r *rig) save() ([]byte, error) {
	path := filepath.Join(r.folder, "now")
	if err := r.tr.Save(path); err != nil {
		return nil, err
	}
	return os.ReadFile(path)
}

// fileBefore returns the last file that was saved after a step or before it. A step that diverges cannot be saved.
func (r *rig) fileBefore(step int) (path string, saved int) {
	for step > 0 && r.files[step] == "" {
		step--
	}
	return r.files[step], step
}

func (r *rig) close() error { return r.tr.Close() }

// toldFrom returns the reports of later steps.
func (r *rig) toldFrom(step int) (all []string) {
	for _, t := range r.told {
		if t.step > step {
			text := fmt.Sprintf("step %d: %s", t.step, t.text)
			if t.err != nil {
				text += " (" + strings.SplitN(t.err.Error(), "\n", 2)[0] + ")"
			}
			all = append(all, text)
		}
	}
	return all
}

// frozen holds the values of parameters that the next step must not change.
type frozen struct {
	params map[string][]byte
	why    map[string]string
	moves  int
}

func (f *frozen) forget() { f.params, f.why = nil, nil }

// look records the parameters that the next step must not change.
func (f *frozen) look(r *rig) {
	f.forget()
	f.moves = len(r.moves)
	m := r.tr.Model
	if !r.pull() {
		return
	}

	note := func(name, why string) {
		if p := m.Param(name); p != nil {
			if f.params == nil {
				f.params, f.why = map[string][]byte{}, map[string]string{}
			}
			f.params[name], f.why[name] = bitsOf(p.Data()), why
		}
	}

	for _, p := range m.Params {
		if !r.tr.Config.Learns(p.Name) {
			note(p.Name, "it does not learn")
		}
	}

	if r.Optimizer.Decay > 0 && !r.Optimizer.Spare {
		return
	}

	for _, planted := range m.Planted {
		for layer, l := range m.Kasmina.Lattices() {
			if l.Site() != planted.Site {
				continue
			}
			stage, err := l.Stage(planted.Seed)
			if err != nil || stage.Learns() {
				continue
			}
			for _, p := range m.Params {
				if strings.HasPrefix(p.Name, planted.Prefix()) {
					note(p.Name, fmt.Sprintf("seed %d of layer %d is %v", planted.Seed, layer, stage))
				}
			}
		}
	}
}

// pull fetches the parameters from the engine and reports whether that was possible. Ranks cannot pull
// separately.
func (r *rig) pull() bool {
	if r.Ranks > 0 {
		return false
	}
	defer r.in.silence()()

	done, err := r.tr.Model.Current()
	if err == nil {
		done()
	}
	return err == nil
}

// check compares parameters with the values that look recorded. It does nothing if a seed has changed its
// stage since, because its parameters may have changed on purpose.
func (f *frozen) check(r *rig) {
	if len(r.moves) != f.moves && !r.Train.Frozen || len(f.params) == 0 || !r.pull() {
		return
	}
	for name, before := range f.params {
		p := r.tr.Model.Param(name)
		if p != nil && !bytes.Equal(bitsOf(p.Data()), before) {
			r.problem("step %d changes %s, although %s", r.tr.Step(), name, f.why[name])
		}
	}
}

// bitsOf returns a copy of the bytes of a slice of numbers.
func bitsOf(data any) []byte { return bytes.Clone(memory(data)) }
