package data

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// tokenText returns a text of small documents, a document of several portions, and one without a final
// newline.
func tokenText(t testing.TB) *Text {
	t.Helper()
	r := randtest.New(t)
	files := texttest.Numbered(30)
	files["long.txt"] = strings.Repeat(string(texttest.Repetitive(r, 999))+"\n", 1500)
	files["tail.txt"] = "ab\n\tab"
	files["one line.txt"] = strings.Repeat("né", portionSize*2/3)
	return mustOpen(t, texttest.Files(t, files), WithHeldOut(1e-9)).Train
}

func trainBPE(t testing.TB, text []byte, vocab int) *tokenizer.BPE {
	t.Helper()
	b, err := tokenizer.TrainBPE(t.Context(), bytes.NewReader(text), vocab, nil)
	require.NoError(t, err)
	return b
}

func tokenBPE(t testing.TB) *tokenizer.BPE {
	return trainBPE(t, texttest.Repetitive(randtest.New(t), 50_000), 400)
}

// wide is a Tokenizer with ids of up to 2^24: every three bytes form a token, and the last bytes of a
// text one token each.
type wide struct{ broken bool }

func (wide) Name() string   { return "wide" }
func (wide) VocabSize() int { return 1 << 24 }

func (w wide) Encode(text []byte) (ids []int) {
	for ; len(text) >= 3; text = text[3:] {
		ids = append(ids, int(text[0])<<16|int(text[1])<<8|int(text[2]))
	}
	if w.broken {
		ids = append(ids, 1<<24)
	}
	for _, c := range text {
		ids = append(ids, int(c))
	}
	return ids
}

func (wide) Decode([]int) ([]byte, error) { return nil, errors.New("one-way") }

func mustCache(t testing.TB, path string, text *Text, tok tokenizer.Tokenizer) *TokenFile {
	t.Helper()
	f, err := CacheTokens(t.Context(), path, text, tok, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func allTokens(t testing.TB, tokens Tokens) []int {
	t.Helper()
	ids := make([]int, tokens.Len())
	if err := tokens.ReadTokens(ids, 0); err != nil {
		t.Fatal(err)
	}
	return ids
}

func TestTokenFileHoldsTheTextsTokens(t *testing.T) {
	text := tokenText(t)
	raw := readAll(t, text)
	bpe := tokenBPE(t)
	for _, tok := range []tokenizer.Tokenizer{bpe, tokenizer.Bytes{}, wide{}} {
		t.Run(tok.Name(), func(t *testing.T) {
			var want []int
			for i, end := range text.ends {
				document := raw[end-text.docs[i].size : end]
				for len(document) > 0 {
					n := min(len(document), portionSize)
					if newline := bytes.LastIndexByte(document[:n], '\n'); newline >= 0 &&
						n < len(document) {
						n = newline + 1
					}
					want = append(want, tok.Encode(document[:n])...)
					document = document[n:]
				}
				if tok == tokenizer.Tokenizer(bpe) {
					want = append(want, bpe.EndOfDocument())
				}
			}

			f := mustCache(t, filepath.Join(t.TempDir(), "tokens"), text, tok)
			if got := allTokens(t, f); !slices.Equal(got, want) {
				t.Fatalf("%d tokens, want %d, or others", len(got), len(want))
			}
			if f.Tokenizer() != tok.Name() || f.VocabSize() != tok.VocabSize() {
				t.Errorf("the tokens are of %s with %d ids", f.Tokenizer(), f.VocabSize())
			}

			r := randtest.New(t)
			for range 20 {
				at := r.IntN(len(want))
				part := make([]int, r.IntN(min(1000, len(want)-at)+1))
				if err := f.ReadTokens(part, int64(at)); err != nil || !slices.Equal(part,
					want[at:at+len(part)]) {
					t.Fatalf("tokens %d to %d are others, or %v", at, at+len(part), err)
				}
			}

			if back, err := tok.Decode(want); err == nil && !bytes.Equal(back, raw) {
				t.Error("the text does not come back")
			}
		})
	}
}

func TestTokenFileIsTheSameOnAnyNumberOfCores(t *testing.T) {
	text := tokenText(t)
	bpe := tokenBPE(t)
	var files [2][]byte
	for i, cores := range []int{1, 5} {
		path := filepath.Join(t.TempDir(), "tokens")
		func() {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(cores))
			var last int64
			err := WriteTokens(t.Context(), path, text, bpe, func(done, total int64) error {
				if done <= last || done > total || total != text.Size() {
					t.Errorf("progress(%d, %d) after %d", done, total, last)
				}
				last = done
				return nil
			})
			if err != nil || last != text.Size() {
				t.Fatalf("progress ended at %d of %d: %v", last, text.Size(), err)
			}
		}()
		var err error
		if files[i], err = os.ReadFile(path); err != nil {
			t.Fatal(err)
		}
	}

	if !bytes.Equal(files[0], files[1]) {
		t.Error("five cores wrote another file than one")
	}
}

func TestTokenFileFeedsALoader(t *testing.T) {
	text := tokenText(t)
	bpe := tokenBPE(t)
	path := filepath.Join(t.TempDir(), "tokens")
	first := loaderOf(t, mustCache(t, path, text, bpe), LoaderConfig{Batch: 2, Seq: 16})
	mustNext(t, first)
	second := loaderOf(t, mustCache(t, path, text, bpe), LoaderConfig{Batch: 2, Seq: 16})
	if err := second.SetState(first.State()); err != nil {
		t.Fatal(err)
	}

	if a, b := mustNext(t, first), mustNext(t, second); !slices.Equal(a.Inputs, b.Inputs) {
		t.Error("resumed with another batch")
	}

	// Tokenize doesn't add tokens that end documents, so its tokens differ.
	tokens, err := Tokenize(t.Context(), text, bpe)
	if err != nil {
		t.Fatal(err)
	}

	if err := loaderOf(t, tokens, LoaderConfig{Batch: 2,
		Seq: 16}).SetState(first.State()); !errors.Is(err, ErrChanged) {
		t.Errorf("a state of other tokens: %v", err)
	}
}

func TestTokenFileRefusesStaleTokens(t *testing.T) {
	dir := texttest.Files(t, texttest.Numbered(30))
	path := filepath.Join(t.TempDir(), "cache", "tokens")
	text := mustOpen(t, dir).Train
	if _, err := OpenTokens(t.Context(), path, text, tokenizer.Bytes{}); !errors.Is(err,
		fs.ErrNotExist) {
		t.Fatalf("no file: %v", err)
	}

	mustCache(t, path, text, tokenizer.Bytes{}).Close() // Windows can't replace open files
	name := func(d document) string { return filepath.Join(dir, filepath.FromSlash(d.name)) }
	remove := func() error { return os.Remove(name(text.docs[1])) }
	touch := func() error { return os.Chtimes(name(text.docs[0]), time.Time{}, time.Unix(1e9, 0)) }
	rewrite := func() error { // different text of the same size and time
		b, err := os.ReadFile(name(text.docs[0]))
		b[0] ^= 1
		return errors.Join(err, os.WriteFile(name(text.docs[0]), b, 0o666), touch())
	}
	for _, c := range []struct {
		name   string
		change func() error
		want   string
	}{
		{"another tokenizer", func() error { return nil },
			`from "bytes" with a vocabulary of 256, want "wide" with 16777216`},
		{"a file less", remove, "belong to another text"},
		{"other text", rewrite, "belong to another text"},
	} {
		if err := c.change(); err != nil {
			t.Fatal(err)
		}

		text := mustOpen(t, dir).Train
		if _, err := OpenTokens(t.Context(), path, text, wide{}); !errors.Is(err, ErrChanged) ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}

		f := mustCache(t, path, text, wide{})
		want, err := newTokenHeader(t.Context(), text, wide{})
		if err != nil || f.Fingerprint() != want.Fingerprint || f.Len() == 0 {
			t.Errorf("%s: the tokens were not written again", c.name)
		}

		called := false
		f.Close()
		again, err := CacheTokens(t.Context(), path, text, wide{}, func(int64,
			int64) error {
			called = true
			return nil
		})
		if err != nil || called {
			t.Fatalf("%s: the new tokens are not used: %v", c.name, err)
		}
		again.Close()
	}
}

// TestWriteTokensKeepsTheOldFile checks that the old file survives if the text changes during encoding,
// or if the tokenizer returns ids outside its vocabulary.
func TestWriteTokensKeepsTheOldFile(t *testing.T) {
	dir := texttest.Files(t, texttest.Numbered(30))
	text := mustOpen(t, dir).Train
	cache := t.TempDir()
	path := filepath.Join(cache, "tokens")
	mustCache(t, path, text, tokenizer.Bytes{})
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}

	if err := WriteTokens(t.Context(), path, text, wide{broken: true}, nil); err == nil ||
		!strings.Contains(err.Error(), "tokenizer wide made id 16777216, outside its vocabulary "+
			"[0, 16777216)") {
		t.Errorf("an id outside the vocabulary: %v", err)
	}

	last := text.docs[len(text.docs)-1]
	if err := os.Chtimes(filepath.Join(dir, filepath.FromSlash(last.name)), time.Time{},
		time.Unix(1e9, 0)); err != nil {
		t.Fatal(err)
	}

	if err := WriteTokens(t.Context(), path, text, tokenizer.Bytes{}, nil); !errors.Is(err,
		ErrChanged) {
		t.Errorf("a file that changed: %v", err)
	}

	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, before) {
		t.Errorf("the file changed, or %v", err)
	}

	if files, err := os.ReadDir(cache); err != nil || len(files) != 1 {
		t.Errorf("a temporary file is left: %v, %v", files, err)
	}
}

// tokenFile returns the bytes of a file with the header and the ids.
func tokenFile(t testing.TB, h tokenHeader, ids []byte) []byte {
	t.Helper()
	head, err := h.encode()
	if err != nil {
		t.Fatal(err)
	}
	return append(head, ids...)
}

func TestOpenTokensErrors(t *testing.T) {
	r := randtest.New(t)
	text := mustOpen(t, texttest.Files(t, map[string]string{"a.txt": strings.Repeat("some text\n",
		100)})).Train
	path := filepath.Join(t.TempDir(), "tokens")
	good := mustCache(t, path, text, wide{}).header
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}

	flipped := func(at int) []byte {
		b := bytes.Clone(file)
		b[at] ^= 1 << r.IntN(8)
		return b
	}
	id := tokenDataStart + 4*r.IntN(int(good.Count))
	with := func(change func(h *tokenHeader), ids []byte) []byte {
		h := good
		h.CRC, h.Count = crc32.Checksum(ids, castagnoli), int64(len(ids)/4)
		change(&h)
		return tokenFile(t, h, ids)
	}

	line := bytes.IndexByte(file[len(tokenMagic):], '\n') + len(tokenMagic)
	for _, c := range []struct {
		name string
		file []byte
		want string
	}{
		{"empty", nil, "it starts with \"\""},
		{"something else", []byte("package main\n"), "it starts with \"package main\\n\""},
		{"another version", bytes.Replace(file, []byte("tokens 1"), []byte("tokens 2"), 1),
			"has another version's format"},
		{"corruption of the header", flipped(len(tokenMagic) + r.IntN(line+16-len(tokenMagic))),
			"it is corrupted: the header"},
		{"corruption of an id", flipped(id), "it is corrupted: the checksum of the ids"},
		{"corruption of an id's highest byte", flipped(id + 3), "outside the vocabulary [0, 16777216)"},
		{"a cut header", file[:tokenDataStart-1], "it is corrupted: the header"},
		{"ids that are cut", file[:len(file)-1], "bytes of ids, want"},
		{"ids that are missing", file[:tokenDataStart], "it is corrupted: 0 bytes of ids"},
		{"an id more", append(bytes.Clone(file), 0, 0, 0, 0), "bytes of ids, want"},
		{"a byte more", append(bytes.Clone(file), 0), "bytes of ids, want"},
		{"a count below zero", with(func(h *tokenHeader) {
			h.Count = -1
		}, nil), "0 bytes of ids, want -1"},
		{"a huge count", with(func(h *tokenHeader) {
			h.Count = math.MaxInt64
		}, nil), "want 9223372036854775807 ids"},
		{"ids of no bytes", with(func(h *tokenHeader) {
			h.Width = 0
		}, nil), "ids of 0 bytes, want ids of 4"},
		{"an id outside the vocabulary", with(func(*tokenHeader) {}, []byte{7: 1}),
			"token 1 has the id 16777216"},
	} {
		if err := os.WriteFile(path, c.file, 0o666); err != nil {
			t.Fatal(err)
		}
		_, err := CacheTokens(t.Context(), path, text, wide{}, nil)
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(),
			path) {
			t.Errorf("%s: %v, want %q and the path", c.name, err, c.want)
		}
		if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, c.file) {
			t.Errorf("%s: the file was overwritten, or %v", c.name, err)
		}
	}

	if _, err := (tokenHeader{Tokenizer: strings.Repeat("x",
		tokenDataStart)}).encode(); err == nil {
		t.Error("a name that does not fit the header is no error")
	}
}

func TestTokenFileBounds(t *testing.T) {
	text := mustOpen(t,
		texttest.Files(t, map[string]string{"a.txt": strings.Repeat("x", 100)})).Train
	f := mustCache(t, filepath.Join(t.TempDir(), "tokens"), text, tokenizer.Bytes{})
	n := f.Len()
	for _, c := range []struct {
		length, offset int64
		ok             bool
	}{
		{0, n, true}, {n, 0, true}, {n + 1, 0, false}, {1, n, false}, {2, n - 1, false},
		{1, -1, false}, {1, math.MaxInt64, false},
	} {
		err := f.ReadTokens(make([]int, c.length), c.offset)
		if c.ok != (err == nil) || err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%d tokens from %d: %v", c.length, c.offset, err)
		}
	}

	f.Close()
	if err := f.ReadTokens(make([]int, 1), 0); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// FuzzOpenTokens opens arbitrary files, with and without a correct checksum of the header. OpenTokens
// either rejects a file or reads the ids in it.
func FuzzOpenTokens(f *testing.F) {
	text := mustOpen(f,
		texttest.Files(f, map[string]string{"a.txt": strings.Repeat("x", 100)})).Train
	h, err := newTokenHeader(f.Context(), text, tokenizer.Bytes{})
	if err != nil {
		f.Fatal(err)
	}

	h.Count, h.CRC = 2, crc32.Checksum([]byte{1, 0, 2, 0}, castagnoli)
	file := tokenFile(f, h, []byte{1, 0, 2, 0})
	f.Add(file, false)
	f.Add(file, true)
	f.Add(file[:tokenDataStart], false)
	f.Add([]byte(tokenMagic+"{}\n"), true)
	path := filepath.Join(f.TempDir(), "tokens")
	f.Fuzz(func(t *testing.T, file []byte, repair bool) {
		if rest, ok := bytes.CutPrefix(file, []byte(tokenMagic)); ok && repair {
			line, ids, _ := bytes.Cut(rest, []byte("\n"))
			head := fmt.Appendf(nil, "%s%s\ncrc32c %08x\n", tokenMagic, line, crc32.Checksum(line,
				castagnoli))
			head = append(head, bytes.Repeat([]byte(" "), max(0, tokenDataStart-len(head)))...)
			file = append(head,
				ids[min(len(ids), max(0, tokenDataStart-len(tokenMagic)-len(line)-1)):]...)
		}

		if err := os.WriteFile(path, file, 0o666); err != nil {
			t.Fatal(err)
		}

		var tokens *TokenFile
		var err error
		bounded.Run(t, int64(len(file)), func() {
			tokens, err = OpenTokens(t.Context(), path, text,
				tokenizer.Bytes{})
		})
		if err != nil {
			return
		}

		defer tokens.Close()
		for i, id := range allTokens(t, tokens) {
			if id != int(binary.LittleEndian.Uint16(file[tokenDataStart+2*i:])) || id > 255 {
				t.Fatalf("token %d is %d", i, id)
			}
		}
	})
}

func BenchmarkWriteTokens(b *testing.B) {
	train, _ := texttest.Go(b, 32<<20)
	text := mustOpen(b, texttest.Files(b, map[string]string{"a.go": string(train)})).Train
	bpe := trainBPE(b, train[:8<<20], 50257)
	path := filepath.Join(b.TempDir(), "tokens")
	b.SetBytes(text.Size())
	for b.Loop() {
		if err := WriteTokens(b.Context(), path, text, bpe, nil); err != nil {
			b.Fatal(err)
		}
	}
}
