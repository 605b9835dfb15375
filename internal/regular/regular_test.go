package regular

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOpen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, []byte("text"), 0o666))
	link := path + "-link"
	names := []string{path}
	if os.Symlink(path, link) == nil {
		names = append(names, link)
	}

	for _, name := range names {
		f, size, err := Open(name)
		require.NoError(t, err)
		require.EqualValues(t, 4, size)
		require.NoError(t, f.Close())
		b, err := Read(name, 4, "this has")
		require.NoError(t, err)
		require.Equal(t, "text", string(b))
		_, err = Read(name, 3, "a word has")
		require.ErrorContains(t, err, "has 4 bytes, but a word has at most 3")
	}

	_, _, err := Open("")
	require.ErrorContains(t, err, `the path is "": name a file`)
	_, _, err = Open(path + "-absent")
	require.ErrorIs(t, err, os.ErrNotExist)
	_, _, err = Open(filepath.Dir(path))
	require.ErrorContains(t, err, "is a folder, want a regular file")
	_, err = Read(filepath.Dir(path), 3, "this has")
	require.ErrorContains(t, err, "is a folder")
}

func TestReadHole(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hole")
	require.NoError(t, os.WriteFile(path, nil, 0o666))
	if err := os.Truncate(path, 40<<30); err != nil {
		t.Skip("this file system has no holes:", err)
	}
	_, err := Read(path, 1<<20, "this has")
	require.ErrorContains(t, err, "has 42949672960 bytes, but this has at most 1048576")
}

func TestDevices(t *testing.T) {
	for _, path := range []string{"/dev/zero", "/dev/null"} {
		if _, err := os.Stat(path); err != nil {
			t.Skip("this system has no ", path)
		}
		_, err := Read(path, 1<<20, "this has")
		require.ErrorContains(t, err, path+" is a device, want a regular file")
	}
}

// TestAppend checks that Append continues a file, creates one, and rejects everything else.
func TestAppend(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	for i, line := range []string{"a", "b"} {
		f, size, err := Append(path)
		require.NoError(t, err)
		require.Equal(t, int64(i), size)
		_, err = f.WriteString(line)
		require.NoError(t, err)
		require.NoError(t, f.Close())
	}

	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "ab", string(b))
	_, _, err = Append(t.TempDir())
	require.ErrorContains(t, err, "is a folder, want a regular file")
	_, _, err = Append("")
	require.ErrorContains(t, err, `the path is "": name a file`)
}
