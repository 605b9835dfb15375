package gguf

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/llm/hf"
)

// FuzzTokenizer has the tokenizer of a folder written, which may be any text.
func FuzzTokenizer(f *testing.F) {
	dir := f.TempDir()
	require.NoError(f, os.CopyFS(dir, os.DirFS(filepath.Join("..", "testdata", "tiny"))))
	folder, err := hf.Open(dir)
	require.NoError(f, err)
	defer folder.Close()
	text := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(f, err)
		return b
	}
	names := []string{"tokenizer.json", "tokenizer_config.json"}
	f.Add(text(names[0]), text(names[1]))
	f.Add([]byte(`{"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},"model":`+
		`{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":[["a","b"]]}}`), []byte("{}"))
	const model = 512 // tokens
	f.Fuzz(func(t *testing.T, tokenizer, config []byte) {
		for i, b := range [][]byte{tokenizer, config} {
			require.NoError(t, os.WriteFile(filepath.Join(dir, names[i]), b, 0o666))
		}
		bounded.Run(t, int64(2*len(tokenizer)+len(config)), func() {
			_ = addTokenizer(&fields{}, folder, model)
		})
	})
}
