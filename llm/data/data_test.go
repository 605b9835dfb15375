package data

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// TestZeroValues checks that zero values are empty.
func TestZeroValues(t *testing.T) {
	err := new(TokenFile).ReadTokens(make([]int, 1), 1)
	require.ErrorContains(t, err, "tokens 1 to 2 of 0")
	require.Error(t, new(TokenFile).Close())
	require.Zero(t, new(Text).Size())
	_, err = new(Text).SampleDocuments(3)
	require.NoError(t, err)
	for range new(Evaluation).Batches() {
		t.Error("a batch of nothing")
	}
}

// readers returns all functions that read a file at a given path.
func readers(t *testing.T) map[string]func(path string) error {
	text := mustOpen(t, texttest.Files(t, texttest.Numbered(3))).Train
	return map[string]func(path string) error{
		"OpenTokens": func(path string) error {
			_, err := OpenTokens(t.Context(), path, text, tokenizer.Bytes{})
			return err
		},
		"Open": func(path string) error { _, err := Open(path); return err },
	}
}

// TestIrregularFiles gives the readers paths of devices, pipes and the like, which may be endless or never
// deliver any data.
func TestIrregularFiles(t *testing.T) {
	for name, read := range readers(t) {
		for _, path := range texttest.NoFiles(t) {
			require.ErrorContains(t, read(path), path, "%s of %s", name, path)
		}
	}
}

// TestTokensWithAHole gives a reader a sparse file of 40 GB.
func TestTokensWithAHole(t *testing.T) {
	for _, content := range []string{"", tokenMagic} {
		path := texttest.Hole(t, []byte(content))
		bounded.Run(t, 0, func() {
			require.ErrorContains(t, readers(t)["OpenTokens"](path), path)
		})
	}
}

// TestReadingStops checks that functions that read or write large files stop when their context is
// canceled.
func TestReadingStops(t *testing.T) {
	tokens := filepath.Join(t.TempDir(), "tokens")
	text := mustOpen(t, texttest.Files(t, texttest.Numbered(3))).Train
	require.NoError(t, WriteTokens(t.Context(), tokens, text, tokenizer.Bytes{}, nil))
	enough := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(enough)
	_, err := OpenTokens(ctx, tokens, text, tokenizer.Bytes{})
	require.ErrorIs(t, err, enough)
	require.ErrorIs(t, WriteTokens(ctx, tokens, text, tokenizer.Bytes{}, nil), enough)
}

// TestTokensStop checks that an error from a progress function aborts the work, and that no file
// remains.
func TestTokensStop(t *testing.T) {
	stop, calls, dir := errors.New("stop"), 0, t.TempDir()
	_, err := CacheTokens(t.Context(), filepath.Join(dir, "tokens"),
		mustOpen(t, texttest.Files(t, texttest.Numbered(30))).Train, tokenizer.Bytes{},
		func(int64, int64) error { calls++; return stop })
	require.ErrorIs(t, err, stop)
	require.Equal(t, 1, calls)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
}
