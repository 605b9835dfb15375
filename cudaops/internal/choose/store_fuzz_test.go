package choose

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/bounded"
)

// TestManyChoices checks that a file with too many choices is ignored, and that such a file is never
// written.
func TestManyChoices(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tune.json")
	var b strings.Builder
	b.WriteString(`{"version":1,"choices":{"":{}`)
	for i := range maxChoices - 1 {
		fmt.Fprintf(&b, `,"%d":{}`, i)
	}
	require.NoError(t, os.WriteFile(path, []byte(b.String()+"}}"), 0o666))
	s := open(path, func(why string) { t.Error(why) })
	require.Len(t, s.choices, maxChoices)
	require.ErrorContains(t, s.put("more", storedChoice{}), "a file can hold at most 16384")
	for b.Len() < maxFile-100 {
		fmt.Fprintf(&b, `,"%d":{}`, b.Len())
	}
	content := []byte(b.String() + "}}")
	require.NoError(t, os.WriteFile(path, content, 0o666))
	bounded.Run(t, int64(len(content)), func() {
		_, err := read(path)
		require.ErrorContains(t, err, "more than 16384 choices")
	})
	require.NoError(t, os.Truncate(path, 40<<30))
	_, err := read(path)
	require.ErrorContains(t, err, "has 42949672960 bytes, but a file of choices has at most")
	_, err = read(filepath.Dir(path))
	require.ErrorContains(t, err, "is a folder")
}

// FuzzRead checks that any file either is rejected or survives a round trip unchanged.
func FuzzRead(f *testing.F) {
	f.Add([]byte(`{"version":1,"choices":{"a":{"variant":"x","cold_ns":1},"b":{"cold_ns":-2}}}`))
	f.Add([]byte(`{"version":1,"choices":{"a":{"variant":"x"},"a":{"cold_ns":2}}}`))
	f.Add([]byte(`{"version":2}`))
	f.Add([]byte(`{"version":1,"choices":null}`))
	path := filepath.Join(f.TempDir(), "tune.json")
	f.Fuzz(func(t *testing.T, b []byte) {
		require.NoError(t, os.WriteFile(path, b, 0o666))
		var found choices
		var err error
		bounded.Run(t, int64(len(b)), func() { found, err = read(path) })
		if err != nil {
			return
		}
		require.NoError(t, (&store{path: path, choices: found}).write())
		again, err := read(path)
		require.NoError(t, err)
		require.Equal(t, found, again)
	})
}
