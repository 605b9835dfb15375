package llm

import (
	"bytes"
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// idTokens are tokens in memory.
type idTokens struct {
	ids         []int
	tokenizer   string
	vocab       int
	fingerprint string
}

func (m *idTokens) Tokenizer() string   { return m.tokenizer }
func (m *idTokens) VocabSize() int      { return m.vocab }
func (m *idTokens) Len() int64          { return int64(len(m.ids)) }
func (m *idTokens) Fingerprint() string { return m.fingerprint }

func (m *idTokens) ReadTokens(dst []int, offset int64) error {
	if copy(dst, m.ids[min(int(offset), len(m.ids)):]) < len(dst) {
		return io.ErrUnexpectedEOF
	}
	return nil
}

// endedTokens are tokens of which one ends each document.
type endedTokens struct {
	data.Tokens
	end int
}

func (e endedTokens) EndOfDocument() int { return e.end }

func mustLoader(t testing.TB, tokens data.Tokens, c data.LoaderConfig) *data.Loader {
	t.Helper()
	l, err := data.NewLoader(tokens, c)
	require.NoError(t, err)
	return l
}

func zeroBatch(n int) data.Batch {
	return data.Batch{Inputs: make([]int, n), Targets: make([]int, n), Count: n}
}

// numberedText is a text of 30 files.
func numberedText(t *testing.T) *data.Text {
	t.Helper()
	c, err := data.Open(texttest.Files(t, texttest.Numbered(30)))
	require.NoError(t, err)
	return c.Train
}

func trainBPE(t *testing.T, seed uint64, vocab int) *tokenizer.BPE {
	t.Helper()
	b, err := tokenizer.TrainBPE(t.Context(), bytes.NewReader(texttest.Words(seed, 3000)), vocab, nil)
	require.NoError(t, err)
	return b
}
