package llm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// unlessStopped drops an error that only reports the cancellation of the run's context. Every callback
// must see the end of a step before the run is interrupted; in particular, callbacks that change the
// model must do so before the callback that saves it.
func unlessStopped(t *Trainer, err error) error {
	if stopped := t.stopped(); stopped != nil && errors.Is(err, stopped) {
		return nil
	}
	return err
}

// due reports whether a callback should act on this event if it acts after every multiple of the given
// number of steps and after the last step.
func due(e Event, every int) bool {
	return e.Kind == Complete || e.Kind == StepEnd && (e.Last || every > 0 &&
		e.Step%every == 0)
}

// refusing returns a callback for invalid arguments. It fails the run before the first step.
func refusing(format string, args ...any) Callback {
	err := fmt.Errorf("llm: "+format, args...)
	return func(e Event) error {
		if e.Kind == RunStart {
			return err
		}
		return nil
	}
}

// An EvaluateOption configures Evaluate.
type EvaluateOption func(*evaluateConfig)

type evaluateConfig struct{ quick *data.Evaluation }

// WithQuick uses a different text, such as a part of the held-out text, for all evaluations except
// the one after the last step.
func WithQuick(text *data.Evaluation) EvaluateOption {
	return func(c *evaluateConfig) { c.quick = text }
}

// Evaluate measures the loss on held-out text after every multiple of the given number of steps (0 for
// never) and after the last step, and emits EvalEnd. It stops when the run's context is done. If an earlier callback
// fails after a step, that step is not evaluated, not even when the run is started again.
func Evaluate(t *Trainer, text *data.Evaluation, every int, opts ...EvaluateOption) Callback {
	c := evaluateConfig{quick: text}
	for _, opt := range opts {
		opt(&c)
	}

	for _, text := range []*data.Evaluation{text, c.quick} {
		if err := t.canScore(text); err != nil {
			return refusing("Evaluate: %w", err)
		}
	}

	t.addEvaluation(every)

	return func(e Event) error {
		if !due(e, every) {
			return nil
		}
		scored := text
		if !e.Last {
			scored = c.quick
		}
		loss, bpb, pairs, err := t.evaluate(scored)
		if err != nil {
			return unlessStopped(t, err)
		}
		t.note(func(e *Event) { e.ValLoss, e.ValBPB, e.ValPreferences = loss, bpb, pairs })
		return t.emit(EvalEnd, nil)
	}
}

// SampleText draws n tokens that continue the prompt, after every multiple of the given number of
// steps (0 for never) and after the last step, and emits Sampled. If path is not empty, it also
// writes the latest sample to the file at path, creating missing directories.
//
// An empty prompt starts a new document, provided that the tokenizer is a [tokenizer.DocumentEnder]
// with such a token. Ids outside the tokenizer's vocabulary are not drawn. Every sample uses the
// same random seed.
//
// Invalid arguments and an unwritable path fail the run before its first step. If the logits of the model
// are not finite, the run ends with ErrDiverged.
func SampleText(t *Trainer, tok tokenizer.Tokenizer, prompt string, n int, c sampler.Config,
	path string, every int) Callback {
	switch _, err := sampler.New(c); {
	case err != nil:
		return refusing("SampleText: %w", err)
	case len(promptTokens(tok, prompt)) == 0:
		return refusing("SampleText: the prompt %q makes no token, want at least one", prompt)
	case n < 0:
		return refusing("SampleText: asked for %d tokens, want at least 0", n)
	}

	if err := t.config().Knows(slices.Values(promptTokens(tok, prompt))); err != nil {
		return refusing("SampleText: the prompt: %w", err)
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
		text, err := drawSample(t, tok, prompt, n, c)
		if errors.Is(err, sampler.ErrNotFinite) {
			err = fmt.Errorf("%w: %w", ErrDiverged, err)
		}
		if err == nil && path != "" {
			if err = os.MkdirAll(filepath.Dir(path), 0o777); err == nil {
				err = os.WriteFile(path, []byte(text), 0o666)
			}
		}
		if err != nil {
			return unlessStopped(t, fmt.Errorf("llm: sample: %w", err))
		}
		return t.emit(Sampled, func(e *Event) { e.Text = text })
	}
}

// overwritable returns an error unless os.WriteFile can write to path. It opens an existing path,
// such as a device, because its directory may not allow new files.
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

// promptTokens returns the tokens that a sample continues: the prompt's, or the end-of-document token.
func promptTokens(tok tokenizer.Tokenizer, prompt string) []int {
	if e, ok := tok.(tokenizer.DocumentEnder); ok && prompt == "" && e.EndOfDocument() >= 0 {
		return []int{e.EndOfDocument()}
	}
	return tok.Encode([]byte(prompt))
}

// drawSample returns the prompt and the n tokens that follow it.
func drawSample(t *Trainer, tok tokenizer.Tokenizer, prompt string, n int,
	c sampler.Config) (string, error) {
	s, err := sampler.New(c)
	if err != nil {
		return "", err
	}

	g := GeneratorOf(t.config(), t.decoder)
	g.drawer = t.drawer
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
