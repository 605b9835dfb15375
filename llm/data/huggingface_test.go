package data_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer/hf"
)

// TestHuggingFaceTokenizers uses Hugging Face tokenizers with and without a token that ends documents.
func TestHuggingFaceTokenizers(t *testing.T) {
	const file = `{"added_tokens":[{"id":3,"content":"<end>","special":true}],"model":{` +
		`"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]},"decoder":{"type":"Fuse"}}`
	dir := t.TempDir()
	path := filepath.Join(dir, "text.txt") // the last byte is held out
	require.NoError(t, os.WriteFile(path, []byte("abbab"), 0o600))
	corpus, err := data.Open(path)
	require.NoError(t, err)
	for _, c := range []struct {
		name, config string
		ids          []int
	}{
		{"end", `{"eos_token":"<end>"}`, []int{2, 1, 0, 3}},
		{"none", "", []int{2, 1, 0}},
	} {
		var config []byte
		if c.config != "" {
			config = []byte(c.config)
		}
		tok, err := hf.Parse([]byte(file), config)
		require.NoError(t, err)
		tokens, err := data.CacheTokens(t.Context(), filepath.Join(dir, c.name), corpus.Train, tok,
			nil)
		require.NoError(t, err)
		ids := make([]int, tokens.Len())
		require.NoError(t, tokens.ReadTokens(ids, 0))
		require.Equal(t, c.ids, ids, c.name)
		require.NoError(t, tokens.Close())

		e, err := data.NewDocumentEvaluation([][]byte{[]byte("abba"), []byte("ab")}, tok, 1, 4)
		require.NoError(t, err)
		require.Equal(t, 4, e.Bytes()) // without the first token's two, and none for an end
	}
}
