// Package atomicfile replaces files in one step.
package atomicfile

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Write gives the file at path the contents that write writes. They go to a temporary file in the
// same directory, which is synced and renamed. Then the directory is synced. A process that is
// killed at any moment leaves the old file or the new one. The next Write to the same path removes
// its temporary file. After an error the file is a complete one too, and the temporary file is
// gone. A symbolic link to a file stays one.
func Write(path string, write func(*os.File) error) (err error) {
	if err := checkPath(path); err != nil {
		return err
	}
	if target, err := filepath.EvalSymlinks(path); err == nil {
		path = target
	}
	removeStale(path)
	f, err := createTemporary(path)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
		}
	}()
	if err := write(f); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	return publish(f, path)
}

// WriteMkdir is Write; it makes the folders that path needs.
func WriteMkdir(path string, write func(*os.File) error) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return err
	}
	return Write(path, write)
}

// Writable makes the folders that path needs, and finds out whether a file can be written there,
// by another one beside it.
func Writable(path string) error {
	if err := checkPath(path); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return err
	}
	probe, err := os.CreateTemp(filepath.Dir(path), ".probe-*")
	if err != nil {
		var cause *fs.PathError // which is about the probe
		if errors.As(err, &cause) {
			err = cause.Err
		}
		return fmt.Errorf("no file can be made in %s: %w", filepath.Dir(path), err)
	}
	return errors.Join(probe.Close(), os.Remove(probe.Name()))
}

// checkPath refuses what Write would fail with after all the work: no path, and a folder.
func checkPath(path string) error {
	if path == "" {
		return errors.New(`the path is "", want that of a file`)
	}
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return fmt.Errorf("%s is a folder, want the path of a file", path)
	}
	return nil
}

// randomDigits is the length of the random end of a temporary file's name.
const randomDigits = 16

func temporaryPrefix(path string) string { return "." + filepath.Base(path) + ".tmp-" }

// createTemporary makes a file beside path that no other process takes for a dead writer's.
func createTemporary(path string) (*os.File, error) {
	for {
		var random [randomDigits / 2]byte
		rand.Read(random[:]) // never fails
		name := filepath.Join(filepath.Dir(path), temporaryPrefix(path)+
			hex.EncodeToString(random[:]))
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666)
		if errors.Is(err, os.ErrExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if !claim(f) {
			f.Close()
			continue
		}
		// Another process may have removed the file in the moment before it was claimed.
		mine, err := f.Stat()
		if err != nil {
			f.Close()
			os.Remove(name)
			return nil, err
		}
		if there, err := os.Stat(name); err == nil && os.SameFile(mine, there) {
			return f, nil
		}
		f.Close()
	}
}

// removeStale removes the temporary files that dead writers left beside path. What it cannot remove
// it leaves: the save itself does not depend on it.
func removeStale(path string) {
	dir, prefix := filepath.Dir(path), temporaryPrefix(path)
	files, _ := os.ReadDir(dir)
	for _, file := range files {
		if name := file.Name(); strings.HasPrefix(name, prefix) &&
			len(name) == len(prefix)+randomDigits {
			removeUnclaimed(filepath.Join(dir, name))
		}
	}
}
