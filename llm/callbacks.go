package llm

import (
	"fmt"
	"os"
	"path/filepath"
)

// due reports whether a callback that acts every so many steps, and after the last one, should act on this event.
func due(e Event, every int) bool {
	return e.Kind == StepEnd && (e.Step == e.Steps || every > 0 && e.Step%every == 0)
}

// Evaluate scores the held-out text every so many steps (0 for never) and at the last step, and tells the callbacks.
func Evaluate(t *Trainer, text *Evaluation, every int) Callback {
	return func(e Event) error {
		if !due(e, every) {
			return nil
		}
		loss, bpb, err := t.Evaluate(text)
		if err != nil {
			return err
		}
		t.last.ValLoss, t.last.ValBPB = loss, bpb
		return t.emit(EvalEnd, nil)
	}
}

// Checkpoint saves everything needed to go on, to the file at path, every so many steps (0 for never), at the last step, and
// when the run is interrupted between steps. The file is replaced as a whole: there is always a complete one.
func Checkpoint(t *Trainer, path string, every int) Callback {
	return func(e Event) error {
		if !due(e, every) && e.Kind != Interrupted {
			return nil
		}
		if err := t.Save(path); err != nil {
			return err
		}
		return t.emit(Saved, func(e *Event) { e.Path = path })
	}
}

// SampleText draws n tokens after the prompt every so many steps (0 for never) and at the last step, tells the callbacks,
// and writes the text of the latest sample to the file at path, unless that is empty. Every sample starts from the same
// random seed.
func SampleText(t *Trainer, tok Tokenizer, prompt string, n int, c SamplerConfig, path string, every int) Callback {
	return func(e Event) error {
		if !due(e, every) {
			return nil
		}
		text, err := t.sample(tok, prompt, n, c)
		if err != nil {
			return fmt.Errorf("llm: sample: %w", err)
		}
		if path != "" {
			if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
				return fmt.Errorf("llm: sample: %w", err)
			}
			if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
				return fmt.Errorf("llm: sample: %w", err)
			}
		}
		return t.emit(Sampled, func(e *Event) { e.Text = text })
	}
}

// sample returns the prompt and n tokens that follow it.
func (t *Trainer) sample(tok Tokenizer, prompt string, n int, c SamplerConfig) (string, error) {
	s, err := NewSampler(c)
	if err != nil {
		return "", err
	}
	if t.generator == nil {
		if t.generator, err = NewGenerator(t.Model); err != nil {
			return "", err
		}
	}
	tokens, err := t.generator.Generate(tok.Encode([]byte(prompt)), n, s)
	if err != nil {
		return "", err
	}
	text, err := tok.Decode(tokens)
	return prompt + string(text), err
}
