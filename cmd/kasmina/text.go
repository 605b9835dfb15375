package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// textOptions select the text for training and evaluation.
type textOptions struct {
	maxBytes, heldOut int64
	cache             string
	documents         bool
}

func (o *textOptions) flags(c *cobra.Command, path *string) {
	f := c.Flags()
	f.StringVarP(path, "data", "d", "", "text `file`, or a folder of them")
	f.Int64Var(&o.maxBytes, "max-bytes", 0, "use about this many bytes of the text; 0 uses all")
	f.Int64Var(&o.heldOut, "held-out", 256<<10, "bytes of held-out text to evaluate on")
	f.StringVar(&o.cache, "cache", "", "`directory` for the encoded text of a new model, for later "+
		"runs (default: in the user's cache directory)")
	f.BoolVar(&o.documents, "documents", false, "do not let the attention of a new model cross the boundaries between files")
}

// cacheFolder returns the default of --cache.
func cacheFolder() string {
	dir, err := os.UserCacheDir()
	if err != nil {
		dir = os.TempDir()
	}
	return filepath.Join(dir, "kasmina")
}

func (o *textOptions) check() error {
	if o.maxBytes < 0 {
		return fmt.Errorf("--max-bytes is %d, want at least 0", o.maxBytes)
	}
	if o.heldOut < 2 {
		return fmt.Errorf("--held-out is %d, want at least 2", o.heldOut)
	}
	return nil
}

func (o *textOptions) open(path string) (*data.Corpus, error) {
	if o.maxBytes == 0 {
		return data.Open(path)
	}
	return data.Open(path, data.WithMaxBytes(o.maxBytes))
}

// closableTokens holds the tokens of a run, in memory or in a file.
type closableTokens struct{ data.Tokens }

// Close closes the file, if there is one.
func (t closableTokens) Close() error {
	if file, ok := t.Tokens.(io.Closer); ok {
		return file.Close()
	}
	return nil
}

// EndOfDocument returns the token that ends a document, or a negative number if the tokens have none.
func (t closableTokens) EndOfDocument() int {
	if ender, ok := t.Tokens.(tokenizer.DocumentEnder); ok {
		return ender.EndOfDocument()
	}
	return -1
}

// tokens encodes the training text. Since the text of a new model may be large and must mark the end of
// each document, its tokens are stored in a file.
func (o *textOptions) tokens(c *cobra.Command, m machines, text *data.Text,
	tok tokenizer.Tokenizer) (t closableTokens, err error) {
	if o.cache == "" {
		t.Tokens, err = data.Tokenize(c.Context(), text, tok)
		return t, err
	}

	fingerprint, err := text.Fingerprint(c.Context(), nil)
	if err != nil {
		return t, err
	}

	path := filepath.Join(o.cache, fmt.Sprintf("%.16s-%s.tokens", fingerprint, tok.Name()))
	err = m.team.InTurn(func() error {
		defer m.team.Busy("encoding the text")()
		at, erase := bar(c.ErrOrStderr(), "encoding", true)
		defer erase()
		file, err := data.CacheTokens(c.Context(), path, text, tok, func(done, of int64) error {
			at(done, of)
			return nil
		})
		t.Tokens = file
		return err
	})
	if err != nil {
		return t, fmt.Errorf("--cache: %w", err)
	}

	return t, nil
}

// evaluation returns the text for evaluations.
func (o *textOptions) evaluation(text *data.Text, tok tokenizer.Tokenizer, batch,
	seq int) (*data.Evaluation, error) {
	if o.documents {
		held, err := text.SampleDocuments(int(o.heldOut))
		if err != nil {
			return nil, err
		}
		return data.NewDocumentEvaluation(held, tok, batch, seq)
	}

	held, err := text.Sample(int(o.heldOut))
	if err != nil {
		return nil, err
	}

	return data.NewEvaluation(held, tok, batch, seq)
}
