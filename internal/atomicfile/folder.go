package atomicfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/kasmina-go/kasmina/internal/failpoint"
)

// CreateFolder creates a directory at path, along with any missing parents. The function fill creates
// its contents in a temporary directory next to path, which is renamed when complete.
//
// Until then, path must not exist or must be an empty directory. If anything else appears there
// before the rename, CreateFolder leaves it alone and returns an error that wraps fs.ErrExist.
//
// On Windows, and on file systems that cannot lock directories, a killed process's temporary
// directory remains until it is deleted manually.
func CreateFolder(path string, fill func(dir string) error) (err error) {
	path = filepath.Clean(path)
	if target, err := filepath.EvalSymlinks(path); err == nil {
		path = target
	}

	if err := Vacant(path); err != nil {
		return err
	}

	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return err
	}

	Clean(path)
	name, release, err := createTemporaryFolder(filepath.Dir(path), filepath.Base(path))
	if err != nil {
		return err
	}
	defer release()

	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(name))
		}
	}()

	failpoint.Reach("folder created", path)

	if err := fill(name); err != nil {
		return err
	}

	failpoint.Reach("folder filled", path)

	if err := publishFolder(name, path); err != nil {
		return err
	}

	failpoint.Reach("folder renamed", path)
	return syncDir(filepath.Dir(path))
}

// Vacant returns an error if [CreateFolder] could not create a folder at path, because something
// other than an empty directory exists there or because the name is not allowed.
func Vacant(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil: // for example because the name is too long
		return err
	case !info.IsDir():
		return occupied(path + " is not a folder: choose another name")
	}

	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}

	if len(entries) > 0 {
		return occupied(fmt.Sprintf("the folder %s is not empty, because it holds %s: choose another name", path,
			entries[0].Name()))
	}

	return nil
}

// occupied is the message of an error that wraps fs.ErrExist.
type occupied string

func (o occupied) Error() string { return string(o) }
func (occupied) Unwrap() error   { return fs.ErrExist }

// createTemporaryFolder creates and claims a temporary directory. It is claimed until release is
// called or the process ends.
func createTemporaryFolder(dir, owner string) (name string, release func() error, err error) {
	for {
		name = filepath.Join(dir, newName(owner))
		err := os.Mkdir(name, 0o777)
		if errors.Is(err, os.ErrExist) {
			continue
		}
		if err != nil {
			return "", nil, err
		}

		f, err := os.Open(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // another process took it for a dead writer's
		}
		if err != nil {
			os.Remove(name)
			return "", nil, err
		}
		claimed, err := claimTemporary(f, name)
		if claimed {
			return name, f.Close, nil
		}
		f.Close()
		if err != nil {
			os.Remove(name)
			return "", nil, err
		}
	}
}

// publishFolder renames a complete directory to path, replacing an empty directory if there is one.
func publishFolder(from, path string) error {
	err := Move(from, path)
	if !errors.Is(err, fs.ErrExist) {
		return err
	}

	// Removing a directory fails unless it is empty.
	if Vacant(path) != nil || os.Remove(path) != nil {
		return fmt.Errorf("%w: somebody else has written there meanwhile; choose another name", err)
	}
	return Move(from, path)
}
