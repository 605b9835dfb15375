package atomicfile

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

func mustWrite(t *testing.T, path, text string) {
	t.Helper()
	if err := Write(path, func(f *os.File) error {
		_, err := f.WriteString(text)
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// TestKeepsTheOldOne wants nothing to have happened after an error, wherever it comes from.
func TestKeepsTheOldOne(t *testing.T) {
	dir := t.TempDir()
	mustWrite(t, filepath.Join(dir, "file"), "old")
	if err := os.MkdirAll(filepath.Join(dir, "folder", "full"), 0o777); err != nil {
		t.Fatal(err)
	}
	full := errors.New("full")
	for path, want := range map[string]error{"file": full, "folder": nil,
		"absent/file": os.ErrNotExist} {
		err := Write(filepath.Join(dir, filepath.FromSlash(path)), func(f *os.File) error {
			f.WriteString("new")
			if path == "file" {
				return full
			}
			return nil
		})
		if err == nil || want != nil && !errors.Is(err, want) {
			t.Errorf("%s: got %v, want %v", path, err, want)
		}
	}
	if got, err := os.ReadFile(filepath.Join(dir, "file")); err != nil || string(got) != "old" {
		t.Errorf("the file holds %q, %v", got, err)
	}
	for path, want := range map[string]string{"": `the path is ""`, dir: "is a folder"} {
		for _, err := range []error{Writable(path), Write(path, func(*os.File) error {
			t.Errorf("%q is written to", path)
			return nil
		})} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%q: got %v, want %q", path, err, want)
			}
		}
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 2 {
		t.Errorf("a temporary file is left: %v, %v", files, err)
	}
}

func TestKeepsLink(t *testing.T) {
	dir := t.TempDir()
	target, link := filepath.Join(dir, "step-1"), filepath.Join(dir, "latest")
	mustWrite(t, target, "1")
	if err := os.Symlink(target, link); err != nil {
		t.Skip("this system does not let us make symbolic links:", err)
	}
	mustWrite(t, link, "2")
	if got, err := os.ReadFile(target); err != nil || string(got) != "2" {
		t.Errorf("the link's target holds %q, %v", got, err)
	}
	if info, err := os.Lstat(link); err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link is now %v, %v", info, err)
	}
}

// TestStale writes beside the temporary files of a dead writer, of a living one, and a user's file
// of a similar name.
func TestStale(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "model")
	dead := filepath.Join(dir, temporaryPrefix(path)+strings.Repeat("d", randomDigits))
	similar := filepath.Join(dir, temporaryPrefix(path)+"notes.txt")
	for _, name := range []string{dead, similar} {
		if err := os.WriteFile(name, nil, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	living, err := createTemporary(path)
	if err != nil {
		t.Fatal(err)
	}
	defer living.Close()
	mustWrite(t, path, "new")
	exists := func(name string) bool { _, err := os.Stat(name); return err == nil }
	if exists(dead) {
		t.Error("a dead writer's file stays")
	}
	if !exists(similar) {
		t.Error("a user's file is gone")
	}
	if !exists(living.Name()) {
		t.Error("a living writer's file is gone")
	}
	if err := publish(living, path); err != nil {
		t.Error(err)
	}
}

// TestTemporaryStays wants a living writer's temporary file to stay where others remove stale ones,
// from its first moment on.
func TestTemporaryStays(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model")
	stop, stopped := make(chan struct{}), make(chan struct{})
	for range 2 {
		go func() {
			defer func() { stopped <- struct{}{} }()
			for {
				select {
				case <-stop:
					return
				default:
					removeStale(path)
				}
			}
		}()
	}
	for range 1000 {
		f, err := createTemporary(path)
		if err != nil {
			t.Error(err)
			break
		}
		time.Sleep(10 * time.Microsecond)
		if _, err := os.Stat(f.Name()); err != nil {
			t.Error(err)
		}
		// which renames closed files only
		if err := os.Rename(f.Name(), path); err != nil && runtime.GOOS != "windows" {
			t.Error(err)
			break
		}
		f.Close()
		os.Remove(f.Name())
	}
	close(stop)
	<-stopped
	<-stopped
}
