package data

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// upTo returns the tokens 0, 1, 2, ..., each equal to its position in the text.
func upTo(n int) *memoryTokens {
	t := &memoryTokens{fingerprint: fmt.Sprint("up to ", n)}
	for i := range n {
		t.ids = append(t.ids, uint32(i))
	}
	return t
}

func loaderOf(t testing.TB, tokens Tokens, c LoaderConfig) *Loader {
	t.Helper()
	l, err := NewLoader(tokens, c)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func mustNext(t testing.TB, l *Loader) Batch {
	t.Helper()
	b, err := l.Next()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestPermuteIsABijection(t *testing.T) {
	key := randtest.New(t).Uint64()
	for n := uint64(1); n < 1200; n = n*9/8 + 1 {
		seen := make([]bool, n)
		for i := range n {
			p := permute(i, n, key)
			if p >= n || seen[p] {
				t.Fatalf("n = %d: the image %d of %d is too large or there twice", n, p, i)
			}
			seen[p] = true
		}
	}
}

// TestPermuteIsUniform checks that over many keys every position is mapped to all positions equally
// often. It applies Pearson's chi-square test to 99 degrees of freedom. A uniform permutation exceeds 175
// with a probability of 4e-6, and a position that exceeds it is tested again.
func TestPermuteIsUniform(t *testing.T) {
	r := randtest.New(t)
	const n, trials = 100, 20000
	chi2 := func(i uint64) (sum float64) {
		var hits [n]float64
		for range trials {
			hits[permute(i, n, r.Uint64())]++
		}
		for _, h := range hits {
			sum += (h - trials/n) * (h - trials/n) / (trials / n)
		}
		return sum
	}

	for _, i := range []uint64{0, 1, n / 2, n - 1} {
		if first := chi2(i); first > 175 {
			if second := chi2(i); second > 175 {
				t.Errorf("images of %d: chi-square is %.0f and, again, %.0f, want about 99", i,
					first, second)
			}
		}
	}
}

// TestLoaderCoversTheTextOnce checks that each window of an epoch is returned once, that windows don't
// overlap, and that targets are the following tokens.
func TestLoaderCoversTheTextOnce(t *testing.T) {
	r := randtest.New(t)
	for range 30 {
		seq, n := 1+r.IntN(20), 0
		n = seq + 1 + r.IntN(500)
		l := loaderOf(t, upTo(n), LoaderConfig{Batch: 1, Seq: seq, Seed: r.Uint64()})
		for epoch := range int64(3) {
			covered := make([]bool, n)
			windows, shift := l.state.windows(int64(n))
			if l.state.Epoch < epoch { // the first window of the new epoch changes the state
				next := l.state
				next.Epoch, next.Next = epoch, 0
				windows, shift = next.windows(int64(n))
			}

			for range windows {
				b := mustNext(t, l)
				for i, id := range b.Inputs {
					if covered[id] || b.Targets[i] != id+1 || id != b.Inputs[0]+i {
						t.Fatalf("seq %d of %d tokens: inputs %v, targets %v", seq, n, b.Inputs,
							b.Targets)
					}
					covered[id] = true
				}
			}

			if got := l.State(); got.Epoch != epoch || got.Next != windows {
				t.Fatalf("after epoch %d: state %+v, want its last window, %d", epoch, got, windows)
			}

			missed := 0
			for _, c := range covered {
				if !c {
					missed++
				}
			}

			if missed > 2*seq || shift >= int64(seq) {
				t.Fatalf("seq %d of %d tokens: epoch %d leaves out %d tokens and begins at %d", seq,
					n, epoch, missed, shift)
			}
		}
	}
}

// TestLoaderMovesItsWindows checks that the boundaries of the windows move, so that no token always
// starts a sequence.
func TestLoaderMovesItsWindows(t *testing.T) {
	s := LoaderState{Seed: randtest.New(t).Uint64(), Seq: 50}
	seen := map[int64]int{}
	for s.Epoch < 20 {
		offset := s.advance(1000)
		if s.Next == 1 {
			seen[offset%50]++
		}
	}

	if len(seen) < 8 {
		t.Errorf("20 epochs have windows at %v, by offset in 50 tokens", seen)
	}
}

func TestLoaderOrder(t *testing.T) {
	first := func(seed uint64, skip int) []int {
		l := loaderOf(t, upTo(1001), LoaderConfig{Batch: 20, Seq: 5, Seed: seed})
		for range skip {
			mustNext(t, l)
		}
		return slices.Clone(mustNext(t, l).Inputs)
	}

	if !slices.Equal(first(1, 3), first(1, 3)) {
		t.Error("the same seed deals out different batches")
	}

	if slices.Equal(first(1, 0), first(2, 0)) {
		t.Error("two seeds deal out the same batch")
	}

	if slices.Equal(first(1, 0), first(1, 10)) {
		t.Error("the second epoch begins like the first")
	}

	if got := first(1, 0); slices.IsSorted(got) {
		t.Errorf("windows are not shuffled: %v", got)
	}
}

// TestLoaderResumes checks that a loader set to a saved state continues like the saved loader, in the
// middle or at the end of an epoch, and whether or not it is reading ahead.
func TestLoaderResumes(t *testing.T) {
	r := randtest.New(t)
	for range 30 {
		tokens := upTo(30 + r.IntN(300))
		c := LoaderConfig{Batch: 1 + r.IntN(5), Seq: 1 + r.IntN(20), Seed: r.Uint64()}
		l := loaderOf(t, tokens, c)
		for range r.IntN(100) {
			mustNext(t, l)
		}
		saved, err := json.Marshal(l.State())
		if err != nil {
			t.Fatal(err)
		}

		var state LoaderState
		if err := json.Unmarshal(saved, &state); err != nil {
			t.Fatal(err)
		}

		c.Seed++ // the seed comes from the state
		resumed := loaderOf(t, tokens, c)
		for range r.IntN(3) {
			mustNext(t, resumed)
		}
		if err := resumed.SetState(state); err != nil {
			t.Fatal(err)
		}

		for i := range 20 {
			if want, got := mustNext(t, l), mustNext(t, resumed); !reflect.DeepEqual(got, want) {
				t.Fatalf("%+v: batch %d after %s is %v, want %v", c, i, saved, got, want)
			}
			if l.State() != resumed.State() {
				t.Fatalf("states %+v and %+v", l.State(), resumed.State())
			}
		}
	}
}

func TestLoaderKeepsTheBatchInUse(t *testing.T) {
	l := loaderOf(t, upTo(1000), LoaderConfig{Batch: 3, Seq: 7})
	for range 20 {
		b := mustNext(t, l)
		before := slices.Clone(b.Inputs)
		<-l.ahead // the next batch has been read
		if !slices.Equal(b.Inputs, before) {
			t.Fatal("reading ahead overwrites the batch in use")
		}
		l.ahead = nil
	}
}

func TestLoaderRefusesStates(t *testing.T) {
	l := loaderOf(t, upTo(100), LoaderConfig{Batch: 2, Seq: 9, Seed: 3})
	mustNext(t, l)
	before := l.State()
	for name, c := range map[string]struct {
		change func(*LoaderState)
		want   string
	}{
		"data": {func(s *LoaderState) { s.Data = "other" }, `"other"`},
		"seq": {func(s *LoaderState) {
			s.Seq = 8
		}, "sequences of 8 tokens, the loader 9"},
		"epoch": {func(s *LoaderState) { s.Epoch = -1 }, "epoch -1"},
		"overflow": {func(s *LoaderState) {
			s.Epoch = math.MaxInt64
		}, "epoch 9223372036854775807, want"},
		"negative": {func(s *LoaderState) { s.Next = -1 }, "window -1"},
		"beyond":   {func(s *LoaderState) { s.Next = 1 << 40 }, "window 1099511627776"},
		"zero":     {func(s *LoaderState) { *s = LoaderState{} }, "fingerprint"},
	} {
		s := before
		c.change(&s)
		err := l.SetState(s)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error with %q", name, err, c.want)
		}
		if name == "data" && !errors.Is(err, ErrChanged) {
			t.Errorf("%s: %v, want an ErrChanged", name, err)
		}
		if l.State() != before {
			t.Fatalf("%s: a refused state changes the loader to %+v", name, l.State())
		}
	}
}

func TestNewLoaderErrors(t *testing.T) {
	for _, c := range []struct {
		tokens int
		config LoaderConfig
		want   string
	}{
		{10, LoaderConfig{Batch: 0, Seq: 5}, "0 sequences of 5"},
		{10, LoaderConfig{Batch: 5, Seq: -1}, "5 sequences of -1"},
		{10, LoaderConfig{Batch: math.MaxInt, Seq: 2},
			"sequences of 2 tokens, want 1 to 16777216 of each"},
		{10, LoaderConfig{Batch: 1, Seq: 10}, "the text has 10 tokens, and one sequence of 10 " +
			"with its last target needs 11: use more text or shorter sequences"},
		{0, LoaderConfig{Batch: 1, Seq: 1}, "the text has 0 tokens"},
		{10, LoaderConfig{Batch: 1 << 24, Seq: 8}, "want at most 67108864 tokens"},
	} {
		if _, err := NewLoader(upTo(c.tokens), c.config); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%d tokens, %+v: %v, want an error with %q", c.tokens, c.config, err, c.want)
		}
	}
}

// TestLoaderReportsAVanishedFile checks that an error while reading doesn't move the loader: once the
// file is back, it returns the same batch.
func TestLoaderReportsAVanishedFile(t *testing.T) {
	dir := texttest.Files(t, map[string]string{"a.txt": strings.Repeat("0123456789", 100)})
	tokens, err := Tokenize(t.Context(), mustOpen(t, dir).Train, tokenizer.Bytes{})
	if err != nil {
		t.Fatal(err)
	}

	c := LoaderConfig{Batch: 2, Seq: 50}
	want := slices.Clone(mustNext(t, loaderOf(t, tokens, c)).Inputs)
	l := loaderOf(t, tokens, c)
	path := filepath.Join(dir, "a.txt")
	if err := os.Rename(path, path+".away"); err != nil {
		t.Fatal(err)
	}

	for range 2 {
		if _, err := l.Next(); !errors.Is(err, ErrChanged) || !strings.Contains(err.Error(),
			`a.txt" has vanished`) {
			t.Fatalf("without the file: %v, want an ErrChanged that names it", err)
		}
	}

	if err := os.Rename(path+".away", path); err != nil {
		t.Fatal(err)
	}

	if got := mustNext(t, l).Inputs; !slices.Equal(got, want) {
		t.Errorf("after the error: %v, want %v", got, want)
	}
}

// pairs encodes two bytes as one token, and a single byte at the end of a text of odd length as
// another.
type pairs struct{ vocab int }

func (pairs) Name() string { return "pairs" }

func (p pairs) VocabSize() int { return p.vocab }

func (pairs) Encode(text []byte) (ids []int) {
	for ; len(text) >= 2; text = text[2:] {
		ids = append(ids, 256+int(text[0])<<8+int(text[1]))
	}
	for _, b := range text {
		ids = append(ids, int(b))
	}
	return ids
}

func (pairs) Decode(ids []int) (text []byte, err error) {
	for _, id := range ids {
		if id >= 256 {
			text = append(text, byte((id-256)>>8))
		}
		text = append(text, byte(id))
	}
	return text, nil
}

func TestTokenizeWithLongerTokens(t *testing.T) {
	content := strings.ReplaceAll(string(texttest.Bytes(randtest.New(t), 3<<20)), "\x00", "0")
	text := mustOpen(t, texttest.Files(t, map[string]string{"a": content})).Train
	tok := pairs{256 + 1<<16}
	tokens, err := Tokenize(t.Context(), text, tok)
	if err != nil {
		t.Fatal(err)
	}

	ids := make([]int, tokens.Len())
	if err := tokens.ReadTokens(ids, 0); err != nil {
		t.Fatal(err)
	}

	if got, _ := tok.Decode(ids); string(got) != content[:text.Size()] {
		t.Error("the tokens do not decode to the text")
	}

	if got := tokens.Len(); got < text.Size()/2 || got > text.Size()/2+4 {
		t.Errorf("%d tokens for %d bytes, want half and at most one more for each piece", got,
			text.Size())
	}

	if err := tokens.ReadTokens(make([]int, 2), tokens.Len()-1); err == nil {
		t.Error("reading beyond the last token is accepted")
	}

	if tokens.Tokenizer() != tok.Name() || tokens.VocabSize() != tok.VocabSize() {
		t.Errorf("tokenizer %q of %d tokens, want %q of %d", tokens.Tokenizer(), tokens.VocabSize(),
			tok.Name(), tok.VocabSize())
	}

	if tokens.Fingerprint() == printOf(t, text) {
		t.Error("the fingerprint does not distinguish tokenizers")
	}

	_, err = Tokenize(t.Context(), text, pairs{300})
	if err == nil || !strings.Contains(err.Error(), "outside its vocabulary [0, 300)") {
		t.Errorf("ids outside the vocabulary give %v", err)
	}
}

// FuzzLoaderState gives a loader arbitrary states. Either SetState rejects the state and changes
// nothing, or the following batches consist of the text's tokens and the state after them is valid.
func FuzzLoaderState(f *testing.F) {
	l := loaderOf(f, upTo(100), LoaderConfig{Batch: 2, Seq: 9, Seed: 3})
	whole, err := json.Marshal(l.State())
	require.NoError(f, err)
	f.Add(whole)
	f.Add([]byte(`{"seed":1,"epoch":9223372036854775807,"next":0,"seq":9,"data":"up to 100"}`))
	f.Add([]byte(`{"seed":1,"epoch":4611686018427387904,"next":10,"seq":9,"data":"up to 100"}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var s LoaderState
		if json.Unmarshal(text, &s) != nil {
			return
		}

		before := l.State()
		if err := l.SetState(s); err != nil {
			require.Equal(t, before, l.State())
			return
		}

		for range 6 {
			b, err := l.Next()
			require.NoError(t, err)
			for i, id := range b.Inputs {
				require.True(t, id >= 0 && id < 99 && b.Targets[i] == id+1)
			}
		}

		if l.State().Epoch <= maxEpoch { // far beyond any real run
			require.NoError(t, l.SetState(l.State()))
		}
	})
}

// TestLoaderKnowsDocuments checks that documents start at the starts of files if tokens are bytes, and
// otherwise at the token that ends a document.
func TestLoaderKnowsDocuments(t *testing.T) {
	text := mustOpen(t, texttest.Files(t, texttest.Numbered(30)), WithHeldOut(1e-9)).Train
	raw, err := Tokenize(t.Context(), text, tokenizer.Bytes{})
	if err != nil {
		t.Fatal(err)
	}

	bpe := tokenBPE(t)
	file := mustCache(t, filepath.Join(t.TempDir(), "tokens"), text, bpe)
	var ends []int64 // positions of the tokens that end documents
	for i, id := range allTokens(t, file) {
		if id == bpe.EndOfDocument() {
			ends = append(ends, int64(i))
		}
	}

	if len(ends) != text.Documents() {
		t.Fatalf("%d documents in the file, want %d", len(ends), text.Documents())
	}

	r := randtest.New(t)
	for _, c := range []struct {
		name   string
		tokens Tokens
		ends   []int64
	}{{"bytes", raw, text.ends}, {"file", file, ends}} {
		for range 20 {
			seq := 1 + r.IntN(min(200, int(c.tokens.Len())-1))
			l := loaderOf(t, c.tokens, LoaderConfig{Batch: 1, Seq: seq, Seed: r.Uint64()})
			for range 20 {
				s := l.State()
				offset := s.advance(c.tokens.Len())
				for i, start := range mustNext(t, l).Starts {
					want := int64(0)
					for _, end := range c.ends {
						if end <= offset+int64(i) {
							want = max(0, end-offset)
						}
					}
					if int64(start) != want {
						t.Fatalf("%s: the document of token %d of the window of %d at %d starts "+
							"at %d, want %d", c.name, i, seq, offset, start, want)
					}
				}
			}
		}
	}

	kept := mustCache(t, filepath.Join(t.TempDir(), "tokens"), text, tokenizer.Bytes{})
	for _, tokens := range []Tokens{upTo(20), kept} {
		if b := mustNext(t, loaderOf(t, tokens, LoaderConfig{Batch: 1, Seq: 9})); b.Starts != nil {
			t.Errorf("tokens that know of no documents: starts %v", b.Starts)
		}
	}
}

// TestContextEndsTokenize checks that Tokenize returns the cause of its context, even in the middle of
// the text.
func TestContextEndsTokenize(t *testing.T) {
	path := filepath.Join(t.TempDir(), "text")
	require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte("some words\n"), 1<<19), 0o666))
	text := mustOpen(t, path).Train
	_, err := text.Fingerprint(t.Context(), nil)
	require.NoError(t, err)
	cause := errors.New("stopped by hand")
	ctx, cancel := context.WithCancelCause(t.Context())
	calls := 0
	tok := counting{func() {
		if calls++; calls == 2 {
			cancel(cause)
		}
	}}
	_, err = Tokenize(ctx, text, tok)
	require.ErrorIs(t, err, cause)
	require.Equal(t, 2, calls)
}

// counting is a tokenizer that calls encoding for each call of Encode.
type counting struct{ encoding func() }

func (counting) Name() string                 { return "counting" }
func (counting) VocabSize() int               { return 300 }
func (counting) Decode([]int) ([]byte, error) { return nil, nil }
func (c counting) Encode([]byte) []int        { c.encoding(); return []int{1} }

// panicking is a Tokens that panics when read.
type panicking struct{ Tokens }

func (panicking) ReadTokens([]int, int64) error { panic("tokens") }

// TestPanickingTokens checks that a panic in a user's Tokens is returned as an error, although it occurs
// on another goroutine.
func TestPanickingTokens(t *testing.T) {
	path := filepath.Join(t.TempDir(), "text")
	require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte("words "), 100), 0o666))
	tokens, err := Tokenize(t.Context(), mustOpen(t, path).Train, tokenizer.Bytes{})
	require.NoError(t, err)
	l, err := NewLoader(panicking{tokens}, LoaderConfig{Batch: 2, Seq: 8})
	require.NoError(t, err)
	_, err = l.Next()
	require.ErrorIs(t, err, errTokens)
}
