package atomicfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// fill puts a file into a directory.
func fill(dir string) error {
	return os.WriteFile(filepath.Join(dir, "config"), []byte("ours"), 0o666)
}

// names returns the contents of a directory.
func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

// TestCreateFolder checks that a directory is created where there is nothing or an empty directory,
// even through a symbolic link, and that no other files remain.
func TestCreateFolder(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, CreateFolder(filepath.Join(dir, "a", "new"), fill))
	require.Equal(t, []string{"config"}, names(t, filepath.Join(dir, "a", "new")))

	empty := filepath.Join(dir, "empty")
	require.NoError(t, os.Mkdir(empty, 0o777))
	require.NoError(t, CreateFolder(empty+string(filepath.Separator), fill))
	require.Equal(t, []string{"config"}, names(t, empty))

	failed := errors.New("failed")
	require.ErrorIs(t, CreateFolder(filepath.Join(dir, "failed"), func(string) error {
		return failed
	}), failed)
	require.ErrorIs(t, CreateFolder(empty, fill), fs.ErrExist)
	require.Equal(t, []string{"a", "empty"}, names(t, dir))

	if runtime.GOOS == "windows" {
		return // Windows lets only some users create links
	}

	target := filepath.Join(dir, "target")
	require.NoError(t, os.Mkdir(target, 0o777))
	require.NoError(t, os.Symlink(target, filepath.Join(dir, "link")))
	require.NoError(t, CreateFolder(filepath.Join(dir, "link"), fill))
	require.Equal(t, []string{"config"}, names(t, target))
}

// TestAppears checks that a file or directory that appears during a write is preserved and makes the
// write fail.
func TestAppears(t *testing.T) {
	theirs := []byte("theirs")
	for name, appear := range map[string]func(path string) error{
		"file": func(path string) error { return os.WriteFile(path, theirs, 0o666) },
		"folder": func(path string) error {
			return errors.Join(os.Mkdir(path, 0o777),
				os.WriteFile(filepath.Join(path, "config"), theirs, 0o666))
		},
		"dangling link": func(path string) error { return os.Symlink("nowhere", path) },
	} {
		if name == "dangling link" && runtime.GOOS == "windows" {
			continue
		}
		dir := t.TempDir()
		path := filepath.Join(dir, "out")
		err := CreateFolder(path, func(tmp string) error {
			return errors.Join(appear(path), fill(tmp))
		})
		require.ErrorIs(t, err, fs.ErrExist, name)
		require.Equal(t, []string{"out"}, names(t, dir), name)
		require.ErrorIs(t, CreateFolder(path, fill), fs.ErrExist, name)

		require.NoError(t, os.RemoveAll(path))
		err = Create(path, func(*os.File) error { return appear(path) })
		require.ErrorIs(t, err, fs.ErrExist, name)
		require.Equal(t, []string{"out"}, names(t, dir), name)
		if name == "file" {
			got, err := os.ReadFile(path)
			require.NoError(t, err)
			require.Equal(t, theirs, got)
		}
	}

	// An empty directory may be used by anyone.
	path := filepath.Join(t.TempDir(), "out")
	require.NoError(t, CreateFolder(path, func(tmp string) error {
		return errors.Join(os.Mkdir(path, 0o777), fill(tmp))
	}))
}

// TestMoveWithoutTheSystem checks that the fallbacks for systems without an exclusive rename
// replace nothing either.
func TestMoveWithoutTheSystem(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	require.NoError(t, os.WriteFile(at("file"), []byte("ours"), 0o666))
	require.NoError(t, os.WriteFile(at("theirs"), []byte("theirs"), 0o666))
	require.ErrorIs(t, moveOver(at("file"), at("theirs")), fs.ErrExist)
	require.NoError(t, moveOver(at("file"), at("moved")))

	require.NoError(t, os.Mkdir(at("folder"), 0o777))
	require.NoError(t, os.Mkdir(at("full"), 0o777))
	require.NoError(t, fill(at("full")))
	require.ErrorIs(t, moveFolder(at("folder"), at("full")), fs.ErrExist)
	require.NoError(t, moveFolder(at("full"), at("renamed")))
	require.Equal(t, []string{"folder", "moved", "renamed", "theirs"}, names(t, dir))
	got, err := os.ReadFile(at("theirs"))
	require.NoError(t, err)
	require.Equal(t, "theirs", string(got))
}

// TestStaleFolder checks that the temporary directory of a killed process is removed, but not the
// directory of a running process.
func TestStaleFolder(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("Windows cannot tell whose folder it is")
	}

	dir := t.TempDir()
	dead := filepath.Join(dir, prefixOf("out")+strings.Repeat("d", randomDigits)+nameSuffix)
	require.NoError(t, os.MkdirAll(filepath.Join(dead, "a", "b"), 0o777))
	running, release, err := createTemporaryFolder(dir, "out")
	require.NoError(t, err)
	require.NoError(t, CreateFolder(filepath.Join(dir, "out"), fill))
	require.NoDirExists(t, dead)
	require.DirExists(t, running)
	require.NoError(t, release())

	require.NoError(t, os.WriteFile(filepath.Join(dir, ".kasmina-notes.tmp"), nil, 0o666))
	CleanFolder(dir)
	require.Equal(t, []string{".kasmina-notes.tmp", "out"}, names(t, dir))
}

// TestWritePart checks that stale files of parts are removed only by the next write of the main
// file.
func TestWritePart(t *testing.T) {
	dir := t.TempDir()
	main := filepath.Join(dir, "main")
	stale := filepath.Join(dir, prefixOf("main")+strings.Repeat("d", randomDigits)+nameSuffix)
	require.NoError(t, os.WriteFile(stale, nil, 0o666))
	require.NoError(t, WritePart(filepath.Join(dir, "part"), main, func(f *os.File) error {
		require.True(t, strings.HasPrefix(filepath.Base(f.Name()), prefixOf("main")))
		return nil
	}))
	require.FileExists(t, stale)
	mustWrite(t, main, "")
	require.Equal(t, []string{"main", "part"}, names(t, dir))
}
