package llm

import (
	"bytes"
	"io"
	"testing"

	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/stretchr/testify/require"
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
	Tokens
	end int
}

func (e endedTokens) EndOfDocument() int { return e.end }

func mustLoader(t testing.TB, tokens Tokens, c LoaderConfig) *Loader {
	t.Helper()
	l, err := NewLoader(tokens, c)
	require.NoError(t, err)
	return l
}

func zeroBatch(n int) Batch {
	return Batch{Inputs: make([]int, n), Targets: make([]int, n), Count: n}
}

// numberedText is a text of 30 files.
func numberedText(t *testing.T) *Text {
	t.Helper()
	c, err := OpenCorpus(texttest.Files(t, texttest.Numbered(30)))
	require.NoError(t, err)
	return c.Train
}

func trainBPE(t *testing.T, seed uint64, vocab int) *BPE {
	t.Helper()
	b, err := TrainBPE(bytes.NewReader(texttest.Words(seed, 3000)), vocab, nil)
	require.NoError(t, err)
	return b
}
