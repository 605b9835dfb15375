package hf

import (
	"bytes"
	"context"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestTrain checks that a trained tokenizer can be loaded, compresses the text, and decodes it again.
func TestTrain(t *testing.T) {
	text, err := os.ReadFile("tokenizer.go")
	require.NoError(t, err)
	for pattern := range patterns {
		file, config, err := Train(t.Context(), bytes.NewReader(text), 600, pattern, nil)
		require.NoError(t, err, pattern)
		again, _, err := Train(t.Context(), bytes.NewReader(text), 600, pattern, nil)
		require.NoError(t, err)
		require.Equal(t, file, again)
		tok, err := Parse(file, config)
		require.NoError(t, err, pattern)
		require.LessOrEqual(t, tok.VocabSize(), 600)
		require.Greater(t, tok.VocabSize(), 500)
		require.Equal(t, tok.VocabSize()-1, tok.EndOfDocument())
		for _, text := range [][]byte{text, []byte("naïve\r\n\t x\xff\x00 日本語 1234567"), {}} {
			ids := tok.Encode(text)
			back, err := tok.Decode(ids)
			require.NoError(t, err)
			require.Equal(t, string(text), string(back))
		}
		require.Less(t, len(tok.Encode(text)), len(text)*2/3, pattern)
	}
}

// TestTrainRefuses checks that invalid arguments are errors.
func TestTrainRefuses(t *testing.T) {
	_, _, err := Train(t.Context(), bytes.NewReader(nil), 600, "word", nil)
	require.ErrorContains(t, err, "want one of gpt2, gpt4o, llama3, qwen2, tekken")
	_, _, err = Train(t.Context(), bytes.NewReader(nil), 10, "gpt2", nil)
	require.ErrorContains(t, err, "the vocabulary is 10")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, err = Train(ctx, bytes.NewReader([]byte("aaaa")), 300, "gpt2", nil)
	require.ErrorIs(t, err, context.Canceled)
}
