package hf

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSaveRace checks that SavePretrained leaves alone a folder that another process creates while
// the model is being saved.
func TestSaveRace(t *testing.T) {
	f, err := Open("testdata/tiny")
	require.NoError(t, err)
	defer f.Close()
	m, err := f.Load(context.Background())
	require.NoError(t, err)

	parent := t.TempDir()
	dir := filepath.Join(parent, "out")
	names := []string{configName, "model-00001-of-00002.safetensors"}
	var once sync.Once
	err = SavePretrained(context.Background(), dir, m, Like(f), WithSaveProgress(func(_, _ int64) {
		once.Do(func() {
			require.NoError(t, os.MkdirAll(dir, 0o777))
			for _, name := range names {
				require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("theirs"), 0o666))
			}
		})
	}))

	require.ErrorIs(t, err, fs.ErrExist)
	require.ErrorContains(t, err, "somebody else")

	for _, name := range names {
		text, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		require.Equal(t, "theirs", string(text))
	}

	for dir, want := range map[string]int{dir: len(names), parent: 1} {
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Len(t, entries, want)
	}
}
