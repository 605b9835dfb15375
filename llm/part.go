package llm

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// A Part is a component of a training run with its own state, such as an [EMA] of the weights.
// [Trainer.Use] adds parts to a trainer.
//
// A checkpoint contains the state of every part, which Resume hands back to it. A part participates
// in the run through the hooks it implements: [RunStarter], [StepPreparer], [StepFinisher], [RateScaler],
// [RunEnder], and [EventReceiver].
type Part interface {
	// Name identifies the part's state in a checkpoint. It consists of lower-case letters, digits and
	// hyphens, and must be unique within a trainer. The trainer's own parts are named run, loader,
	// model, optimizer and growth.
	Name() string
	// Save adds the part's state to a checkpoint. It is called between two steps, and the data is
	// copied or written before the next step.
	Save(*CheckpointWriter) error
	// Load reads the state that Save wrote and returns a function that installs it. Load itself
	// changes nothing, because the trainer calls install only once all parts have accepted the
	// checkpoint.
	Load(*CheckpointReader) (install func(), err error)
}

// A RunStarter is a [Part] with a hook at the start of every run, before RunStart.
type RunStarter interface {
	Part
	StartRun(Turn) error
}

// A StepPreparer is a [Part] with a hook before every step. If it returns an error, the step is
// skipped.
type StepPreparer interface {
	Part
	PrepareStep(Turn) error
}

// A StepFinisher is a [Part] with a hook after the update of every step, before the callbacks receive its
// events.
type StepFinisher interface {
	Part
	FinishStep(Turn) error
}

// A RateScaler is a [Part] that scales the learning rate. RateFactor returns its factor for the next step.
type RateScaler interface {
	Part
	RateFactor() float64
}

// A RunEnder is a [Part] that can end a run before its last planned step. Ended is called after every step.
type RunEnder interface {
	Part
	Ended() bool
}

// An EventReceiver is a [Part] that receives the events of a run as a [Callback] does.
type EventReceiver interface {
	Part
	Receive(Event) error
}

// A Turn gives a hook access to the trainer while no other goroutine can change the model. It must not
// be used after the hook has returned, and the hook must not call methods of the trainer that wait
// for the current step, such as Save.
type Turn struct {
	t   *Trainer
	ctx context.Context
}

// Context returns the context of the run. Hooks that take long should end when it is done.
func (u Turn) Context() context.Context { return u.ctx }

// Model returns the model. Its parameters may be out of date on the host; see Params.
func (u Turn) Model() *Model { return u.t.Model }

// Last returns the latest state of the run as an event.
func (u Turn) Last() Event { return u.t.Last() }

// Params returns the model's parameters with their values after the last step. On a GPU, this copies
// them to the host.
func (u Turn) Params() ([]Param, error) {
	if err := pull(u.t.Model); err != nil {
		return nil, err
	}
	return u.t.Model.Params, nil
}

var partName = regexp.MustCompile(`^[a-z0-9]+(-[a-z0-9]+)*$`)

// Use adds parts to the trainer. Their hooks are called in the order of the arguments, after the
// hooks of earlier parts. A part that receives events does so at its position among the callbacks, so
// parts should be added before callbacks that save.
//
// Before Resume, add the same parts as in the run that wrote the checkpoint.
func (t *Trainer) Use(parts ...Part) error {
	defer take(t.Model)()

	used := t.allParts()
	for _, p := range parts {
		name := p.Name()
		if !partName.MatchString(name) {
			return fmt.Errorf("llm: Use: the name of a part is %q, want lower-case letters, digits and "+
				"single hyphens", name)
		}
		if slices.ContainsFunc(used, func(other Part) bool { return other.Name() == name }) {
			return fmt.Errorf("llm: Use: the trainer has a part named %q already", name)
		}
		used = append(used, p)
	}

	t.parts = used[len(t.ownParts()):] // without the trainer's own growth
	for _, p := range parts {
		if r, ok := p.(EventReceiver); ok {
			t.On(r.Receive)
		}
	}

	return nil
}

// eachPart calls a hook of every part that implements it, and stops at the first error.
func eachPart[Hook Part](t *Trainer, call func(Hook) error) error {
	for _, p := range t.parts {
		if h, ok := p.(Hook); ok {
			if err := call(h); err != nil {
				return fmt.Errorf("part %s: %w", p.Name(), err)
			}
		}
	}
	return nil
}

func (t *Trainer) startParts(ctx context.Context) error {
	return eachPart(t, func(p RunStarter) error { return p.StartRun(Turn{t, ctx}) })
}

// prepareParts calls PrepareStep of the parts.
func (t *Trainer) prepareParts() error {
	return eachPart(t, func(p StepPreparer) error { return p.PrepareStep(Turn{t, t.context()}) })
}

// rateFactor returns the product of the factors of the parts on the learning rate.
func (t *Trainer) rateFactor() float64 {
	factor := 1.0
	for _, p := range t.parts {
		if s, ok := p.(RateScaler); ok {
			factor *= s.RateFactor()
		}
	}
	return factor
}

// ended reports whether a part ends the run.
func (t *Trainer) ended() bool {
	return slices.ContainsFunc(t.parts, func(p Part) bool {
		e, ok := p.(RunEnder)
		return ok && e.Ended()
	})
}

func (t *Trainer) finishParts() error {
	return eachPart(t, func(p StepFinisher) error { return p.FinishStep(Turn{t, t.context()}) })
}

// ownParts returns the parts of the trainer itself. The parts that can refuse a checkpoint without reading
// tensors come first.
func (t *Trainer) ownParts() []Part {
	return []Part{progressPart{t}, loaderPart{t}, modelPart{t}, optimizerPart{t}, &t.growth}
}

// allParts returns the trainer's own parts, followed by those added with Use. A checkpoint consists of their
// states.
func (t *Trainer) allParts() []Part { return append(t.ownParts(), t.parts...) }

// saveParts has every part save itself, and returns the contents of a checkpoint.
func (t *Trainer) saveParts(run *savedRun) (tensors []safetensors.Tensor, metadata map[string]string,
	err error) {
	for i, p := range t.allParts() {
		w := &CheckpointWriter{prefix: modelfile.PartPrefix + p.Name() + ".", values: map[string]any{},
			run: run}
		own := i < len(t.ownParts())
		if err := p.Save(w); err != nil && own {
			return nil, nil, err
		} else if err != nil {
			return nil, nil, fmt.Errorf("llm: saving part %s: %w", p.Name(), err)
		}

		tensors = append(tensors, w.tensors...)
		if len(w.values) == 0 && own {
			continue // its tensors and the state of the run contain everything
		}

		text, err := json.Marshal(w.values)
		if err != nil {
			return nil, nil, fmt.Errorf("llm: saving part %s: %w", p.Name(), err)
		}
		if len(text) > modelfile.MaxPart {
			return nil, nil, fmt.Errorf("llm: saving part %s: its values take %d bytes as JSON, want at "+
				"most %d: save long data as tensors", p.Name(), len(text), modelfile.MaxPart)
		}
		run.metadata[modelfile.PartKey+p.Name()] = string(text)
	}

	text, err := json.Marshal(run.training)
	if err != nil {
		return nil, nil, fmt.Errorf("llm: saving the run: %w", err)
	}
	run.metadata[modelfile.TrainingKey] = string(text)

	return tensors, run.metadata, nil
}

// loadParts has every part load itself from a checkpoint. It returns a function that installs the loaded
// states, and the differences between the trainer's parts and those of the run.
func (t *Trainer) loadParts(ctx context.Context, f *modelfile.File, run *resumedRun) (install func(),
	differences []string, err error) {
	if err := t.checkBase(f); err != nil {
		return nil, nil, err
	}
	if err := f.Fits(t.fileShape(f, run.model.layout)); err != nil {
		return nil, nil, err
	}

	var installs []func()
	known := map[string]bool{}
	for i, p := range t.allParts() {
		name, own := p.Name(), i < len(t.ownParts())
		known[name] = true
		_, saved := f.Metadata[modelfile.PartKey+name]
		if !saved && !own {
			differences = append(differences, fmt.Sprintf("part %s is new, and its state is not in the "+
				"checkpoint", name))
			continue
		}

		r := &CheckpointReader{ctx: ctx, file: f, part: name, run: run}
		if saved {
			if err := f.Decode(modelfile.PartKey+name, "the state of part "+name, modelfile.MaxPart,
				&r.values); err != nil {
				return nil, nil, err
			}
		}

		install, err := p.Load(r)
		if err != nil && own {
			return nil, nil, err
		} else if err != nil {
			return nil, nil, f.Errorf("part %s: %w", name, err)
		}
		if install != nil {
			installs = append(installs, install)
		}
		differences = append(differences, r.differences...)
	}

	for _, key := range slices.Sorted(maps.Keys(f.Metadata)) {
		if name, ok := strings.CutPrefix(key, modelfile.PartKey); ok && !known[name] {
			differences = append(differences, fmt.Sprintf("the run has a part %.100q, which the trainer "+
				"lacks: add it with Trainer.Use", name))
		}
	}

	return func() {
		for _, install := range installs {
			install()
		}
	}, differences, nil
}

// A CheckpointWriter collects the state of one [Part].
type CheckpointWriter struct {
	prefix  string
	tensors []safetensors.Tensor
	values  map[string]any
	run     *savedRun
}

// Value adds a value that encoding/json can encode. All values of a part together may take 512 KiB.
func (w *CheckpointWriter) Value(name string, v any) { w.values[name] = v }

// Tensor adds numbers, given as a []float32, []float64, []int64 or []uint8 whose length matches the
// shape.
func (w *CheckpointWriter) Tensor(name string, shape []int, data any) error {
	x, err := safetensors.New(w.prefix+name, shape, data)
	if err == nil {
		w.tensors = append(w.tensors, x)
	}
	return err
}

// A CheckpointReader returns the state saved by a [Part].
type CheckpointReader struct {
	ctx         context.Context
	file        *modelfile.File
	part        string
	values      map[string]json.RawMessage
	differences []string
	run         *resumedRun
}

// Value decodes a value into a variable, as encoding/json does. If the checkpoint contains no such
// value, it returns an error.
func (r *CheckpointReader) Value(name string, into any) error {
	text, ok := r.values[name]
	if !ok {
		return fmt.Errorf("the checkpoint has no value %q", name)
	}
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("value %q: %w", name, err)
	}
	return nil
}

// Tensor returns the shape and a copy of the data of a tensor.
func (r *CheckpointReader) Tensor(name string) (shape []int, data any, err error) {
	x, err := r.file.Tensor(r.ctx, modelfile.PartPrefix+r.part+"."+name)
	return x.Shape, x.Data, err
}

// Tensors returns the names of the part's tensors, in the order of the calls that added them.
func (r *CheckpointReader) Tensors() (names []string) {
	prefix := modelfile.PartPrefix + r.part + "."
	for name := range r.file.With(prefix) {
		names = append(names, strings.TrimPrefix(name, prefix))
	}
	return names
}

// Config returns the configuration of the model in the checkpoint, which may have grown.
func (r *CheckpointReader) Config() Config { return r.run.model.Config }

// Differs reports that the part is configured differently from the saved one. Resume then rejects the
// checkpoint with [ErrSettings], unless the differences are accepted with [WithNewSettings].
func (r *CheckpointReader) Differs(format string, args ...any) {
	r.differences = append(r.differences, fmt.Sprintf("part %s: ", r.part)+fmt.Sprintf(format, args...))
}

// A savedRun collects the state that the trainer's own parts write to common places of a checkpoint.
type savedRun struct {
	training training
	metadata map[string]string

	// moments returns the optimizer state that the checkpoint's main file contains.
	moments func() ([]optim.Tensor, error)
}

// A resumedRun holds the state that several parts need while a checkpoint is read.
type resumedRun struct {
	*training
	options *resumption
	model   modelState  // the layout from the start; parameters and moments are set by their parts
	growing growthState // set by growth

	// lattices returns the state of the lattices once Resume has installed the checkpoint.
	lattices func() []state.Array
}
