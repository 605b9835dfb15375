package data

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/internal/texttest"
)

// printOf returns a text's fingerprint.
func printOf(t *testing.T, text *Text) string {
	t.Helper()
	value, err := text.Fingerprint(t.Context(), nil)
	require.NoError(t, err)
	return value
}

// TestFingerprint checks that the fingerprint depends on the contents of the text and the ends of its
// documents, but not on names, directories or times.
func TestFingerprint(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	of := func(files map[string]string) string {
		return printOf(t, mustOpen(t, texttest.Files(t, files)).Train)
	}
	text := of(map[string]string{"a": "the text of one file"})
	require.Len(t, text, 64)
	require.Equal(t, text, of(map[string]string{"b": "the text of one file"}), "another name")
	require.NotEqual(t, text, of(map[string]string{"a": "the text of two file"}),
		"other text of the same size")

	// The last bytes of each file are held out.
	whole, parts := strings.Repeat("x", 40), strings.Repeat("x", 20)
	require.NotEqual(t, of(map[string]string{"a": whole}),
		of(map[string]string{"a": parts, "b": parts}), "other ends of documents")
}

// TestFingerprintPieces checks that a large file has the same fingerprint on one core and on several,
// and that reading stops when the context is canceled.
func TestFingerprintPieces(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	dir := t.TempDir()
	big := make([]byte, 2*fingerprintPiece+12345)
	for i := range big {
		big[i] = byte(i*i>>7) | 1
	}

	require.NoError(t, os.WriteFile(filepath.Join(dir, "big"), big, 0o666))
	all := printOf(t, mustOpen(t, dir).Train)
	big[fingerprintPiece+1] ^= 2
	other := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(other, "big"), big, 0o666))
	require.NotEqual(t, all, printOf(t, mustOpen(t, other).Train))
	enough := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(enough)
	_, err := mustOpen(t, other).Train.Fingerprint(ctx, nil)
	require.ErrorIs(t, err, enough)
}

// TestFingerprintProgress checks that progress counts every byte once, that an error from progress
// aborts the work, and that a nil text or context doesn't panic.
func TestFingerprintProgress(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	text := mustOpen(t, texttest.Files(t, texttest.Numbered(30))).Train
	enough, last := errors.New("enough"), int64(0)
	_, err := text.Fingerprint(t.Context(), func(int64, int64) error { return enough })
	require.ErrorIs(t, err, enough)
	value, err := text.Fingerprint(t.Context(), func(done, total int64) error {
		require.Greater(t, done, last)
		require.Equal(t, text.Size(), total)
		last = done
		return nil
	})

	require.NoError(t, err)
	require.Equal(t, text.Size(), last)
	require.Equal(t, value, printOf(t, text))
}

// TestFingerprintKept checks that a fingerprint is cached once the files are old enough, and that it is
// never used after a file has changed.
func TestFingerprintKept(t *testing.T) {
	cache := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	defer func(d time.Duration) { fingerprintSettle = d }(fingerprintSettle)
	dir := texttest.Files(t, map[string]string{"a": strings.Repeat("one text. ", 100)})
	known := fingerprintCache()
	require.NotEmpty(t, known)

	fingerprintSettle = time.Hour
	first := printOf(t, mustOpen(t, dir).Train)
	require.Empty(t, known.read(), "a file that was written a moment ago may be written again "+
		"within one tick of its clock")
	fingerprintSettle = -time.Hour
	require.Equal(t, first, printOf(t, mustOpen(t, dir).Train))
	require.Len(t, known.read(), 1)

	// Prove that the cache is used by storing another value.
	table := mustOpen(t, dir).Train.table()
	known.put(table, strings.Repeat("ab", 32))
	require.Equal(t, strings.Repeat("ab", 32), printOf(t, mustOpen(t, dir).Train))
	known.put(table, "no fingerprint")
	require.Equal(t, first, printOf(t, mustOpen(t, dir).Train))

	// Different text with the same name, size and modification time.
	name := filepath.Join(dir, "a")
	info, err := os.Stat(name)
	require.NoError(t, err)
	id, _ := fileIdentity(info)
	for again := id; again == id; { // until the clock that the system uses for change times has ticked
		time.Sleep(10 * time.Millisecond)
		require.NoError(t, os.WriteFile(name, []byte(strings.Repeat("two text. ", 100)), 0o666))
		require.NoError(t, os.Chtimes(name, info.ModTime(), info.ModTime()))
		info, err = os.Stat(name)
		require.NoError(t, err)
		if again, _ = fileIdentity(info); again == "" {
			break
		}
	}
	if id != "" {
		require.NotEqual(t, first, printOf(t, mustOpen(t, dir).Train))
	}

	for range fingerprintsMost + 5 {
		known.put(time.Now().String(), first)
	}

	require.Len(t, known.read(), fingerprintsMost)
	require.NoError(t, os.WriteFile(string(known), []byte("[{"), 0o666))
	require.Empty(t, known.read())
	require.NotEmpty(t, printOf(t, mustOpen(t, dir).Train), "a corrupted cache is no cache")
}

// FuzzFingerprints gives the cache of fingerprints an arbitrary file. Whatever the file held, a
// fingerprint stored afterwards must be found again.
func FuzzFingerprints(f *testing.F) {
	sum := strings.Repeat("ab", 32)
	f.Add([]byte(`[{"table":"a","fingerprint":"` + sum + `"}]`))
	f.Add([]byte(`[{"table":"a","fingerprint":"ab"},{},null,3]`))
	f.Add([]byte("[" + strings.Repeat("{},", 1000) + "{}]"))
	path := filepath.Join(f.TempDir(), "fingerprints.json")
	f.Fuzz(func(t *testing.T, b []byte) {
		require.NoError(t, os.WriteFile(path, b, 0o666))
		cache := fingerprints(path)
		bounded.Run(t, int64(len(b)), func() { cache.get("a") })
		cache.put("b", sum)
		got, ok := cache.get("b")
		require.True(t, ok)
		require.Equal(t, sum, got)
		require.LessOrEqual(t, len(cache.read()), fingerprintsMost)
	})
}

// TestManyFingerprints checks that a file with too many entries takes no more memory than its size
// suggests.
func TestManyFingerprints(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fingerprints.json")
	b := []byte("[" + strings.Repeat("{},", fingerprintsBytes/3-2) + "{}]")
	require.NoError(t, os.WriteFile(path, b, 0o666))
	bounded.Run(t, int64(len(b)), func() {
		require.Len(t, fingerprints(path).read(),
			fingerprintsMost)
	})
}
