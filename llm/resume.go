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
	"github.com/kasmina-go/kasmina/optim"
)

// ErrSettings is wrapped by the error of a checkpoint whose run was set up in another way than the
// trainer. Its continuation would not have the bits of an uninterrupted run.
var ErrSettings = errors.New("checkpoint of a run with other settings")

// Resume sets model, lattices, optimiser and loader to what Trainer.Save wrote to the file at path.
// The run then continues as if it had never stopped, bit for bit on processors with the same
// instructions. A file is refused that is damaged, of another architecture (ErrArchitecture), of
// other data (data.ErrChanged), of a run with other settings (ErrSettings) or beyond
// TrainConfig.Steps. The trainer then is as before. Settings are the fields of TrainConfig that
// matter, Config.KasminaOptions, the schedule, the optimiser and its options. They are also the
// loader's seed, the tokenizer, the engine, and how the run grows. When the engine cannot take what
// was read, the error says so. Model and optimiser are the file's then, which Model.Save can save.
// The trainer's Run, Save and Evaluate refuse until a Resume succeeds. When the context ends while
// the file is read, nothing has changed either. A run that goes on meanwhile goes on from there.
//
// Grow may be called before or after: where the run grew in another way, or not at all, Resume or
// Run returns the ErrSettings.
func (t *Trainer) Resume(ctx context.Context, path string, opts ...ResumeOption) error {
	err := t.resume(ctx, path, opts)
	if errors.Is(err, safetensors.ErrCorrupt) {
		return fmt.Errorf("%w: nothing has changed; resume from another checkpoint", err)
	}
	return err
}

func (t *Trainer) resume(ctx context.Context, path string, opts []ResumeOption) error {
	if ctx == nil {
		return fmt.Errorf("llm: Resume: %w", errNoContext)
	}

	var r resumption
	for _, opt := range opts {
		if opt == nil {
			return errors.New("llm: Resume: an option is nil")
		}
		opt(&r)
	}

	if err := t.made(); err != nil {
		return fmt.Errorf("llm: Resume: %w", err)
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

	run, c, diff, err := t.runIn(f, &r)
	if err != nil {
		return err
	}

	if err := f.Fits(fileShapeOf(c, t.Model.Dtype())); err != nil {
		return err
	}

	params, loadModel, err := contentsIn(ctx, t.Model, f, c)
	if err != nil {
		return err
	}

	resumed := &resumedRun{training: run, config: c, lattices: t.Model.Kasmina.Arrays}
	install, differences, err := t.loadStates(ctx, f, resumed)
	if err != nil {
		return err
	}

	if len(differences) > 0 && !r.newSettings {
		return f.Errorf("%w: %s", ErrSettings, withRemedy(differences))
	}

	diff = append(diff, differences...)
	optimizer, err := r.optimizerIn(ctx, f, fileShapeOf(c, t.Model.Dtype()))
	if err != nil {
		return err
	}

	other := !t.Model.Config.SameBlocks(c)
	if other && trainersOf(t.Model) > 1 {
		return f.Errorf("its model has other blocks, and another trainer of the model is open: " +
			"close it")
	}

	read := modelState{Config: c, Params: params, Moments: optimizer}
	if err := t.setStates(run, resumed.growing, read); err != nil {
		return f.Errorf("%w", err)
	}

	loadModel()
	install()
	if err := t.goOn(run, other); err != nil {
		return f.Errorf("%w", err)
	}

	if t.growth.grew = run.Settings.Growth; r.newSettings {
		t.growth.grew = nil
	}

	done() // what is told may save
	r.tell(diff)
	return nil
}

// runIn reads the state of a run from a file, and returns it if the trainer can go on from there.
// It also returns the model's configuration, whose blocks may have grown from those that the
// trainer's began with, and the settings that differ and may.
func (t *Trainer) runIn(f *modelfile.File, r *resumption) (*training, Config, []string, error) {
	c, err := configIn(f)
	if err != nil {
		return nil, c, nil, err
	}

	options := c.KasminaOptions
	c.KasminaOptions = t.Model.Config.KasminaOptions
	if diff := settings.Fields(t.Model.Config.Origin(), c.Origin()); len(diff) > 0 {
		return nil, c, nil, f.Errorf("%w: %s", ErrArchitecture, strings.Join(diff, "; "))
	}

	// null in the file
	run := &training{Loss: unknown, GradNorm: unknown, ValLoss: unknown, ValBPB: unknown}
	if _, ok := f.Metadata[modelfile.TrainingKey]; !ok {
		return nil, c, nil,
			f.Errorf("it holds a model alone, without the state of a run: LoadModel loads it")
	}

	for _, prefix := range []string{modelfile.BeforePrefix, modelfile.TwinPrefix} {
		for name := range f.With(prefix) {
			return nil, c, nil, f.Errorf("it was written by an older version, which saved growth that has "+
				"not been decided in another format (tensor %.100q): continue the run with that version "+
				"until its blueprints are fossilized or culled", name)
		}
	}

	limit := modelfile.MaxRun + c.Tensors()*modelfile.MaxRule
	if err := f.Decode(modelfile.TrainingKey, "the state of the run", limit, run); err != nil {
		return nil, c, nil, err
	}

	if r.newData != nil {
		run.begin(*r.newData, t.Loader)
	}

	if run.Step < 0 || run.Step > t.Config.Steps {
		return nil, c, nil,
			f.Errorf("the run is at step %d, want 0 to TrainConfig.Steps, which is %d; a plan of "+
				"more steps goes on from there", run.Step, t.Config.Steps)
	}

	const most = 1 << 62 // no run gets there, and counting on cannot overflow
	if run.Spent.Time < 0 || run.Spent.Time > most || run.Spent.Tokens < 0 ||
		run.Spent.Tokens > most || !(run.Spent.FLOPs >= 0) || !(run.Share >= 0 && run.Share <= 1) ||
		run.Summed < 0 || run.Summed > run.Step || run.Losses-run.Losses != 0 {
		return nil, c, nil,
			f.Errorf("the run has spent %+v, a share of %v, and its epoch has %d steps whose "+
				"losses are %v together", run.Spent, run.Share, run.Summed, run.Losses)
	}

	if t.Config.Budget != (Budget{}) && t.Config.Budget.String() != run.Settings.Budget {
		run.Share = t.Config.Budget.ShareOf(run.Spent)
	}

	if err := t.knowsText(run); err != nil {
		return nil, c, nil, f.Errorf("%w", err)
	}

	diff := t.settings().Differences(run.Settings, t.Config.Schedule)
	for _, d := range settings.Fields(t.Model.Config.KasminaOptions, options) {
		diff = append(diff, "Config.KasminaOptions."+d)
	}

	if t.growth.options != nil || r.newSettings { // else Grow may still be called: Run looks again
		diff = append(diff, t.growth.settings().Differences(run.Settings.Growth)...)
	}

	if len(diff) > 0 && !r.newSettings {
		return nil, c, nil, f.Errorf("%w: %s", ErrSettings, withRemedy(diff))
	}

	if seed := t.Loader.Config().Seed; run.Settings.Seed != seed {
		run.Loader.Seed, run.Loader.Epoch, run.Loader.Next = seed, run.Loader.Epoch+1, 0
	}

	return run, c, diff, nil
}

// knowsText returns an error if a run learnt from other text than the trainer's loader has, or with
// another tokenizer.
func (t *Trainer) knowsText(run *training) error {
	if here, there := t.Loader.Tokenizer(), run.Settings.Tokenizer; there != "" &&
		there != here {
		return fmt.Errorf("%w: its model's tokens are those of %q, the trainer's data is in "+
			"those of %q: encode the text with the tokenizer of that run", ErrSettings, there, here)
	}

	switch here := t.Loader.State().Data; {
	case run.Loader.Data == here:
		return nil
	case len(run.Loader.Data) == oldFingerprint && run.Settings.Growth == nil:
		return fmt.Errorf("%w: this older checkpoint tells its text by the names and sizes of "+
			"files (fingerprint %q), not by what it says: if yours is the same, go on with it, "+
			"from its start, by the option WithNewData", data.ErrChanged, run.Loader.Data)
	default:
		return fmt.Errorf("%w: the run learnt from other text than the trainer's loader has "+
			"(fingerprint %.12q, not %.12q): give it the same text, or go on with this one by "+
			"the option WithNewData", data.ErrChanged, run.Loader.Data, here)
	}
}

// optimizerIn reads what the optimiser remembers, unless it is to start anew.
func (r *resumption) optimizerIn(ctx context.Context, f *modelfile.File,
	shape modelfile.Shape) ([]optim.Tensor, error) {
	if r.newData != nil && !r.newData.Optimizer {
		return nil, nil
	}

	all, err := momentsIn(ctx, f, modelfile.OptimizerPrefix)
	if err != nil {
		return nil, err
	}

	apart, err := f.Moments(ctx, shape)
	for _, m := range apart {
		all = append(all, optim.Tensor{Name: m.Name, Shape: m.Shape, Data: m.Data})
	}

	return all, err
}

// momentsIn reads what an optimiser remembers, under a prefix.
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

// setStates sets the loss scale, the loader and the optimizer to those of a model that has been
// read. Each refuses what does not fit; then all are as before.
//
// The optimizer is also tried on what a rollback or the end of a trial would need, so that a file
// that cannot be continued is refused now.
func (t *Trainer) setStates(run *training, growing growthState, read modelState) error {
	// What has diverged is what a checkpoint is for.
	if err := pull(t.Model); err != nil && !errors.Is(err, ErrDiverged) {
		return err
	}

	own := modelState{Config: t.Model.Config, Params: t.Model.Params,
		Moments: t.Optimizer.State()}
	loader, scale := t.Loader.State(), t.driver.lossScale()
	known := own.Params
	undo := func(err error) error {
		back := []error{t.driver.setOptimizer(known, own), t.Loader.SetState(loader), t.driver.setLossScale(scale)}
		return errors.Join(append([]error{err}, back...)...)
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

	for _, b := range growing.snapshots {
		if err := try("what the model was before it grew", b.branch); err != nil {
			return err
		}
	}

	if w := growing.twin; w != nil && !w.lost {
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

	if err := t.driver.setOptimizer(known, read); err != nil {
		known = slices.Concat(known, read.Params)
		return undo(err)
	}

	return nil
}

// goOn makes a model that has been read the trainer's, and the engine's: a new one's where its
// blocks are others than before.
func (t *Trainer) goOn(run *training, other bool) error {
	changed(t.Model)
	hold(t.Model, holder{t})
	t.progress = progress{spent: run.Spent, share: run.Share, losses: float64(run.Losses),
		summed: run.Summed}
	t.note(func(e *Event) {
		e.Step, e.Loss = run.Step, float64(run.Loss)
		e.LearningRate, e.GradNorm = run.LearningRate, float64(run.GradNorm)
		e.ValLoss, e.ValBPB = float64(run.ValLoss), float64(run.ValBPB)
	})
	t.noteEnd()
	other = other || !slices.Equal(t.driver.attached, attachedTo(t.Model.Kasmina))
	if !other && t.driver.engine != nil {
		if err := t.driver.engine.Push(); err != nil {
			t.on(restored, nil)
			t.on(pushFailed, err)
			return t.condition.err()
		}
	} else if err := t.driver.renewEngine(run.LossScale); err != nil {
		t.on(engineLost, err)
		return t.condition.err()
	}

	t.on(restored, nil)
	return nil
}

// begin makes the state of a run that of one which begins with a loader's data.
func (run *training) begin(keep Keep, l Loader) {
	run.Loader = data.LoaderState{Seed: l.Config().Seed, Seq: l.Config().Seq, Data: l.State().Data}
	run.Settings.Seed = l.Config().Seed
	run.ValLoss, run.ValBPB = unknown, unknown
	if !keep.Optimizer {
		run.LossScale = nil
	}
	if !keep.Steps {
		run.Step, run.Loss, run.GradNorm, run.LearningRate = 0, unknown, unknown, 0
		run.Spent, run.Share, run.Losses, run.Summed = Budget{}, 0, 0, 0
	}
}

var unknown = jsonfloat.Float(math.NaN())

// growthSettings are those of the trainer as it is now.
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
	all.Governor, _ = json.Marshal(o.Governor) // which Grow has checked
	all.Rewarm, all.FreshMoments = o.Rewarm, o.FreshMoments
	return all
}

func (t *Trainer) settings() *settings.Settings {
	c := t.Config
	s := &settings.Settings{
		Plain: settings.Plain{Batch: c.Batch, Accumulate: c.Accumulate, Clip: c.Clip,
			Epoch: c.Epoch, Budget: c.Budget.String(), Seed: t.Loader.Config().Seed,
			Tokenizer: t.Loader.Tokenizer(),
			Optimizer: fmt.Sprintf("%T", t.Optimizer), Engine: t.driver.engineName()},
		Steps:  c.Steps,
		Rates:  settings.RatesOf(c.Schedule, c.Steps),
		Anneal: settings.AnnealingOf(c.Annealing),
		Growth: cmp.Or(t.growth.grew, t.growth.settings()),
	}

	if o, ok := t.Optimizer.(optim.Rules); ok {
		s.Rules = map[string]optim.Rule{}
		for _, p := range t.Model.Params {
			s.Rules[p.Name] = o.Rule(p.Name, p.Value.Shape())
		}
	}

	return s
}

// withRemedy lists differences and says what can be done about them.
func withRemedy(differences []string) string {
	return strings.Join(differences, "; ") +
		": set up the trainer as that run was, or Resume with the option WithNewSettings"
}

// oldFingerprint is how long the fingerprint of a text was while it stood for names and sizes.
const oldFingerprint = 16

// A ResumeOption changes what Resume accepts.
type ResumeOption func(*resumption)

type resumption struct {
	newSettings bool
	report      func(differences []string)
	newData     *Keep
}

// tell reports differences that were accepted.
func (r *resumption) tell(differences []string) {
	if len(differences) > 0 && r.report != nil {
		r.report(differences)
	}
}

// WithNewSettings goes on with the trainer's settings where they are not those of the run that
// wrote the checkpoint, instead of refusing it with ErrSettings. If there are such, report, unless
// it is nil, is told of them once everything is loaded. A loader of another seed begins its next
// epoch. Another tokenizer is refused all the same: to the model, its ids would mean nothing. Other
// data is another matter: see [WithNewData].
func WithNewSettings(report func(differences []string)) ResumeOption {
	return func(r *resumption) { r.newSettings, r.report = true, report }
}

// Keep says what a run keeps that goes on with other data. The model and its lattices it always
// keeps.
type Keep struct {
	Optimizer bool // what the optimiser remembers; else it starts anew
	Steps     bool // how many there were, the place in the schedule; else the run is at step 0
}

// WithNewData goes on with the data of the trainer's loader, also where it is not that of the run
// that wrote the checkpoint. Without it such data is refused with data.ErrChanged. The loader
// begins at the start of that data, and losses on the text before are forgotten. It goes with
// WithNewSettings, for a schedule of its own, say.
func WithNewData(keep Keep) ResumeOption {
	return func(r *resumption) { r.newData = &keep }
}
