package llm

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/kasmina-go/kasmina/internal/jsonfloat"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/llm/internal/settings"
	"github.com/kasmina-go/kasmina/optim"
)

// This file contains the parts of every run, which save and load its progress and settings, the loader, the model, and
// the optimizer. Growth is a part of the trainer, too. The states of these parts have fixed places in a checkpoint, so
// that LoadModel and other programs find the model.

// progressPart saves and loads the progress of a run, and compares its settings.
type progressPart struct{ t *Trainer }

// Name implements [Part].
func (progressPart) Name() string { return "run" }

// Save implements [Part].
func (p progressPart) Save(w *CheckpointWriter) error {
	t, e := p.t, p.t.Last()

	notes, err := json.Marshal(t.Config.Notes)
	if err != nil {
		return fmt.Errorf("llm: saving the run: %w", err)
	}
	w.run.metadata[modelfile.NotesKey] = string(notes)

	w.run.training = training{Step: e.Step, Spent: t.spent, Share: t.share,
		Losses: jsonfloat.Float(t.losses), Summed: t.summed, Settings: *t.settings(),
		Loss: jsonfloat.Float(e.Loss), LearningRate: e.LearningRate, GradNorm: jsonfloat.Float(e.GradNorm),
		ValLoss: jsonfloat.Float(e.ValLoss), ValBPB: jsonfloat.Float(e.ValBPB),
		Preferences: e.Preferences, ValPreferences: e.ValPreferences}
	return nil
}

// Load implements [Part].
func (p progressPart) Load(r *CheckpointReader) (install func(), err error) {
	t, run := p.t, r.run
	if run.Step < 0 || run.Step > t.Config.Steps {
		return nil, r.file.Errorf("the run is at step %d, want 0 to TrainConfig.Steps, which is %d; plan "+
			"more steps to continue from there", run.Step, t.Config.Steps)
	}

	const most = 1 << 62 // far beyond any run, and safe from overflow
	if run.Spent.Time < 0 || run.Spent.Time > most || run.Spent.Tokens < 0 ||
		run.Spent.Tokens > most || !(run.Spent.FLOPs >= 0) || !(run.Share >= 0 && run.Share <= 1) ||
		run.Summed < 0 || run.Summed > run.Step || run.Losses-run.Losses != 0 {
		return nil, r.file.Errorf("the run has spent %+v, a share of %v, and the losses of its epoch's %d "+
			"steps add up to %v", run.Spent, run.Share, run.Summed, run.Losses)
	}

	if t.Config.Budget != (Budget{}) && t.Config.Budget.String() != run.Settings.Budget {
		run.Share = t.Config.Budget.ShareOf(run.Spent)
	}

	// Rules may depend on shapes, and the model in the checkpoint may have grown.
	own := t.settings()
	own.Rules = t.rules(r.run.model.layout)
	r.differences = own.Differences(run.Settings, t.Config.Schedule)
	return func() {
		t.progress = progress{spent: run.Spent, share: run.Share, losses: float64(run.Losses),
			summed: run.Summed}
		t.note(func(e *Event) {
			e.Step, e.Loss = run.Step, float64(run.Loss)
			e.LearningRate, e.GradNorm = run.LearningRate, float64(run.GradNorm)
			e.ValLoss, e.ValBPB = float64(run.ValLoss), float64(run.ValBPB)
			e.Preferences, e.ValPreferences = run.Preferences, run.ValPreferences
		})
	}, nil
}

// loaderPart saves and loads the position of the loader in its text.
type loaderPart struct{ t *Trainer }

// Name implements [Part].
func (loaderPart) Name() string { return "loader" }

// Save implements [Part].
func (p loaderPart) Save(w *CheckpointWriter) error {
	w.run.training.Loader = p.t.Loader.State()
	return nil
}

// Load implements [Part]. Trainer.setStates passes the position to the loader later, because the loader may reject it.
func (p loaderPart) Load(r *CheckpointReader) (install func(), err error) {
	run := r.run.training
	if err := p.knowsText(run); err != nil {
		return nil, r.file.Errorf("%w", err)
	}

	// A different order starts with the next pass over the data.
	if seed := p.t.Loader.Config().Seed; run.Settings.Seed != seed {
		run.Loader.Seed, run.Loader.Epoch, run.Loader.Next = seed, run.Loader.Epoch+1, 0
	}

	return nil, nil
}

// knowsText returns an error if a run was trained on other text than the loader's, or with another
// tokenizer.
func (p loaderPart) knowsText(run *training) error {
	if here, there := p.t.Loader.Tokenizer(), run.Settings.Tokenizer; there != "" && there != here {
		return fmt.Errorf("%w: the run used tokenizer %q, and the trainer's data is encoded "+
			"by %q: encode the text with the tokenizer of the run", ErrSettings, there, here)
	}

	switch here := p.t.Loader.State().Data; {
	case run.Loader.Data == here:
		return nil
	default:
		return fmt.Errorf("%w: the run was trained on other text than the trainer's loader has "+
			"(fingerprint %.12q, not %.12q): use the same text, or continue with this one with "+
			"the option WithNewData", data.ErrChanged, run.Loader.Data, here)
	}
}

// modelPart saves and loads the parameters and lattices of the model.
type modelPart struct{ t *Trainer }

// Name implements [Part].
func (modelPart) Name() string { return "model" }

// Save implements [Part].
func (p modelPart) Save(w *CheckpointWriter) error {
	tensors, metadata, err := tensorsOf(p.t.Model)
	if err != nil {
		return err
	}

	// If the model's loss is not finite, the file's previous contents are better.
	if err := p.t.driver.probe(); err != nil {
		return fmt.Errorf("llm: saving the run: %w", err)
	}

	if p.t.omitsBase() {
		tensors = slices.DeleteFunc(tensors, func(x safetensors.Tensor) bool {
			return p.t.Model.Param(x.Name) != nil && !p.t.Config.Learns(x.Name)
		})
		metadata[modelfile.BaseKey] = p.t.baseDigest()
	}

	w.tensors = tensors
	maps.Copy(w.run.metadata, metadata)
	return nil
}

// Load implements [Part].
func (p modelPart) Load(r *CheckpointReader) (install func(), err error) {
	options, err := kasminaOptionsIn(r.file)
	if err != nil {
		return nil, err
	}
	for _, d := range settings.Fields(p.t.Model.KasminaOptions, options) {
		r.differences = append(r.differences, "Model.KasminaOptions."+d)
	}

	r.run.model.Params, install, err = contentsIn(r.ctx, p.t.Model, r.file, r.run.model.layout,
		p.t.omitted(r.file))
	return install, err
}

// optimizerPart saves and loads the state of the optimizer, and the engine's loss scale.
type optimizerPart struct{ t *Trainer }

// Name implements [Part].
func (optimizerPart) Name() string { return "optimizer" }

// Save implements [Part].
func (p optimizerPart) Save(w *CheckpointWriter) error {
	moments, err := w.run.moments()
	if err != nil {
		return err
	}
	for _, m := range moments {
		x, err := safetensors.New(modelfile.OptimizerPrefix+m.Name, m.Shape, m.Data)
		if err != nil {
			return fmt.Errorf("llm: saving the optimizer: %w", err)
		}
		w.tensors = append(w.tensors, x)
	}

	w.run.training.LossScale = p.t.driver.lossScale()
	return nil
}

// Load implements [Part]. Trainer.setStates passes the state to the optimizer later, because the optimizer may reject it.
func (p optimizerPart) Load(r *CheckpointReader) (install func(), err error) {
	if data := r.run.options.newData; data != nil && !data.Optimizer {
		return nil, nil // the optimizer starts from scratch
	}

	all, err := momentsIn(r.ctx, r.file, modelfile.OptimizerPrefix)
	if err != nil {
		return nil, err
	}

	// Moments may be in separate files.
	apart, err := r.file.Moments(r.ctx, p.t.fileShape(r.file, r.run.model.layout))
	if err != nil {
		return nil, err
	}
	for _, m := range apart {
		all = append(all, optim.Tensor{Name: m.Name, Shape: m.Shape, Data: m.Data})
	}

	r.run.model.Moments = all
	return nil, nil
}
