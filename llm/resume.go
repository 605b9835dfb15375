package llm

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/internal/jsonfloat"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/llm/internal/settings"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// ErrSettings reports a checkpoint of a run whose settings differ from the trainer's. Continuing such
// a run would not reproduce an uninterrupted one bit for bit.
var ErrSettings = errors.New("checkpoint of a run with other settings")

// Resume sets the model, lattices, optimizer and loader to the state that Trainer.Save wrote to the file
// at path. The run then continues as if it had never stopped, bit for bit on processors with the same
// instructions. A run in progress continues from there as well.
//
// Resume changes nothing and returns an error if the file is corrupted, has another architecture
// (ErrArchitecture), other data (data.ErrChanged) or other settings (ErrSettings), or is beyond
// TrainConfig.Steps. The settings are the fields of TrainConfig that affect the result,
// Model.KasminaOptions, the schedule, the optimizer and its options, the loader's seed, the
// tokenizer, the engine, and how the run grows. Likewise, nothing changes if ctx is done while the
// file is being read.
//
// If the engine cannot take over the new state, the error says so. The model and the optimizer then
// hold the file's state, which Model.Save can still save, but Run, Save and Evaluate return an error
// until a Resume succeeds.
//
// Grow may be called before or after Resume. If the run grew differently, or not at all, Resume or Run
// returns ErrSettings.
func (t *Trainer) Resume(ctx context.Context, path string, opts ...ResumeOption) error {
	err := t.resume(ctx, path, opts)
	if errors.Is(err, safetensors.ErrCorrupt) {
		return fmt.Errorf("%w: nothing has changed; resume from another checkpoint", err)
	}
	return err
}

func (t *Trainer) resume(ctx context.Context, path string, opts []ResumeOption) error {
	var r resumption
	for _, opt := range opts {
		opt(&r)
	}

	done := takeToChange(t.Model)
	defer done()
	if t.phase == closed {
		return fmt.Errorf("llm: Resume: %w", errClosed)
	}

	f, err := modelfile.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()

	run, err := t.readRun(f, &r)
	if err != nil {
		return err
	}

	install, differences, err := t.loadParts(ctx, f, run)
	if err != nil {
		return err
	}

	if len(differences) > 0 && !r.newSettings {
		return f.Errorf("%w: %s", ErrSettings, withRemedy(differences))
	}

	other := !t.Model.layout().SameBlocks(run.model.layout)
	if other && trainersOf(t.Model) > 1 {
		return f.Errorf("its model has other blocks, and another trainer of the model is open: " +
			"close it")
	}

	if err := t.setStates(run); err != nil {
		return f.Errorf("%w", err)
	}

	install()
	if err := t.goOn(run.training, other); err != nil {
		return f.Errorf("%w", err)
	}

	done() // the report function may save
	r.reportDifferences(differences)
	return nil
}

// readRun reads the header of a checkpoint: the state of the run that is not a tensor, and the layout of its
// model, which may have grown. The parts of the trainer read and check the rest.
func (t *Trainer) readRun(f *modelfile.File, r *resumption) (*resumedRun, error) {
	l, err := layoutIn(f)
	if err != nil {
		return nil, err
	}

	if diff := settings.Fields(t.Model.Config.Origin(), l.Origin()); len(diff) > 0 {
		return nil, f.Errorf("%w: %s", ErrArchitecture, strings.Join(diff, "; "))
	}

	if _, ok := f.Metadata[modelfile.TrainingKey]; !ok {
		return nil, f.Errorf("it holds a model alone, without the state of a run: LoadModel loads it")
	}

	// values stored as null in the file
	run := &training{Loss: unknown, GradNorm: unknown, ValLoss: unknown, ValBPB: unknown}
	limit := modelfile.MaxRun + l.Tensors()*modelfile.MaxRule
	if err := f.Decode(modelfile.TrainingKey, "the state of the run", limit, run); err != nil {
		return nil, err
	}

	if r.newData != nil {
		run.begin(*r.newData, t.Loader)
	}

	return &resumedRun{training: run, options: r, model: modelState{layout: l},
		lattices: t.Model.Kasmina.Arrays}, nil
}

// momentsIn reads optimizer state that is stored with a prefix.
func momentsIn(ctx context.Context, f *modelfile.File, prefix string) (all []optim.Tensor,
	err error) {
	for name := range f.With(prefix) {
		x, err := f.Tensor(ctx, name)
		if err != nil {
			return nil, f.Errorf("%w", err)
		}
		own := strings.TrimPrefix(name, prefix)
		all = append(all, optim.Tensor{Name: own, Shape: x.Shape, Data: x.Data})
	}
	return all, nil
}

// setStates sets the loss scale, the loader and the optimizer to the state that was read. If one of them
// rejects its state, setStates restores all of them. If that fails too, the trainer cannot be used until
// another Resume succeeds.
//
// The optimizer is also tried with the state that a rollback or the end of a trial would need, so
// that a file that cannot be continued is rejected now.
func (t *Trainer) setStates(run *resumedRun) error {
	// A diverged model is a good reason to resume.
	if err := pull(t.Model); err != nil && !errors.Is(err, ErrDiverged) {
		return err
	}

	own := modelState{layout: t.Model.layout(), Params: t.Model.Params,
		Moments: t.Optimizer.State()}
	loader, scale := t.Loader.State(), t.driver.lossScale()
	known := own.Params
	undo := func(err error) error {
		return t.undo(err, func() error { return t.driver.setOptimizer(known, own) },
			func() error { return t.Loader.SetState(loader) },
			func() error { return t.driver.setLossScale(scale) })
	}

	try := func(what string, b branch) error {
		if err := t.driver.setLossScale(b.scale); err != nil {
			return undo(fmt.Errorf("%s: %w", what, err))
		}
		err := t.driver.setOptimizer(known, b.modelState)
		known = slices.Concat(known, b.Params)
		if err != nil {
			return undo(fmt.Errorf("%s: %w", what, err))
		}
		return nil
	}

	for _, b := range run.growing.snapshots {
		if err := try("the model from before it grew", b.branch); err != nil {
			return err
		}
	}

	if w := run.growing.twin; w != nil && !w.lost {
		if err := try("the model's twin", w.branch); err != nil {
			return err
		}
	}

	if err := t.driver.setLossScale(run.LossScale); err != nil {
		return undo(err)
	}

	if err := t.Loader.SetState(run.Loader); err != nil {
		return undo(err)
	}

	if err := t.driver.setOptimizer(known, run.model); err != nil {
		known = slices.Concat(known, run.model.Params)
		return undo(err)
	}

	return nil
}

// goOn completes a Resume by marking the trainer as the holder of the parameters just read and
// passing them to the engine. It creates a new engine if the blocks have changed.
func (t *Trainer) goOn(run *training, other bool) error {
	changed(t.Model)
	hold(t.Model, holder{t})
	t.noteEnd()
	other = other || !slices.Equal(t.driver.attached, attachedTo(t.Model.Kasmina))
	if !other && t.driver.engine != nil {
		err := t.driver.engine.Drop() // a failed step may have left gradients
		if err == nil {
			err = t.driver.engine.Push()
		}
		if err != nil {
			t.on(restored, nil)
			t.on(pushFailed, err)
			return t.condition.err()
		}
	} else if err := t.driver.recreateEngine(run.LossScale); err != nil {
		t.on(engineLost, err)
		return t.condition.err()
	}

	t.on(restored, nil)
	return nil
}

// begin changes the state of a run so that it starts with a loader's data.
func (run *training) begin(keep Keep, l Loader) {
	run.Loader = data.LoaderState{Seed: l.Config().Seed, Seq: l.Config().Seq, Data: l.State().Data}
	run.Settings.Seed = l.Config().Seed
	run.ValLoss, run.ValBPB = unknown, unknown
	run.Preferences, run.ValPreferences = op.PreferenceFigures{}, op.PreferenceFigures{}
	if !keep.Optimizer {
		run.LossScale = nil
	}
	if !keep.Steps {
		run.Step, run.Loss, run.GradNorm, run.LearningRate = 0, unknown, unknown, 0
		run.Spent, run.Share, run.Losses, run.Summed = Budget{}, 0, 0, 0
	}
}

var unknown = jsonfloat.Float(math.NaN())

// settings returns the current growth settings.
func (g *growth) settings() *settings.Growth {
	o := g.options
	if o == nil {
		return &settings.Growth{}
	}

	var by any = o.Controller
	if o.Replay != nil {
		by = o.Replay
	}

	text := ""
	if o.Validation != nil {
		text = o.Validation.Fingerprint()
	}

	all := settings.GrowthOf(by, o.Every, text)
	all.Governor, _ = json.Marshal(o.Governor) // already checked by Grow
	all.Rewarm, all.FreshMoments = o.Rewarm, o.FreshMoments
	return all
}

func (t *Trainer) settings() *settings.Settings {
	c := t.Config
	s := &settings.Settings{
		Plain: settings.Plain{Batch: c.Batch, Accumulate: c.Accumulate, Clip: c.Clip,
			Epoch: c.Epoch, Frozen: c.Frozen, Directed: c.Directed, Tuned: strings.Join(c.Tuned, " "),
			Preference: preferenceText(c.Preference), Budget: c.Budget.String(), Seed: t.Loader.Config().Seed,
			Tokenizer: t.Loader.Tokenizer(),
			Optimizer: fmt.Sprintf("%T", t.Optimizer), Engine: t.driver.engineName()},
		Steps:  c.Steps,
		Rates:  settings.RatesOf(c.Schedule, c.Steps),
		Anneal: settings.AnnealingOf(c.Annealing),
		Growth: cmp.Or(t.growth.grew, t.growth.settings()),
	}

	s.Rules = t.rules(t.Model.layout())
	return s
}

// rules returns the optimizer's rules for the parameters of a model, except those in the model's Base.
func (t *Trainer) rules(l layout) map[string]optim.Rule {
	o, ok := t.Optimizer.(optim.Rules)
	if !ok {
		return nil
	}

	rules := map[string]optim.Rule{}
	for name, shape := range l.Parameters() {
		if !t.Model.Base.Has(name) {
			rules[name] = o.Rule(name, shape)
		}
	}
	return rules
}

// preferenceText describes the loss of preference pairs, or returns "" for nil.
func preferenceText(p *op.Preference) string {
	if p == nil {
		return ""
	}
	return fmt.Sprintf("%s, β %v, smoothing %v", p.Kind, p.Beta, p.Smoothing)
}

// withRemedy lists differences, with advice on how to resolve them.
func withRemedy(differences []string) string {
	return strings.Join(differences, "; ") +
		": set up the trainer as that run was, or Resume with the option WithNewSettings"
}

// A ResumeOption configures what Resume accepts.
type ResumeOption func(*resumption)

type resumption struct {
	newSettings bool
	report      func(differences []string)
	newData     *Keep
}

// reportDifferences reports the accepted differences.
func (r *resumption) reportDifferences(differences []string) {
	if len(differences) > 0 && r.report != nil {
		r.report(differences)
	}
}

// WithNewSettings accepts a checkpoint from a run with different settings, which Resume would
// otherwise reject with ErrSettings, and continues with the trainer's settings. If settings differ
// and report is not nil, report is called with the differences once everything is loaded. A loader
// with another seed starts its next epoch.
//
// A different tokenizer is still rejected, because its ids would be meaningless to the model.
// Different data requires [WithNewData].
func WithNewSettings(report func(differences []string)) ResumeOption {
	return func(r *resumption) { r.newSettings, r.report = true, report }
}

// Keep selects the state a run keeps when it continues with different data. It always keeps the model
// and its lattices.
type Keep struct {
	Optimizer bool // the optimizer state; otherwise it is reset
	Steps     bool // the step count and the position in the schedule; otherwise the run restarts at step 0
}

// WithNewData continues with the data of the trainer's loader even if the checkpoint's run had other
// data, which Resume would otherwise reject with data.ErrChanged. The loader starts at the beginning
// of its data, and losses on held-out text are discarded. WithNewData can be combined with
// WithNewSettings, for example to use another schedule.
func WithNewData(keep Keep) ResumeOption {
	return func(r *resumption) { r.newData = &keep }
}
