package llm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/internal/folderlock"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/infer"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/state"
)

// due reports whether a callback that acts every so many steps, and after the last one, should act
// on this event.
func due(e Event, every int) bool {
	return e.Kind == Complete || e.Kind == StepEnd && (e.Last || every > 0 &&
		e.Step%every == 0)
}

// refuse returns the callback of arguments that no run can use: it ends the run with an error
// before the first step.
func refuse(format string, args ...any) Callback {
	err := fmt.Errorf("llm: "+format, args...)
	return func(e Event) error {
		if e.Kind == RunStart {
			return err
		}
		return nil
	}
}

// An EvaluateOption changes what Evaluate does.
type EvaluateOption func(*evaluateConfig)

type evaluateConfig struct{ quick *data.Evaluation }

// WithQuick scores another text, such as a part of the held-out text, before the last step.
func WithQuick(text *data.Evaluation) EvaluateOption {
	return func(c *evaluateConfig) { c.quick = text }
}

// Evaluate scores the held-out text every so many steps (0 for never) and at the last step, and
// tells the callbacks. Of a run whose context ends it scores nothing more.
func Evaluate(t *Trainer, text *data.Evaluation, every int, opts ...EvaluateOption) Callback {
	c := evaluateConfig{quick: text}
	for _, opt := range opts {
		if opt == nil {
			return refuse("Evaluate: an option is nil")
		}
		opt(&c)
	}
	if t.made() != nil {
		return refuse("Evaluate: %w", errZeroTrainer)
	}
	for _, text := range []*data.Evaluation{text, c.quick} {
		if err := t.canEvaluate(text); err != nil {
			return refuse("Evaluate: %w", err)
		}
	}
	return func(e Event) error {
		if !due(e, every) {
			return nil
		}
		scored := text
		if !e.Last {
			scored = c.quick
		}
		loss, bpb, err := t.Evaluate(scored)
		if err != nil {
			return t.unlessStopped(err)
		}
		t.note(func(e *Event) { e.ValLoss, e.ValBPB = loss, bpb })
		return t.emit(EvalEnd, nil)
	}
}

// unlessStopped drops an error that only says that the run's context has ended: all callbacks have
// to see a step's end before the run is interrupted, those that change the model before the one
// that saves it.
func (t *Trainer) unlessStopped(err error) error {
	if stopped := t.stopped(); stopped != nil && errors.Is(err, stopped) {
		return nil
	}
	return err
}

// A CheckpointOption changes what Checkpoint does.
type CheckpointOption func(*checkpointer)

// InBackground writes a checkpoint while the run goes on, if there is a step to come, from a copy
// of everything in it that takes memory until the file is complete. Its Saved event has the step
// that was saved, and comes after a later one.
func InBackground() CheckpointOption { return func(c *checkpointer) { c.background = true } }

// InParts lets several ranks write a checkpoint together, a file each: see [Trainer.SaveParts]. The
// run waits for them, InBackground or not.
func InParts() CheckpointOption { return func(c *checkpointer) { c.parts = true } }

// OptimizerApart writes the optimiser's moments to a file of their own: see [Trainer.SaveApart].
func OptimizerApart() CheckpointOption {
	return func(c *checkpointer) { c.write = saveApart }
}

// Checkpoint saves everything needed to go on, to the file at path, every so many steps (0 for
// never), at the last step, and when the run is interrupted. After a callback or a step has failed
// it tries to save the last step, unless that is ErrDiverged: then the file's old contents are
// better. The file is replaced as a whole: there is always a complete one. Folders that it needs
// are made. A place where it cannot be written ends the run before its first step, and so does a
// folder that another program has claimed: it is claimed for the run, as by [ClaimFolder].
func Checkpoint(t *Trainer, path string, every int, opts ...CheckpointOption) Callback {
	if t.made() != nil {
		return refuse("Checkpoint: %w", errZeroTrainer)
	}
	c := &checkpointer{t: t, path: path, every: every, write: saveWhole}
	t.mu.Lock()
	t.steering.savers++
	t.mu.Unlock()
	for _, opt := range opts {
		if opt == nil {
			return refuse("Checkpoint: an option is nil")
		}
		opt(c)
	}
	return c.event
}

// A checkpointer writes one file at a time.
type checkpointer struct {
	t          *Trainer
	path       string
	every      int
	asked      int // saves that had been asked for when it last saved
	write      func(path string, tensors []safetensors.Tensor, metadata map[string]string) error
	background bool
	parts      bool
	release    func() error // the folder
	tried      int          // the step that was last to be saved in this run, or that it began at
	step       int          // that is being written
	written    chan error   // has its result; nil when nothing is being written
}

func (c *checkpointer) event(e Event) error {
	switch {
	case e.Kind == RunStart:
		c.tried = e.Step
		return c.begin()
	case e.Kind == RunEnd:
		return errors.Join(c.wait(), c.end())
	case e.Kind == Failed:
		return errors.Join(c.finish(), c.rescue(e))
	case !due(e, c.every) && e.Kind != Interrupted && !c.wanted(e):
		return c.poll()
	}
	c.asked = c.t.saves()
	apart := c.parts && c.t.ranks() != nil
	if c.background && !apart && e.Kind == StepEnd && !e.Last {
		return c.saveBeside(e.Step)
	}
	return c.save(e.Step)
}

// wanted reports whether somebody has asked for a save; see [Trainer.SaveSoon].
func (c *checkpointer) wanted(e Event) bool { return e.Kind == StepEnd && c.t.saves() > c.asked }

// rescue saves the last step of a run that has failed, unless it has been tried, or there is no
// sound one.
func (c *checkpointer) rescue(e Event) error {
	sound := c.t.inTurn(func() error { return nil })
	if e.Step == c.tried || errors.Is(e.Err, ErrDiverged) || sound != nil {
		return nil
	}
	return c.save(e.Step)
}

// save writes the trainer's state.
func (c *checkpointer) save(step int) error {
	c.tried = step
	write := func(path string) error { return c.t.saveBy(path, c.write) }
	if c.parts && c.t.ranks() != nil {
		write = c.t.SaveParts
	}
	if err := errors.Join(c.finish(), write(c.path)); err != nil {
		return err
	}
	return c.saved(step)
}

// begin makes the file's folders, finds out whether it can be written, and claims its folder.
func (c *checkpointer) begin() error {
	if !c.t.first() {
		return nil
	}
	there, err := os.Stat(c.path)
	if err == nil && !there.Mode().IsRegular() && !there.IsDir() {
		return fmt.Errorf("llm: Checkpoint: %s is not a regular file", c.path)
	}
	if err := atomicfile.Writable(c.path); err != nil {
		return fmt.Errorf("llm: Checkpoint: %w", err)
	}
	release, err := ClaimFolder(filepath.Dir(c.path))
	if err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return fmt.Errorf("llm: Checkpoint: %w", err)
	}
	c.release = release
	return nil
}

// end gives the folder back.
func (c *checkpointer) end() error {
	release := c.release
	c.release = nil
	if release == nil {
		return nil
	}
	return release()
}

// saveBeside starts to write the trainer's state, after what is still being written.
func (c *checkpointer) saveBeside(step int) error {
	if err := c.t.agree(c.finish()); err != nil {
		return err
	}
	c.tried = step
	tensors, metadata, err := c.t.copied()
	if err != nil {
		return err
	}
	c.step, c.written = step, make(chan error, 1)
	if !c.t.first() {
		c.written <- nil
		return nil
	}
	go func(written chan<- error) {
		written <- c.write(c.path, tensors, metadata)
	}(c.written)
	return nil
}

// wait waits for what is being written.
func (c *checkpointer) wait() error {
	if c.written == nil {
		return nil
	}
	err := <-c.written
	c.written = nil
	return err
}

// finish waits for what is being written, and tells the callbacks of it.
func (c *checkpointer) finish() error {
	if c.written == nil {
		return nil
	}
	if err := c.wait(); err != nil {
		return err
	}
	return c.saved(c.step)
}

// poll finishes what needs no more waiting.
func (c *checkpointer) poll() error {
	if len(c.written) == 0 {
		return nil
	}
	return c.finish()
}

func (c *checkpointer) saved(step int) error {
	return c.t.emit(Saved, func(e *Event) { e.Path, e.Step = c.path, step })
}

// SampleText draws n tokens after the prompt every so many steps (0 for never) and at the last
// step, tells the callbacks, and writes the text of the latest sample to the file at path, whose
// folders it makes, unless that is empty. With an empty prompt a document begins, if the tokenizer
// is a BPE, or has a method EndOfDocument() int as a BPE has. Ids outside the tokenizer's
// vocabulary are not drawn. Every sample starts from the same random seed. Arguments that cannot be
// used end the run before its first step, and so does a place where the file cannot be written.
func SampleText(t *Trainer, tok tokenizer.Tokenizer, prompt string, n int, c sampler.Config,
	path string, every int) Callback {
	switch _, err := sampler.New(c); {
	case err != nil:
		return refuse("SampleText: %w", err)
	case t.made() != nil || tok == nil:
		return refuse("SampleText: trainer and tokenizer must not be nil")
	case len(promptTokens(tok, prompt)) == 0:
		return refuse("SampleText: the prompt %q makes no token, want at least one", prompt)
	case n < 0:
		return refuse("SampleText: asked for %d tokens, want at least 0", n)
	}
	if err := t.Model.Config.Knows(slices.Values(promptTokens(tok, prompt))); err != nil {
		return refuse("SampleText: the prompt: %w", err)
	}
	if c.Vocab == 0 || c.Vocab > tok.VocabSize() {
		c.Vocab = tok.VocabSize()
	}
	return func(e Event) error {
		if e.Kind == RunStart && path != "" {
			if err := overwritable(path); err != nil {
				return fmt.Errorf("llm: SampleText: %w", err)
			}
		}
		if !due(e, every) {
			return nil
		}
		text, err := t.sample(tok, prompt, n, c)
		if err == nil && path != "" {
			if err = os.MkdirAll(filepath.Dir(path), 0o777); err == nil {
				err = os.WriteFile(path, []byte(text), 0o666)
			}
		}
		if err != nil {
			return t.unlessStopped(fmt.Errorf("llm: sample: %w", err))
		}
		return t.emit(Sampled, func(e *Event) { e.Text = text })
	}
}

// overwritable finds out whether os.WriteFile will work: what is there, such as a device, may be
// one that no file can be made beside.
func overwritable(path string) error {
	if _, err := os.Stat(path); err != nil {
		return atomicfile.Writable(path)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|syscall.O_NONBLOCK, 0) // a pipe may have no reader
	if err != nil {
		return err
	}
	return f.Close()
}

// promptTokens returns what a sample starts from: the prompt's tokens, or the one before a
// document.
func promptTokens(tok tokenizer.Tokenizer, prompt string) []int {
	if e, ok := tok.(tokenizer.DocumentEnder); ok && prompt == "" && e.EndOfDocument() >= 0 {
		return []int{e.EndOfDocument()}
	}
	return tok.Encode([]byte(prompt))
}

// sample returns the prompt and n tokens that follow it.
func (t *Trainer) sample(tok tokenizer.Tokenizer, prompt string, n int,
	c sampler.Config) (string, error) {
	s, err := sampler.New(c)
	if err != nil {
		return "", err
	}
	g := infer.Draw(t.Model.Config, t.decoder)
	var tokens []int
	for token, err := range g.Generate(t.context(), promptTokens(tok, prompt), n, s) {
		if err != nil {
			return "", err
		}
		tokens = append(tokens, token)
	}
	text, err := tok.Decode(tokens)
	return prompt + string(text), err
}

// decoder is the engine's, whose every call is a turn of its own.
func (t *Trainer) decoder() (infer.Logits, error) {
	var next infer.Logits
	err := t.inTurn(func() (err error) {
		next, err = t.engine.Decoder()
		return err
	})
	return func(ctx context.Context, tokens []int) (logits any, err error) {
		err = t.inTurn(func() (err error) {
			logits, err = next(ctx, tokens)
			return err
		})
		return logits, err
	}, err
}

// ErrFolderInUse is wrapped by the error of an output folder that another program has claimed.
var ErrFolderInUse = folderlock.ErrInUse

// ClaimFolder makes an output folder, which must exist, this program's until release is called or
// the program ends, so that no two programs write one run's files: to all others it is an
// ErrFolderInUse. Within the program any number of callers may claim it, from any goroutine, and it
// is the program's until all have released it. A run with a [Checkpoint] claims its folder by
// itself; a program that reads or writes there before the run claims it first.
//
// It works on Linux, macOS, the BSDs and Windows. Where the system or the file system cannot lock,
// it is an errors.ErrUnsupported, and a Checkpoint goes on without.
func ClaimFolder(dir string) (release func() error, err error) {
	release, err = folderlock.Claim(dir)
	if err != nil {
		return nil, fmt.Errorf("llm: ClaimFolder: %s: %w; name another folder for this one, or "+
			"wait for the other program", dir, err)
	}
	return release, nil
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

// take returns what has been gathered, and begins anew.
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
