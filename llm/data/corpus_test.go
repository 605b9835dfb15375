package data

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/texttest"
)

func mustOpen(t testing.TB, path string, options ...Option) *Corpus {
	t.Helper()
	c, err := Open(path, options...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func names(t *Text) []string {
	var s []string
	for _, d := range t.docs {
		s = append(s, d.name)
	}
	return s
}

func readAll(t testing.TB, text *Text) []byte {
	t.Helper()
	b, err := io.ReadAll(text.Reader())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestOpenChoosesFiles(t *testing.T) {
	dir := texttest.Files(t, map[string]string{
		"b.go": "bb bb bb", "a.go": "aa aa aa", "sub/deep/c.go": "cc cc cc", "d.txt": "dd dd dd",
		"empty.go": "", "binary.go": "PK\x00\x01", ".git/x.go": "hidden", ".hidden.go": "hidden",
		"late.go": strings.Repeat("x", 9000) + "\x00",
	})
	if err := os.Symlink(dir, filepath.Join(dir, "loop")); err != nil {
		t.Logf("without a loop of symbolic links: %v", err)
	}

	for _, c := range []struct {
		options []Option
		want    []string
	}{
		{nil, []string{"a.go", "b.go", "d.txt", "late.go", "sub/deep/c.go"}},
		{[]Option{WithExtensions("go")}, []string{"a.go", "b.go", "late.go", "sub/deep/c.go"}},
		{[]Option{WithExtensions(".txt", ".md")}, []string{"d.txt"}},
	} {
		got := names(mustOpen(t, dir, c.options...).Train)
		slices.Sort(got)
		if !slices.Equal(got, c.want) {
			t.Errorf("%d options: files %q, want %q", len(c.options), got, c.want)
		}
	}
}

func TestOpenFollowsALinkThatIsNamed(t *testing.T) {
	dir := texttest.Files(t, map[string]string{"a.txt": strings.Repeat("text ", 100)})
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Skipf("this system makes no symbolic links: %v", err)
	}
	if got := mustOpen(t, link).Train.Size(); got != 475 {
		t.Errorf("%d bytes to train on through the link, want 475", got)
	}
}

// TestSplitIsAPartition checks that both parts together contain each byte of all files once, however the
// files are split.
func TestSplitIsAPartition(t *testing.T) {
	for _, n := range []int{1, 2, 19, 20, 21, 60} {
		files := texttest.Numbered(n)
		c := mustOpen(t, texttest.Files(t, files), WithHeldOut(0.2), WithSplitSeed(uint64(n)))
		got := make(map[string]string)
		for _, text := range []*Text{c.Train, c.HeldOut} {
			content := readAll(t, text)
			if int64(len(content)) != text.Size() {
				t.Fatalf("%d files: read %d bytes of a text of %d", n, len(content), text.Size())
			}
			for _, d := range text.docs {
				got[d.name] += string(content[:d.size])
				content = content[d.size:]
			}
		}

		if !maps.Equal(got, files) {
			t.Errorf("%d files: training text and held-out text do not make up the files", n)
		}

		share := float64(c.HeldOut.Size()) / float64(c.HeldOut.Size()+c.Train.Size())
		if share < 0.02 || share > 0.6 {
			t.Errorf("%d files: a share of %.3f is held out, want about 0.2", n, share)
		}
		if n >= minFilesToSplit && c.Train.Documents()+c.HeldOut.Documents() != n {
			t.Errorf("%d files: some are in both parts", n)
		}
	}
}

// TestSplitIsStable compares the split with recorded lists, because it must be the same on every machine.
func TestSplitIsStable(t *testing.T) {
	files := texttest.Numbered(40)
	want := []string{"b/10.txt", "a/21.txt"}
	c := mustOpen(t, texttest.Files(t, files), WithHeldOut(0.1))
	if got := names(c.HeldOut); !slices.Equal(got, want) {
		t.Errorf("held out: %q, want %q", got, want)
	}

	if got, want := names(c.Train)[:3], []string{"a/36.txt", "a/03.txt",
		"c/17.txt"}; !slices.Equal(got, want) {
		t.Errorf("first to train on: %q, want %q", got, want)
	}

	if again := mustOpen(t, texttest.Files(t, files), WithHeldOut(0.1)); printOf(t,
		again.Train) != printOf(t, c.Train) {
		t.Error("the same files in another folder have another fingerprint")
	}

	if other := mustOpen(t, texttest.Files(t, files), WithHeldOut(0.1),
		WithSplitSeed(1)); slices.Equal(names(other.HeldOut), want) {
		t.Error("another seed holds out the same files")
	}

	files["new.txt"] = "new"
	more := mustOpen(t, texttest.Files(t, files), WithHeldOut(0.1))
	if printOf(t, more.Train) == printOf(t, c.Train) && printOf(t, more.HeldOut) == printOf(t,
		c.HeldOut) {
		t.Error("a new file leaves both fingerprints as they were")
	}

	for _, name := range want {
		if !slices.Contains(names(more.HeldOut), name) {
			t.Errorf("a new file moves %s out of the held-out part", name)
		}
	}
}

func TestSingleFileHoldsOutItsEnd(t *testing.T) {
	content := strings.Repeat("0123456789", 100)
	path := filepath.Join(texttest.Files(t, map[string]string{"x.bin": content}), "x.bin")
	c := mustOpen(t, path, WithHeldOut(0.25), WithExtensions("txt"))
	if got := string(readAll(t, c.Train)); got != content[:750] {
		t.Errorf("to train on: %d bytes, want the first 750", len(got))
	}
	if got := string(readAll(t, c.HeldOut)); got != content[750:] {
		t.Errorf("held out: %d bytes, want the last 250", len(got))
	}
}

func TestMaxBytesTakesTheFirst(t *testing.T) {
	dir := texttest.Files(t, texttest.Numbered(50))
	whole := mustOpen(t, dir, WithHeldOut(0.2))
	capped := mustOpen(t, dir, WithHeldOut(0.2), WithMaxBytes(1000))
	for _, c := range []struct {
		name          string
		whole, capped *Text
		want          int
	}{{"Train", whole.Train, capped.Train, 800}, {"HeldOut", whole.HeldOut, capped.HeldOut, 200}} {
		if got := readAll(t, c.capped); !bytes.Equal(got, readAll(t, c.whole)[:c.want]) {
			t.Errorf("%s has %d bytes, want the first %d of the whole", c.name, len(got), c.want)
		}
	}

	if all := mustOpen(t, dir, WithHeldOut(0.2), WithMaxBytes(1<<40)); printOf(t,
		all.Train) != printOf(t, whole.Train) {
		t.Error("a limit beyond the text's size changes it")
	}
}

func TestTextReadAt(t *testing.T) {
	r := randtest.New(t)
	files := make(map[string]string)
	for i := range 30 {
		files[fmt.Sprint(i)] = "x" + strings.ReplaceAll(string(texttest.Bytes(r, r.IntN(50))),
			"\x00", "0")
	}

	text := mustOpen(t, texttest.Files(t, files)).Train
	whole := readAll(t, text)
	for range 500 {
		lo := r.IntN(len(whole) + 1)
		want := whole[lo:min(lo+r.IntN(200), len(whole))]
		got := bytes.Repeat([]byte{0xaa}, len(want))
		if n, err := text.ReadAt(got, int64(lo)); n != len(want) || err != nil || !bytes.Equal(got,
			want) {
			t.Fatalf("ReadAt(%d bytes, %d) = %d, %v: %q, want %q", len(want), lo, n, err, got, want)
		}
	}

	if n, err := text.ReadAt(make([]byte, 5), text.Size()-2); n != 2 || err != io.EOF {
		t.Errorf("reading beyond the end gives %d, %v, want 2, EOF", n, err)
	}

	if n, err := text.ReadAt(make([]byte, 5), text.Size()+7); n != 0 || err != io.EOF {
		t.Errorf("reading past the end gives %d, %v, want 0, EOF", n, err)
	}

	if _, err := text.ReadAt(make([]byte, 5), -1); err == nil {
		t.Error("a negative offset is accepted")
	}
}

func TestSample(t *testing.T) {
	whole := texttest.Bytes(randtest.New(t), 10*sampleBlock+77)
	path := filepath.Join(texttest.Files(t, map[string]string{"x": string(whole)}), "x")
	text := mustOpen(t, path, WithHeldOut(0.01)).Train
	whole = whole[:text.Size()]
	for _, limit := range []int{1, 1000, sampleBlock, sampleBlock + 100, 3 * sampleBlock,
		len(whole) - 1, len(whole), 1 << 30} {
		got, err := text.Sample(limit)
		if err != nil || len(got) != min(limit, len(whole)) {
			t.Fatalf("Sample(%d) has %d bytes, %v", limit, len(got), err)
		}

		for lo, at := 0, 0; lo < len(got); lo += sampleBlock {
			block := got[lo:min(lo+sampleBlock, len(got))]
			i := bytes.Index(whole[at:], block)
			if i < 0 {
				t.Fatalf("Sample(%d): the block at %d does not follow in the text", limit, lo)
			}
			at += i + len(block)
			if lo+sampleBlock >= len(got) && limit > sampleBlock && at != len(whole) {
				t.Errorf("Sample(%d) ends at %d of %d: it is not spread over the text", limit, at,
					len(whole))
			}
		}
	}

	if _, err := text.Sample(0); err == nil {
		t.Error("Sample(0) is accepted")
	}
}

func TestOpenErrors(t *testing.T) {
	dir := texttest.Files(t, map[string]string{
		"empty/a.go": "", "binary/a.go": "\x00", "text/a.go": "package a", "one/a": "1",
		"none/.hidden": "x",
	})
	for _, c := range []struct {
		path    string
		options []Option
		want    []string
	}{
		{"missing", nil, []string{"missing", "want a file or a folder with text"}},
		{"empty", nil, []string{"no text in", "empty", "of 1 files, 1 of any extension, 1 of " +
			"these empty and 0 binary"}},
		{"empty/a.go", nil, []string{"a.go is empty"}},
		{"binary", nil, []string{"no text in", "0 of these empty and 1 binary"}},
		{"none", nil, []string{"no files except hidden ones"}},
		{"text", []Option{WithExtensions("txt", ".md")},
			[]string{"of 1 files, 0 ending in .txt or .md"}},
		{"one", nil, []string{"1 files with 1 bytes", "too few"}},
		{"text", []Option{WithExtensions()}, []string{"WithExtensions"}},
		{"text", []Option{WithExtensions(".")}, []string{"WithExtensions", `"."`}},
		{"text", []Option{WithHeldOut(0)}, []string{"WithHeldOut", "0"}},
		{"text", []Option{WithHeldOut(1)}, []string{"WithHeldOut", "1"}},
		{"text", []Option{WithMaxBytes(1)}, []string{"WithMaxBytes", "1"}},
	} {
		corpus, err := Open(filepath.Join(dir, filepath.FromSlash(c.path)), c.options...)
		if err == nil || corpus != nil {
			t.Errorf("%s: got %v, %v, want an error", c.path, corpus, err)
			continue
		}
		for _, want := range append(c.want, "data: Open: ") {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: the error %q lacks %q", c.path, err, want)
			}
		}
	}

	if _, err := Open(""); err == nil || !strings.Contains(err.Error(), `the path is ""`) {
		t.Errorf("no path gives %v, and not the present folder", err)
	}

	if _, err := Open(filepath.Join(dir, "missing")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing path gives %v, want fs.ErrNotExist", err)
	}
}

func TestOpenNamesAnUnreadableFile(t *testing.T) {
	if runtime.GOOS == "windows" || os.Geteuid() == 0 {
		t.Skip("permissions do not keep this user from reading")
	}

	dir := texttest.Files(t, map[string]string{"good.txt": "text", "secret.txt": "text"})
	secret := filepath.Join(dir, "secret.txt")
	if err := os.Chmod(secret, 0); err != nil {
		t.Fatal(err)
	}

	for _, path := range []string{dir, secret} {
		if _, err := Open(path); !errors.Is(err, fs.ErrPermission) || !strings.Contains(err.Error(),
			"secret.txt") {
			t.Errorf("Open(%s) gives %v, want a refusal that names secret.txt", path, err)
		}
	}
}

func TestReadNamesAChangedFile(t *testing.T) {
	for name, change := range map[string]func(path string) error{
		"grown": func(path string) error {
			return os.WriteFile(path, bytes.Repeat([]byte("y"), 300), 0o666)
		},
		"shrunk": func(path string) error { return os.Truncate(path, 10) },
		"touched": func(path string) error {
			return os.Chtimes(path, time.Time{}, time.Now().Add(time.Hour))
		},
		"vanished": os.Remove,
	} {
		t.Run(name, func(t *testing.T) {
			dir := texttest.Files(t, map[string]string{"kept.txt": strings.Repeat("k", 200),
				"changed.txt": strings.Repeat("c", 200)})
			text := mustOpen(t, dir).Train
			if err := change(filepath.Join(dir, "changed.txt")); err != nil {
				t.Fatal(err)
			}
			_, err := io.ReadAll(text.Reader())
			if !errors.Is(err, ErrChanged) || !strings.Contains(err.Error(), "changed.txt") {
				t.Errorf("reading gives %v, want an ErrChanged that names changed.txt", err)
			}
		})
	}
}

func TestGoSource(t *testing.T) {
	dir, err := GoSource()
	if err != nil {
		t.Fatal(err)
	}

	if _, err := os.Stat(filepath.Join(dir, "strings", "builder.go")); err != nil {
		t.Error(err)
	}

	t.Setenv("GOROOT", t.TempDir())
	if dir, err := GoSource(); err == nil || !strings.Contains(err.Error(), os.Getenv("GOROOT")) {
		t.Errorf("an empty GOROOT gives %q, %v, want an error that names it", dir, err)
	}
}

// FuzzCorpus gives Open files with arbitrary contents and names. Open either returns an error or divides
// their entire contents between its two parts.
func FuzzCorpus(f *testing.F) {
	f.Add("a.txt", []byte("some text"), "b", []byte{0, 1})
	f.Add(".hidden", []byte("x"), "b/c", []byte("yy"))
	f.Add("a", []byte("x"), "a", []byte(""))
	f.Fuzz(func(t *testing.T, name1 string, text1 []byte, name2 string, text2 []byte) {
		dir := t.TempDir()
		for name, text := range map[string][]byte{name1: text1, name2: text2} {
			if filepath.IsLocal(name) && len(name) < 100 {
				_ = os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o777)
				_ = os.WriteFile(filepath.Join(dir, name), text, 0o666) // fails if the system doesn't allow the name
			}
		}

		c, err := Open(dir)
		if err != nil {
			return
		}

		for _, part := range []*Text{c.Train, c.HeldOut} {
			text, err := part.Sample(int(part.Size()))
			require.NoError(t, err)
			require.Len(t, text, int(part.Size()))
			documents, err := part.SampleDocuments(int(part.Size()))
			require.NoError(t, err)
			require.Len(t, documents, part.Documents())
		}

		require.LessOrEqual(t, c.Train.Size()+c.HeldOut.Size(), int64(len(text1)+len(text2)))
	})
}

// TestSampleDocuments checks that the parts of a sample each belong to one document, are adjacent,
// and are as long as possible.
func TestSampleDocuments(t *testing.T) {
	r := randtest.New(t)
	files := map[string]string{}
	for i := range 25 {
		raw := texttest.Bytes(r, 1+r.IntN(3*sampleBlock))
		// a file with zero bytes would count as binary
		files[fmt.Sprint(i)] = string(bytes.ReplaceAll(raw, []byte{0}, []byte{1}))
	}

	text := mustOpen(t, texttest.Files(t, files), WithHeldOut(1e-9)).Train
	whole := readAll(t, text)
	for _, limit := range []int{1, sampleBlock, sampleBlock + 100, 7*sampleBlock + 5,
		len(whole) - 1, len(whole), 1 << 30} {
		sample, err := text.Sample(limit)
		if err != nil {
			t.Fatal(err)
		}

		documents, err := text.SampleDocuments(limit)
		if err != nil || !bytes.Equal(slices.Concat(documents...), sample) {
			t.Fatalf("SampleDocuments(%d) holds something else than Sample, %v", limit, err)
		}

		last := 0 // end of the previous document
		for i, d := range documents {
			at := last + bytes.Index(whole[last:], d)
			document, starts := slices.BinarySearch(text.ends, int64(at))
			if starts {
				document++
			}
			if end := text.ends[document]; int64(at+len(d)) > end {
				t.Errorf("SampleDocuments(%d): piece %d extends %d bytes beyond a document", limit,
					i, int64(at+len(d))-end)
			}
			if i > 0 && !starts && at == last {
				t.Errorf("SampleDocuments(%d): piece %d continues where the previous one ends", limit,
					i)
			}
			last = at + len(d)
		}
	}

	if _, err := text.SampleDocuments(0); err == nil {
		t.Error("SampleDocuments(0) is accepted")
	}
}
