// Package atomicfile writes files and directories that appear complete or not at all.
//
// Everything is first written under a temporary name next to the destination. If the process is
// killed, at most a temporary file or directory remains, which the next write to the same destination
// removes. Temporary names are short and do not contain the final name, so any name the file system
// allows can be written.
package atomicfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/kasmina-go/kasmina/internal/failpoint"
)

// Write replaces the contents of the file at path with the data that write produces.
//
// The data goes to a temporary file in the same directory, which is synced and renamed before the
// directory itself is synced. If the process is killed at any point, path contains either the old or
// the new file, and after an error the old file is unchanged. If path is a symbolic link, Write
// replaces the file that it points to.
func Write(path string, write func(*os.File) error) error {
	path, err := target(path)
	if err != nil {
		return err
	}

	Clean(path)
	return writeTemporary(path, filepath.Base(path), write, os.Rename)
}

// Create is like [Write], but for a file that must not exist. If anything exists at path by the time
// the contents are complete, Create leaves it alone and returns an error that wraps fs.ErrExist.
func Create(path string, write func(*os.File) error) error {
	path, err := target(path)
	if err != nil {
		return err
	}
	if _, err := os.Lstat(path); err == nil {
		return exists(path)
	}

	Clean(path)
	return writeTemporary(path, filepath.Base(path), write, Move)
}

// WritePart is like [Write], but for a file that belongs to the main file at the path of, in the same
// directory.
//
// Its temporary file counts as a temporary file of the main file: WritePart removes no stale files, so
// that several processes may write parts at once, and the next Write of the main file cleans up after
// any WritePart that was killed.
func WritePart(path, of string, write func(*os.File) error) error {
	path, err := target(path)
	if err != nil {
		return err
	}
	if of, err = target(of); err != nil {
		return err
	}
	return writeTemporary(path, filepath.Base(of), write, os.Rename)
}

// target returns the path of the file that a write replaces, or an error if it cannot be one.
func target(path string) (string, error) {
	if err := checkPath(path); err != nil {
		return "", err
	}
	if target, err := filepath.EvalSymlinks(path); err == nil {
		return target, nil
	}
	return path, nil
}

// writeTemporary writes a temporary file of the given owner and renames it to path.
func writeTemporary(path, owner string, write func(*os.File) error,
	rename func(from, to string) error) (err error) {
	f, err := createTemporary(filepath.Dir(path), owner)
	if err != nil {
		return err
	}

	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
		}
	}()

	failpoint.Reach("file created", path)

	if err := write(f); err != nil {
		return err
	}

	failpoint.Reach("file written", path)

	if err := f.Sync(); err != nil {
		return err
	}

	failpoint.Reach("file synced", path)

	if err := publish(f, path, rename); err != nil {
		return err
	}

	failpoint.Reach("file renamed", path)
	return nil
}

// WriteMkdir is like [Write], but also creates the directories that path needs.
func WriteMkdir(path string, write func(*os.File) error) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return err
	}
	return Write(path, write)
}

// CreateMkdir is like [Create], but also creates the directories that path needs.
func CreateMkdir(path string, write func(*os.File) error) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return err
	}
	return Create(path, write)
}

// Writable creates the directories that path needs and reports whether [Write] could write a file
// there, that is, whether the file system accepts the name and permits files in the directory.
func Writable(path string) error {
	if err := checkPath(path); err != nil {
		return err
	}

	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return err
	}

	// A name that is too long or otherwise impossible fails here, too.
	if _, err := os.Lstat(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("no file can have this name: %w", err)
	}

	path, err := target(path)
	if err != nil {
		return err
	}

	f, err := createTemporary(filepath.Dir(path), filepath.Base(path))
	if err != nil {
		// The name of the temporary file would mean nothing to the reader.
		var cause *fs.PathError
		if errors.As(err, &cause) {
			err = cause.Err
		}
		return fmt.Errorf("no file can be created in %s: %w", filepath.Dir(path), err)
	}

	failpoint.Reach("file created", path)
	err = f.Close()
	return errors.Join(err, os.Remove(f.Name()))
}

// checkPath rejects paths that Write would fail on only after the contents have been written.
func checkPath(path string) error {
	if path == "" {
		return errors.New(`the path is "": name a file`)
	}
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return fmt.Errorf("%s is a folder, want the path of a file", path)
	}
	return nil
}

func exists(path string) error {
	return &fs.PathError{Op: "create", Path: path, Err: fs.ErrExist}
}
