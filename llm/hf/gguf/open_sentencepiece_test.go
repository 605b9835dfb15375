package gguf

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSentencePiece compares the tokens of texts with those of llama.cpp and of Hugging Face's tokenizers, which agree.
// It compares the decoded texts with those of Hugging Face's tokenizers. sentencepiece.py generated the file and the texts.
func TestSentencePiece(t *testing.T) {
	f, err := Open("testdata/sentencepiece.gguf")
	require.NoError(t, err)
	defer f.Close()
	tok, err := f.Tokenizer()
	require.NoError(t, err)
	file, err := os.ReadFile("testdata/sentencepiece.json")
	require.NoError(t, err)
	var texts []struct {
		Text, Decoded     string
		Ordinary, Special []int
	}
	require.NoError(t, json.Unmarshal(file, &texts))

	for _, x := range texts {
		ids := tok.Encode([]byte(x.Text))
		require.Equal(t, x.Special, append([]int{}, ids...), x.Text)
		if !strings.Contains(x.Text, "<|user|>") { // which llama.cpp also finds in ordinary text
			require.Equal(t, x.Ordinary, append([]int{}, tok.EncodeOrdinary([]byte(x.Text))...), x.Text)
		}
		text, err := tok.Decode(ids)
		require.NoError(t, err)
		require.Equal(t, x.Decoded, string(text))
		require.Equal(t, append([]int{1}, ids...), tok.EncodeWhole([]byte(x.Text)))
	}
	require.Equal(t, []int{2}, f.Generation.End)
	_, err = f.Load(t.Context())
	require.NoError(t, err)
}

// TestSentencePieceRefused checks that errors describe what is wrong with scores and tokens.
func TestSentencePieceRefused(t *testing.T) {
	whole, err := os.ReadFile("testdata/sentencepiece.gguf")
	require.NoError(t, err)
	path := t.TempDir() + "/m.gguf"
	refused := func(want, old, new string) {
		t.Helper()
		require.Len(t, new, len(old))
		require.Contains(t, string(whole), old)
		require.NoError(t, os.WriteFile(path, []byte(strings.Replace(string(whole), old, new, 1)), 0o666))
		_, err := Open(path)
		require.ErrorContains(t, err, want)
	}
	refused("tokenizer.ggml.scores is missing", "tokenizer.ggml.scores", "tokenizer.ggml.scorez")
	refused("is not UTF-8", "▁Software", "▁S\xff\xff\xffware")
	refused("are both", "▁Software", "▁SOFTWARE")
}
