package tokenizer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/texttest"
)

func mustTrainBPE(t testing.TB, text []byte, vocab int) *BPE {
	t.Helper()
	b, err := TrainBPE(t.Context(), bytes.NewReader(text), vocab, nil)
	require.NoError(t, err)
	return b
}

func split(text []byte) (pieces []string) {
	for len(text) > 0 {
		n := nextPiece(text)
		pieces = append(pieces, string(text[:n]))
		text = text[n:]
	}
	return pieces
}

// replace merges p in ids from left to right, as defined.
func (p pair) replace(ids []int32, id int32) (merged []int32) {
	for len(ids) > 0 {
		if len(ids) > 1 && ids[0] == p.left && ids[1] == p.right {
			merged, ids = append(merged, id), ids[2:]
		} else {
			merged, ids = append(merged, ids[0]), ids[1:]
		}
	}
	return merged
}

func byteIDs(piece string) (ids []int32) {
	for _, c := range []byte(piece) {
		ids = append(ids, int32(c))
	}
	return ids
}

// naiveBPE counts all pairs again for each merge.
func naiveBPE(text []byte, merges int) (found []pair) {
	var words [][]int32
	for _, p := range split(text) {
		words = append(words, byteIDs(p))
	}

	for len(found) < merges {
		counts := map[pair]int{}
		for _, w := range words {
			for i := range w[1:] {
				counts[pair{w[i], w[i+1]}]++
			}
		}
		var best pair
		for p, n := range counts {
			m := counts[best]
			if n > m || n == m && (p.left < best.left || p.left == best.left &&
				p.right < best.right) {
				best = p
			}
		}
		if counts[best] < 2 {
			break
		}
		for i := range words {
			words[i] = best.replace(words[i], int32(256+len(found)))
		}
		found = append(found, best)
	}

	return found
}

func TestTrainBPEMatchesTheDefinition(t *testing.T) {
	r := randtest.New(t)
	for range 20 {
		text := texttest.Repetitive(r, 1+r.IntN(3000))
		const merges = 60
		b := mustTrainBPE(t, text, 257+merges)
		require.Equal(t, naiveBPE(text, merges), append([]pair(nil), b.merges...), "of %q", text)
	}
}

// TestTrainBPEByHand includes a pair that overlaps itself, which counts each time, and texts of a single
// word.
func TestTrainBPEByHand(t *testing.T) {
	for _, c := range []struct {
		text string
		want []pair
	}{
		{"", nil},
		{"abc", nil},                  // no pair occurs twice
		{"ab ab", []pair{{'a', 'b'}}}, // the space belongs to the second word
		{"aaaa", []pair{{'a', 'a'}}},  // afterwards only one pair of aa is left
		{"cd ab", nil},                // pairs don't span pieces
		{"ba.ba.ab.ab", []pair{{'.', 'a'}, {'b', 'a'}, {256, 'b'}}}, // of equally frequent pairs, the one with the lowest ids
	} {
		b := mustTrainBPE(t, []byte(c.text), 300)
		require.Equal(t, c.want, append([]pair(nil), b.merges...), "of %q", c.text)
	}
}

// TestTrainBPEIsDeterministic checks that the result depends neither on the portions in which the text is
// read nor on concurrent trainings.
func TestTrainBPEIsDeterministic(t *testing.T) {
	text, _ := texttest.Go(t, 3<<19) // more than one buffer
	want := mustTrainBPE(t, text, 1000)
	require.Equal(t, 1000, want.VocabSize())
	calls := 0
	got, err := TrainBPE(t.Context(), iotest.HalfReader(bytes.NewReader(text)), 1000,
		func(merges, total int) error {
			calls++
			require.Equal(t, []int{calls, 743}, []int{merges, total})
			return nil
		})

	require.NoError(t, err)
	require.Equal(t, want.Name(), got.Name())
	require.Equal(t, want.merges, got.merges)
	require.Equal(t, 743, calls)
	require.NotEqual(t, want.Name(), mustTrainBPE(t, text, 999).Name())
}

func TestReadPiecesAreThoseOfTheWholeText(t *testing.T) {
	r := randtest.New(t)
	var text []byte
	for len(text) < 5<<20/2 { // the buffer ends inside pieces of all lengths
		text = append(append(text, bytes.Repeat([]byte("é"), r.IntN(100))...), ' ')
	}

	var pieces []string
	err := readPieces(t.Context(), iotest.DataErrReader(bytes.NewReader(text)),
		cutter{nextPiece, maxPiece}, func(p []byte) { pieces = append(pieces, string(p)) })
	require.NoError(t, err)
	require.True(t, slices.Equal(pieces, split(text)),
		"the pieces of a stream are not those of the text")
}

func TestTrainBPEErrors(t *testing.T) {
	broken := errors.New("broken")
	for _, c := range []struct {
		name  string
		vocab int
		err   error
		want  string
	}{
		{"no room for the end of a document", 256, nil,
			"the vocabulary is 256, want 257 to 1048576"},
		{"negative", -1, nil, "the vocabulary is -1"},
		{"too large", 1<<20 + 1, nil, "the vocabulary is 1048577"},
		{"reader", 300, broken, "broken"},
	} {
		reader := iotest.ErrReader(c.err)
		if c.err == nil {
			reader = strings.NewReader("text")
		}
		_, err := TrainBPE(t.Context(), reader, c.vocab, nil)
		require.ErrorContains(t, err, c.want, c.name)
		if c.err != nil {
			require.ErrorIs(t, err, c.err)
		}
	}
}

func TestPieces(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"source", "func main() {\n\tif x.y != nil {\n\t\treturn\n\t}\n}\n",
			"func| main|()| {\n\t|if| x|.y| !=| nil| {\n\t\t|return|\n\t|}\n|}\n"},
		{"prose", "Don't stop,  it's 1984 (or so).", "Don|'t| stop|,| | it|'s| 1984| (|or| so|)."},
		{"numbers", "0x1f_ff, -12", "0x1f_ff|,| -|12"},
		{"comment", "x := 1   // one\n\n\n// two", "x| :=| 1|  | //| one|\n\n\n|//| two"},
		{"blanks at the end", "a  \t", "a|  |\t"},
		{"blanks before a line end", "a  \n  b", "a|  \n  |b"},
		{"Windows", "a\r\n\tb;\r\n", "a|\r\n\t|b|;\r\n"},
		{"other scripts", "naïve “日本語” e\u0301", "naïve| “|日本語|”| e\u0301"},
		{"wide blank", "a\u3000\u3000b", "a|\u3000\u3000|b"},
		{"mathematics", "a×b → ∞ x≤1", "a|×b| →| ∞| x|≤1"},
		{"invalid UTF-8", "a\xff\xfeb\xc3 \xe6\x97", "a|\xff\xfe|b|\xc3| \xe6\x97"},
		{"zeros", "\x00\x00a", "\x00\x00|a"},
	} {
		require.Equal(t, c.want, strings.Join(split([]byte(c.text)), "|"), c.name)
	}

	for _, c := range []string{"x", " ", "\n", "-", "é"} {
		for i, p := range split([]byte(strings.Repeat(c, 1000))) {
			require.True(t, len(p) <= maxPiece && utf8.ValidString(p),
				"piece %d of many %q has %d bytes: %q", i, c, len(p), p)
		}
	}
}

// naiveEncode applies all merges in order.
func naiveEncode(b *BPE, text []byte) (ids []int) {
	for _, piece := range split(text) {
		tokens := byteIDs(piece)
		for i, m := range b.merges {
			tokens = m.replace(tokens, int32(256+i))
		}
		for _, id := range tokens {
			ids = append(ids, int(id))
		}
	}
	return ids
}

func TestBPEEncodeMatchesTheDefinition(t *testing.T) {
	r := randtest.New(t)
	for range 10 {
		b := mustTrainBPE(t, texttest.Repetitive(r, 5000), 400)
		text := texttest.Repetitive(r, 2000)
		require.Equal(t, naiveEncode(b, text), b.Encode(text), "of %q", text)
	}
}

// TestBPECacheOverflows checks that the cache doesn't change the tokens, even after it has overflowed.
func TestBPECacheOverflows(t *testing.T) {
	b := mustTrainBPE(t, []byte(strings.Repeat("10 20 100 200 1000 ", 10)), 300)
	var text []byte
	for i := range maxCached + 5000 {
		text = fmt.Appendf(text, " %d", i)
	}

	e := &bpeEncoder{bpe: b, cache: map[string]span{}}
	for range 2 {
		var got, want []int
		for _, piece := range split(text) {
			got = e.append(got, []byte(piece))
			fresh := &bpeEncoder{bpe: b}
			for _, id := range fresh.merge([]byte(piece)) {
				want = append(want, int(id))
			}
		}
		require.True(t, slices.Equal(got, want), "the cache gives other tokens")
		require.LessOrEqual(t, len(e.cache), maxCached)
		require.LessOrEqual(t, len(e.slab), 6*len(e.cache))
	}
}

func TestBPEInParallel(t *testing.T) {
	text, heldOut := texttest.Go(t, 200_000)
	b := mustTrainBPE(t, text, 2000)
	want := b.Encode(heldOut)
	var wait sync.WaitGroup
	for range 4 {
		wait.Go(func() {
			for range 3 {
				if !slices.Equal(b.Encode(heldOut), want) {
					t.Error("a goroutine got other tokens")
				}
			}
		})
	}

	wait.Wait()
}

// TestBPECompressesSource checks that unseen source code takes less than half as many tokens as bytes,
// even with few merges.
func TestBPECompressesSource(t *testing.T) {
	text, heldOut := texttest.Go(t, 1<<20)
	b := mustTrainBPE(t, text, 4096)
	ids := b.Encode(heldOut)
	require.GreaterOrEqual(t, float64(len(heldOut))/float64(len(ids)), 2.4, "bytes a token")
	back, err := b.Decode(ids)
	require.NoError(t, err)
	require.True(t, bytes.Equal(back, heldOut), "the text does not come back")
}

func TestBPEDecodeNamesTheBadID(t *testing.T) {
	b := mustTrainBPE(t, []byte("ab ab"), 400) // 256 is "ab", and 257 the end of a document
	require.Equal(t, 258, b.VocabSize())
	require.Equal(t, 257, b.EndOfDocument())
	for _, c := range []struct {
		ids  []int
		want string // the text, or part of the error
	}{
		{nil, ""},
		{[]int{256, 257, 'c', 0xff}, "abc\xff"},
		{[]int{'a', 258}, "ids[1] is 258, outside the vocabulary [0, 258)"},
		{[]int{-1}, "ids[0] is -1"},
		{[]int{'a', 'b', 1 << 40}, "ids[2] is 1099511627776"},
	} {
		text, err := b.Decode(c.ids)
		if strings.Contains(c.want, "ids[") {
			require.ErrorContains(t, err, c.want)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, c.want, string(text))
	}
}

func FuzzBPE(f *testing.F) {
	r := rand.New(rand.NewPCG(1, 1))
	b := mustTrainBPE(f, slices.Concat(texttest.Repetitive(r, 5000),
		[]byte(strings.Repeat("func main() {\n\treturn\n}\n", 20))), 400)
	for _, text := range []string{"", "func main() {}\n", "\x00\xff\x80\xc3\x28", "aaaaaaa",
		"\t \n\r ", "日本\xe6\x97"} {
		f.Add([]byte(text))
	}

	f.Fuzz(func(t *testing.T, text []byte) {
		ids := b.Encode(text)
		for i, id := range ids {
			require.True(t, id >= 0 && id < b.EndOfDocument(),
				"ids[%d] = %d, want a token with text, less than %d", i, id, b.EndOfDocument())
		}
		back, err := b.Decode(ids)
		require.NoError(t, err)
		require.True(t, bytes.Equal(back, text), "%q came back as %q", text, back)
		require.Equal(t, naiveEncode(b, text), append([]int(nil), ids...))
	})
}

func TestBPESaveAndLoad(t *testing.T) {
	r := randtest.New(t)
	text := texttest.Repetitive(r, 5000)
	path := filepath.Join(t.TempDir(), "cache", "text.bpe")
	for _, vocab := range []int{257, 300} { // the second file replaces the first
		b := mustTrainBPE(t, text, vocab)
		require.NoError(t, b.Save(path))
		back, err := LoadBPE(path)
		require.NoError(t, err)
		require.Equal(t, b.Name(), back.Name())
		require.Equal(t, vocab, back.VocabSize())
		require.Equal(t, b.Encode(text), back.Encode(text))
	}

	files, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, files, 1)
}

// TestLoadBPENoticesDamage checks that any flipped bit and any truncation is detected.
func TestLoadBPENoticesDamage(t *testing.T) {
	r := randtest.New(t)
	path := filepath.Join(t.TempDir(), "text.bpe")
	require.NoError(t, mustTrainBPE(t, texttest.Repetitive(r, 500), 280).Save(path))
	file, err := os.ReadFile(path)
	require.NoError(t, err)
	for i := range file {
		flipped := bytes.Clone(file)
		flipped[i] ^= 1 << r.IntN(8)
		_, err := parseBPE(flipped)
		require.Error(t, err, "%q for %q at byte %d", flipped[i], file[i], i)
		_, err = parseBPE(file[:i])
		require.Error(t, err, "cut at byte %d", i)
	}
}

// signed completes a BPE file by adding its last line.
func signed(lines string) []byte {
	return fmt.Appendf(nil, "%ssha256 %x\n", lines, sha256.Sum256([]byte(lines)))
}

func TestLoadBPEErrors(t *testing.T) {
	long := bpeHeader + "merges 8\n97 97\n"
	for i := range 7 { // tokens of 4, 8, ... bytes
		long += fmt.Sprintf("%d %d\n", 256+i, 256+i)
	}

	for _, c := range []struct {
		name string
		file []byte
		want string
	}{
		{"empty", nil, "header is \"\""},
		{"something else", []byte("package main\n\nfunc main() {}\n"),
			"header is \"package main\\n"},
		{"another version", signed("kasmina bpe 2\nmerges 0\n"), "or one of an unsupported version"},
		{"header alone", []byte(bpeHeader), "file is corrupted: last line is"},
		{"nothing but the header", signed(bpeHeader), "its second line is \"\""},
		{"no number", signed(bpeHeader + "merges many\n"), "its second line is \"merges many\""},
		{"fewer lines", signed(bpeHeader + "merges 2\n1 2\n"), "want \"merges 1\""},
		{"more lines", signed(bpeHeader + "merges 1\n1 2\n3 4\n"), "want \"merges 2\""},
		{"negative", signed(bpeHeader + "merges -1\n"), "its second line is \"merges -1\""},
		{"one id", signed(bpeHeader + "merges 1\n12\n"), "merge 0 is \"12\", want two ids"},
		{"three ids", signed(bpeHeader + "merges 1\n1 2 3\n"), "merge 0 is \"1 2 3\""},
		{"too large a number", signed(bpeHeader + "merges 1\n1 4294967296\n"),
			"merge 0 is \"1 4294967296\""},
		{"a later token", signed(bpeHeader + "merges 2\n1 2\n257 1\n"),
			"merge 1 joins tokens 257 and 1, want ids in [0, 257)"},
		{"a negative id", signed(bpeHeader + "merges 1\n1 -1\n"), "merge 0 joins tokens 1 and -1"},
		{"the same again", signed(bpeHeader + "merges 2\n1 2\n1 2\n"),
			"merge 1 joins tokens 1 and 2, as merge 0 does"},
		{"a long token", signed(long), "merge 7 makes a token of 256 bytes, want at most 128"},
	} {
		path := filepath.Join(t.TempDir(), "text.bpe")
		require.NoError(t, os.WriteFile(path, c.file, 0o666))
		_, err := LoadBPE(path)
		require.ErrorContains(t, err, c.want, c.name)
		require.ErrorContains(t, err, path, c.name)
	}
}

// TestHugeBPE reads large files that are designed to use a lot of memory.
func TestHugeBPE(t *testing.T) {
	for name, merges := range map[string]func(i int) pair{
		"pairs of bytes": func(i int) pair { return pair{int32(i / 256), int32(i % 256)} },
		"the same":       func(int) pair { return pair{97, 97} },
	} {
		for _, n := range []int{1000, 65536, maxVocab - 257} {
			b := BPE{merged: newPairTable(nil)}
			for i := range n {
				b.merges = append(b.merges, merges(i))
			}
			var lines strings.Builder
			b.writeLines(&lines)
			file := signed(lines.String())
			bounded.Run(t, int64(len(file)), func() {
				if _, err := parseBPE(file); name == "pairs of bytes" && n <= 65536 {
					require.NoError(t, err, n)
				}
			})
		}
	}

	file := append([]byte(bpeHeader), bytes.Repeat([]byte("\n"), maxBPEFile-200)...)
	bounded.Run(t, int64(len(file)), func() {
		_, err := parseBPE(file)
		require.Error(t, err, "lines of nothing are merges")
	})
}

// FuzzLoadBPE varies the contents between the header and the checksum. Every file is either rejected
// or a working encoding that keeps its name when saved again.
func FuzzLoadBPE(f *testing.F) {
	f.Add("merges 0\n", []byte("a"))
	f.Add("merges 2\n97 98\n256 99\n", []byte("abc abc"))
	f.Add("merges 1\n+1 02\n", []byte{1, 2})
	f.Add("merges 1\n256 1\n", []byte("x"))
	f.Fuzz(func(t *testing.T, lines string, text []byte) {
		file := signed(bpeHeader + lines)
		var b *BPE
		var err error
		bounded.Run(t, int64(len(file)), func() { b, err = parseBPE(file) })
		if err != nil {
			return
		}
		back, err := b.Decode(b.Encode(text))
		require.NoError(t, err)
		require.True(t, bytes.Equal(back, text), "%q came back as %q", text, back)
		var written strings.Builder
		b.writeLines(&written)
		again, err := parseBPE(signed(written.String()))
		require.NoError(t, err)
		require.Equal(t, b.Name(), again.Name())
	})
}

func TestLoadOrTrainBPE(t *testing.T) {
	text := sampled(texttest.Words(1, 3000))
	path := filepath.Join(t.TempDir(), "text.bpe")
	trained := 0
	load := func(vocab int) (*BPE, error) {
		return LoadOrTrainBPE(t.Context(), path, text, vocab, 1<<20, func(int, int) error {
			trained++
			return nil
		})
	}

	first, err := load(300)
	require.NoError(t, err)
	require.NotZero(t, trained)
	merges := trained
	again, err := load(50304)
	require.NoError(t, err)
	require.Equal(t, first.Name(), again.Name())
	require.Equal(t, merges, trained, "the file is not used")
	small := first.VocabSize() - 1
	_, err = load(small)
	require.ErrorContains(t, err, fmt.Sprintf("want at most %d: allow a larger vocabulary", small))
	require.NoError(t, os.WriteFile(path, []byte("notes"), 0o666))
	_, err = load(300)
	require.ErrorContains(t, err, "notes")
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "notes", string(got))
	trained = 0
	nowhere := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(nowhere+"-to-nothing", nowhere); err != nil {
		t.Skipf("without symbolic links there is no folder here that cannot be made: %v", err)
	}

	path = filepath.Join(nowhere, "text.bpe")
	_, err = load(300)
	require.ErrorContains(t, err, nowhere)
	require.Zero(t, trained, "merges before it is known that they cannot be saved")
}

func BenchmarkBPEEncode(b *testing.B) {
	text, heldOut := texttest.Go(b, 8<<20)
	bpe := mustTrainBPE(b, text, 50257)
	b.SetBytes(int64(len(heldOut)))
	var ids []int
	for b.Loop() {
		ids = bpe.Encode(heldOut)
	}
	b.ReportMetric(float64(len(heldOut))/float64(len(ids)), "bytes/token")
}

func BenchmarkTrainBPE(b *testing.B) {
	text, heldOut := texttest.Go(b, 50<<20)
	var bpe *BPE
	for b.Loop() {
		bpe = mustTrainBPE(b, text, 50257)
	}
	b.ReportMetric(float64(len(heldOut))/float64(len(bpe.Encode(heldOut))), "bytes/token")
}

// TestZeroBPE checks that the zero value and nil are the encoding without merges.
func TestZeroBPE(t *testing.T) {
	none := mustBPE(t)
	for _, b := range []*BPE{{}, nil} {
		require.Equal(t, 257, b.VocabSize())
		require.Equal(t, 256, b.EndOfDocument())
		require.Equal(t, none.Name(), b.Name())
		require.Equal(t, []int{'a', 0xff}, b.Encode([]byte("a\xff")))
		text, err := b.Decode([]int{'a', 256, 'b'})
		require.NoError(t, err)
		require.Equal(t, "ab", string(text))
		_, err = b.Decode([]int{257})
		require.ErrorContains(t, err, "ids[0] is 257")
		path := filepath.Join(t.TempDir(), "bpe")
		require.NoError(t, b.Save(path))
		loaded, err := LoadBPE(path)
		require.NoError(t, err)
		require.Equal(t, none.Name(), loaded.Name())
	}
}

func mustBPE(t *testing.T) *BPE {
	t.Helper()
	b, err := newBPE(nil)
	require.NoError(t, err)
	return b
}

// TestLoadBPEIrregularFiles gives LoadBPE paths that aren't regular files, and sparse files of 40 GB.
func TestLoadBPEIrregularFiles(t *testing.T) {
	paths := append(texttest.NoFiles(t), texttest.Hole(t, nil), texttest.Hole(t, []byte(bpeHeader)))
	for _, path := range paths {
		bounded.Run(t, 0, func() {
			_, err := LoadBPE(path)
			require.ErrorContains(t, err, path)
		})
	}
}

// TestTrainingStops checks that an error from a progress function stops the training, and that no
// file remains.
func TestTrainingStops(t *testing.T) {
	stop, calls, dir := errors.New("stop"), 0, t.TempDir()
	_, err := LoadOrTrainBPE(t.Context(), filepath.Join(dir, "bpe"),
		sampled(texttest.Words(1, 3000)), 300,
		1<<20, func(int, int) error { calls++; return stop })
	require.ErrorIs(t, err, stop)
	require.Equal(t, 1, calls)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
}

// sampled is a Text that returns its beginning as the sample.
type sampled []byte

func (s sampled) Sample(limit int) ([]byte, error) { return s[:min(limit, len(s))], nil }

// TestContextEndsTraining checks that training returns the context's cause if the context is
// canceled, before the training or between two merges.
func TestContextEndsTraining(t *testing.T) {
	text := texttest.Words(1, 3000)
	cause := errors.New("stopped by hand")
	for _, after := range []int{0, 1, 5} {
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		if after == 0 {
			cancel(cause)
		}
		done := 0
		_, err := TrainBPE(ctx, bytes.NewReader(text), 1000, func(merges, _ int) error {
			if done = merges; merges == after {
				cancel(cause)
			}
			return nil
		})
		require.ErrorIs(t, err, cause)
		require.Equal(t, after, done)
	}

	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	path := filepath.Join(t.TempDir(), "bpe")
	_, err := LoadOrTrainBPE(ctx, path, sampled(text), 300, 1<<20, nil)
	require.ErrorIs(t, err, cause)
	require.NoFileExists(t, path)
}
