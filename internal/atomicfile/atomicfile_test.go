package atomicfile

import (
	"errors"
	"io/fs"
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

// TestErrorPreservesFile checks that an error, whatever its cause, changes nothing.
func TestErrorPreservesFile(t *testing.T) {
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

func TestPreservesLink(t *testing.T) {
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

// TestStale checks that a write removes the temporary files of killed writers but nothing else, in
// particular no file of a running writer or another owner, and no user's file with a similar name.
func TestStale(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "model")
	digits := strings.Repeat("d", randomDigits)
	dead := filepath.Join(dir, prefixOf("model")+digits+nameSuffix)
	kept := []string{
		filepath.Join(dir, prefixOf("other")+digits+nameSuffix),
		filepath.Join(dir, prefixOf("model")+digits),
		filepath.Join(dir, prefixOf("model")+strings.Repeat("x", randomDigits)+nameSuffix),
		filepath.Join(dir, prefixOf("model")+"notes.txt"),
	}

	for _, name := range append(kept, dead) {
		if err := os.WriteFile(name, nil, 0o666); err != nil {
			t.Fatal(err)
		}
	}

	running, err := createTemporary(dir, "model")
	if err != nil {
		t.Fatal(err)
	}
	defer running.Close()

	mustWrite(t, path, "new")
	exists := func(name string) bool { _, err := os.Stat(name); return err == nil }
	if exists(dead) {
		t.Error("the file of a killed writer is still there")
	}

	for _, name := range append(kept, running.Name()) {
		if !exists(name) {
			t.Errorf("%s is gone", filepath.Base(name))
		}
	}

	if err := publish(running, path, os.Rename); err != nil {
		t.Error(err)
	}
}

// TestTemporaryStays checks that the temporary file of a running writer is never removed, not even
// right after its creation, while other writers remove stale ones.
func TestTemporaryStays(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "model")
	stop, stopped := make(chan struct{}), make(chan struct{})
	for range 2 {
		go func() {
			defer func() { stopped <- struct{}{} }()
			for {
				select {
				case <-stop:
					return
				default:
					Clean(path)
				}
			}
		}()
	}

	for range 1000 {
		f, err := createTemporary(dir, "model")
		if err != nil {
			t.Error(err)
			break
		}
		time.Sleep(10 * time.Microsecond)
		if _, err := os.Stat(f.Name()); err != nil {
			t.Error(err)
		}

		// Windows renames only closed files.
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

// TestLongNames checks that every name allowed by the file system can be written, and that Writable
// rejects all longer names in advance.
func TestLongNames(t *testing.T) {
	text := func(f *os.File) error { _, err := f.WriteString("text"); return err }
	for _, n := range []int{1, 100, 200, 219, 220, 233, 234, 250, 255, 256, 300} {
		path := filepath.Join(t.TempDir(), strings.Repeat("n", n))
		probe := os.WriteFile(path, nil, 0o666)
		os.Remove(path)

		if err := Writable(path); (err == nil) != (probe == nil) {
			t.Errorf("a name of %d bytes: Writable says %v, the system %v", n, err, probe)
		}
		if probe != nil {
			continue
		}
		if err := Write(path, text); err != nil {
			t.Errorf("Write of a name of %d bytes: %v", n, err)
		}
		if err := Create(path, text); !errors.Is(err, fs.ErrExist) {
			t.Errorf("Create of a file that exists: %v", err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if err := Create(path, text); err != nil {
			t.Errorf("Create of a name of %d bytes: %v", n, err)
		}

		folder := filepath.Join(t.TempDir(), strings.Repeat("n", n))
		err := CreateFolder(folder, func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "file"), nil, 0o666)
		})
		if err != nil {
			t.Errorf("CreateFolder of a name of %d bytes: %v", n, err)
		}
		for _, dir := range []string{filepath.Dir(path), filepath.Dir(folder)} {
			if entries, _ := os.ReadDir(dir); len(entries) != 1 {
				t.Errorf("%d bytes: %s holds %v", n, dir, entries)
			}
		}
	}
}

func TestTemporaryNames(t *testing.T) {
	name := newName(strings.Repeat("n", 300))
	if !IsTemporary(name) || !IsTemporary(LongestTemporary) || len(name) != len(LongestTemporary) {
		t.Errorf("the name is %s", name)
	}
	for _, name := range []string{"", ".kasmina-.tmp", ".kasmina.lock", name + "x", name[1:],
		strings.Replace(name, "-", "_", 2)} {
		if IsTemporary(name) {
			t.Errorf("%s passes for a temporary name", name)
		}
	}
}
