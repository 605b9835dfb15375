// Package texttest provides texts and files for tests, including random ones and Go's own source.
package texttest

import (
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Files creates a directory with the given files and returns its path.
func Files(t testing.TB, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o666); err != nil {
			t.Fatal(err)
		}
	}

	return dir
}

// Numbered returns n text files of various lengths.
func Numbered(n int) map[string]string {
	files := make(map[string]string)
	for i := range n {
		name := fmt.Sprintf("%c/%02d.txt", 'a'+i%3, i)
		files[name] = strings.Repeat(fmt.Sprintf("line of file %d\n", i), i+1)
	}
	return files
}

// Bytes returns n random bytes.
func Bytes(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// Words returns a text of n bytes with simple regularities to learn.
func Words(seed uint64, n int) []byte {
	vocabulary := []string{"func ", "return ", "if err != nil ", "{\n", "}\n", "x := y\n"}
	r := rand.New(rand.NewPCG(seed, 1))
	var text []byte
	for len(text) < n {
		text = append(text, vocabulary[r.IntN(6)]...)
	}
	return text[:n]
}

// Repetitive returns at least n bytes composed of few symbols, which form many repeated pairs. Not all
// of the text is valid UTF-8.
func Repetitive(r *rand.Rand, n int) []byte {
	alphabet := []string{"a", "a", "b", "c", "ab", " ", " ", "\n\t", ".", "é", "\xff"}
	var text []byte
	for len(text) < n {
		text = append(text, alphabet[r.IntN(len(alphabet))]...)
	}
	return text
}

// Go returns up to size bytes of Go's own source for training, and as many bytes of other source
// files.
func Go(t testing.TB, size int) (train, heldOut []byte) {
	t.Helper()
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}

	files := 0
	visit := func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(name) != ".go" {
			return err
		}

		text, err := os.ReadFile(name)
		if files++; files%2 == 0 {
			train = append(train, text...)
		} else {
			heldOut = append(heldOut, text...)
		}

		if len(train) >= size && len(heldOut) >= size {
			return fs.SkipAll
		}
		return err
	}

	src := filepath.Join(strings.TrimSpace(string(root)), "src")
	if err := filepath.WalkDir(src, visit); err != nil {
		t.Fatal(err)
	}

	return train[:min(size, len(train))], heldOut[:min(size, len(heldOut))]
}

// NoFiles returns paths that exist on this system but are not regular files, namely a directory,
// devices and a named pipe. Reading such a path may never start or never end.
func NoFiles(t *testing.T) []string {
	t.Helper()
	paths := []string{t.TempDir()}
	for _, path := range []string{"/dev/zero", "/dev/null", NamedPipe(t)} {
		if _, err := os.Stat(path); err == nil {
			paths = append(paths, path)
		}
	}
	return paths
}

// Hole creates a file that starts with content and continues with a 40 GB hole, which takes up almost
// no space. It skips the test if the file system doesn't support holes.
func Hole(t *testing.T, content []byte) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "hole")
	if err := os.WriteFile(path, content, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, HoleSize+int64(len(content))); err != nil {
		t.Skip("this file system has no holes:", err)
	}
	return path
}

// HoleSize is the size of the hole in a file created by Hole.
const HoleSize = 40 << 30
