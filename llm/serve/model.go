package serve

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"path/filepath"

	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
	tokenizers "github.com/kasmina-go/kasmina/llm/tokenizer/hf"
)

// A Generator continues texts, as llm.Generator does. Generate yields n tokens that follow the prompt,
// each right after s has drawn it, until iteration ends or ctx is canceled. As many goroutines call it
// at the same time as the server has slots.
type Generator interface {
	Generate(ctx context.Context, prompt []int, n int, s *sampler.Sampler) iter.Seq2[int, error]
}

// A Model is a language model that a server offers.
type Model struct {
	Name      string
	Generator Generator
	Tokenizer *tokenizers.Tokenizer
	// Template renders conversations. If it is nil, the model only continues texts, and NoTemplate is
	// the reason.
	Template   *chat.Template
	NoTemplate error

	Context int   // number of tokens of a prompt and its continuation together
	Vocab   int   // number of tokens that the model knows; ids of Vocab and above are never drawn
	End     []int // tokens that end a text

	// Sampling has the settings for requests that do not choose their own.
	Sampling sampler.Config
}

// NewModel describes the model of a folder. It reads the folder's tokenizer and its chat template. g
// generates the answers and supports contexts of up to context tokens. The model has the name of the
// folder, or of a GGUF file. If the folder's generation settings enable sampling, they become the
// model's Sampling. Otherwise, the model draws from all tokens at temperature 1.
//
// A missing or unusable chat template is not an error. The model's NoTemplate then holds the
// reason.
func NewModel(f *hf.Folder, g Generator, context int) (*Model, error) {
	m, err := describeModel(f, f.Name(), g, context)
	if err != nil {
		return nil, fmt.Errorf("serve: NewModel: %w", err)
	}
	return m, nil
}

// NewAdaptedModel describes the model of a folder with adapters, and names it after the folder of the
// adapters. If that folder has a tokenizer, the model uses it, and the chat template next to it.
func NewAdaptedModel(f *hf.Folder, adapters string, g Generator, context int) (*Model, error) {
	dir, err := filepath.Abs(adapters)
	if err != nil {
		return nil, fmt.Errorf("serve: NewAdaptedModel: %w", err)
	}
	m, err := describeModel(f.WithTexts(adapters), filepath.Base(dir), g, context)
	if err != nil {
		return nil, fmt.Errorf("serve: NewAdaptedModel: %w", err)
	}
	return m, nil
}

// describeModel describes the model of f under a name.
func describeModel(f *hf.Folder, name string, g Generator, context int) (*Model, error) {
	tok, err := f.Tokenizer()
	if err != nil {
		return nil, err
	}

	m := &Model{Name: name, Generator: g, Tokenizer: tok, Context: context,
		Vocab: min(f.Config.Vocab, tok.VocabSize()), End: f.Generation.End}
	m.Template, m.NoTemplate = f.Template()
	if errors.Is(m.NoTemplate, chat.ErrNoTemplate) {
		m.NoTemplate = chat.ErrNoTemplate // without the path, because messages name the model
	}

	// As in OpenAI's API, a model draws from all tokens unless its publisher recommends otherwise.
	m.Sampling.Temperature = 1
	if g := f.Generation; g.Sample {
		m.Sampling = sampler.Config{Temperature: g.Temperature, TopK: g.TopK,
			TopP: sampler.Nucleus(g.TopP), MinP: g.MinP, Repetition: g.Repetition}
	}

	return m, nil
}

// check returns an error for a model that cannot be served.
func (m *Model) check() error {
	switch {
	case m == nil:
		return errors.New("a model is nil")
	case m.Name == "":
		return errors.New("a model has no name")
	case m.Generator == nil || m.Tokenizer == nil:
		return fmt.Errorf("the model %q has no generator or no tokenizer", m.Name)
	case m.Context < 2 || m.Vocab < 1:
		return fmt.Errorf("the model %q has a context of %d tokens and a vocabulary of %d", m.Name,
			m.Context, m.Vocab)
	}
	_, err := sampler.New(m.Sampling)
	return err
}

// checkPrompt returns an error for a prompt that the model cannot continue.
func (m *Model) checkPrompt(ids []int, param string) error {
	if err := m.checkTokens(ids, param); err != nil {
		return err
	}
	if len(ids) >= m.Context {
		return &apiError{status: 400, param: param, code: "context_length_exceeded",
			message: fmt.Sprintf("the prompt has %d tokens, and the model's context has %d for the prompt "+
				"and the answer together: shorten the prompt", len(ids), m.Context)}
	}
	return nil
}

// checkTokens returns an error for a text without tokens, or with tokens that the model does not have.
func (m *Model) checkTokens(ids []int, param string) error {
	if len(ids) == 0 {
		return invalid(param, "the text is empty, and the tokenizer has no token that begins a text")
	}
	for _, id := range ids {
		if id < 0 || id >= m.Vocab {
			return invalid(param, "the text has the token %d, and the model has %d tokens", id, m.Vocab)
		}
	}
	return nil
}

// encode returns the tokens of a text, after the tokens that begin a text.
func (m *Model) encode(text string) []int {
	before, _ := m.Tokenizer.Affixes()
	return append(before, m.Tokenizer.Encode([]byte(text))...)
}
