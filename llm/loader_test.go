package llm

import (
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
)

// upTo returns the tokens 0, 1, 2, ..., which tell where in the text they stand.
func upTo(n int) *memoryTokens {
	t := &memoryTokens{fingerprint: fmt.Sprint("up to ", n)}
	for i := range n {
		t.ids = append(t.ids, uint32(i))
	}
	return t
}

func mustLoader(t testing.TB, tokens Tokens, c LoaderConfig) *Loader {
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
	key := newRand(t).Uint64()
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

// Over many keys every place goes everywhere equally often: Pearson's chi-square with 99 cells around 99, which a uniform
// permutation exceeds 175 by with a probability of 4e-6. A place that does is tried again.
func TestPermuteIsUniform(t *testing.T) {
	r := newRand(t)
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
				t.Errorf("images of %d: chi-square is %.0f and, again, %.0f, want about 99", i, first, second)
			}
		}
	}
}

// Each window of an epoch comes once, windows do not overlap, and targets are the tokens that follow.
func TestLoaderCoversTheTextOnce(t *testing.T) {
	r := newRand(t)
	for range 30 {
		seq, n := 1+r.IntN(20), 0
		n = seq + 1 + r.IntN(500)
		l := mustLoader(t, upTo(n), LoaderConfig{Batch: 1, Seq: seq, Seed: r.Uint64()})
		for epoch := range int64(3) {
			covered := make([]bool, n)
			windows, shift := l.state.windows(int64(n))
			if l.state.Epoch < epoch { // the state moves on with the first window of the new epoch
				next := l.state
				next.Epoch, next.Next = epoch, 0
				windows, shift = next.windows(int64(n))
			}
			for range windows {
				b := mustNext(t, l)
				for i, id := range b.Inputs {
					if covered[id] || b.Targets[i] != id+1 || id != b.Inputs[0]+i {
						t.Fatalf("seq %d of %d tokens: inputs %v, targets %v", seq, n, b.Inputs, b.Targets)
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
				t.Fatalf("seq %d of %d tokens: epoch %d leaves out %d tokens and begins at %d", seq, n, epoch, missed, shift)
			}
		}
	}
}

// The boundaries of the windows must move, so that no token is always the first of its sequence.
func TestLoaderMovesItsWindows(t *testing.T) {
	s := LoaderState{Seed: newRand(t).Uint64(), Seq: 50}
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
		l := mustLoader(t, upTo(1001), LoaderConfig{Batch: 20, Seq: 5, Seed: seed})
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

// A loader that is set to a saved state continues as the one that was saved, in the middle of an epoch or at its end, while
// reading ahead or not.
func TestLoaderResumes(t *testing.T) {
	r := newRand(t)
	for range 30 {
		tokens := upTo(30 + r.IntN(300))
		c := LoaderConfig{Batch: 1 + r.IntN(5), Seq: 1 + r.IntN(20), Seed: r.Uint64()}
		l := mustLoader(t, tokens, c)
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
		c.Seed++ // the state's seed counts
		resumed := mustLoader(t, tokens, c)
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
	l := mustLoader(t, upTo(1000), LoaderConfig{Batch: 3, Seq: 7})
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
	l := mustLoader(t, upTo(100), LoaderConfig{Batch: 2, Seq: 9, Seed: 3})
	mustNext(t, l)
	before := l.State()
	for name, c := range map[string]struct {
		change func(*LoaderState)
		want   string
	}{
		"data":     {func(s *LoaderState) { s.Data = "other" }, `"other"`},
		"seq":      {func(s *LoaderState) { s.Seq = 8 }, "sequences of 8 tokens, the loader's have 9"},
		"epoch":    {func(s *LoaderState) { s.Epoch = -1 }, "epoch -1"},
		"overflow": {func(s *LoaderState) { s.Epoch = math.MaxInt64 }, "epoch 9223372036854775807, want"},
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
		if name == "data" && !errors.Is(err, ErrDataChanged) {
			t.Errorf("%s: %v, want an ErrDataChanged", name, err)
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
		{10, LoaderConfig{Batch: math.MaxInt, Seq: 2}, "sequences of 2 tokens, want 1 to 16777216 of each"},
		{10, LoaderConfig{Batch: 1, Seq: 10}, "the text has 10 tokens, and one sequence of 10 with its last target needs 11: it takes more text, or shorter sequences"},
		{0, LoaderConfig{Batch: 1, Seq: 1}, "the text has 0 tokens"},
		{10, LoaderConfig{Batch: 1 << 24, Seq: 8}, "want at most 67108864 tokens"},
	} {
		if _, err := NewLoader(upTo(c.tokens), c.config); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%d tokens, %+v: %v, want an error with %q", c.tokens, c.config, err, c.want)
		}
	}
}

// An error while reading leaves the loader where it is: once the file is back, the same batch is dealt out.
func TestLoaderReportsAVanishedFile(t *testing.T) {
	dir := writeFiles(t, map[string]string{"a.txt": strings.Repeat("0123456789", 100)})
	tokens, err := Tokenize(mustOpen(t, dir).Train, ByteTokenizer{})
	if err != nil {
		t.Fatal(err)
	}
	c := LoaderConfig{Batch: 2, Seq: 50}
	want := slices.Clone(mustNext(t, mustLoader(t, tokens, c)).Inputs)
	l := mustLoader(t, tokens, c)
	path := filepath.Join(dir, "a.txt")
	if err := os.Rename(path, path+".away"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := l.Next(); !errors.Is(err, ErrDataChanged) || !strings.Contains(err.Error(), "a.txt has vanished") {
			t.Fatalf("without the file: %v, want an ErrDataChanged that names it", err)
		}
	}
	if err := os.Rename(path+".away", path); err != nil {
		t.Fatal(err)
	}
	if got := mustNext(t, l).Inputs; !slices.Equal(got, want) {
		t.Errorf("after the error: %v, want %v", got, want)
	}
}

// pairs makes one token of two bytes and, at the end, one of a single byte.
type pairs struct{ vocab int }

func (pairs) Name() string     { return "pairs" }
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
	content := strings.ReplaceAll(string(randomBytes(newRand(t), 3<<20)), "\x00", "0")
	text := mustOpen(t, writeFiles(t, map[string]string{"a": content})).Train
	tok := pairs{256 + 1<<16}
	tokens, err := Tokenize(text, tok)
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
		t.Errorf("%d tokens for %d bytes, want half and at most one more for each piece", got, text.Size())
	}
	if err := tokens.ReadTokens(make([]int, 2), tokens.Len()-1); err == nil {
		t.Error("reading beyond the last token is accepted")
	}
	if tokens.Tokenizer() != tok.Name() || tokens.VocabSize() != tok.VocabSize() {
		t.Errorf("tokenizer %q of %d tokens, want %q of %d", tokens.Tokenizer(), tokens.VocabSize(), tok.Name(), tok.VocabSize())
	}
	if tokens.Fingerprint() == printOf(t, text) {
		t.Error("the fingerprint does not tell tokenizers apart")
	}
	_, err = Tokenize(text, pairs{300})
	if err == nil || !strings.Contains(err.Error(), "outside its vocabulary [0, 300)") {
		t.Errorf("ids outside the vocabulary give %v", err)
	}
}

func TestEvaluation(t *testing.T) {
	text := randomBytes(newRand(t), 101)
	for _, c := range []struct {
		tok           Tokenizer
		tokens, bytes int
	}{{ByteTokenizer{}, 100, 100}, {pairs{1 << 17}, 50, 99}} {
		for _, size := range []struct{ batch, seq int }{{2, 10}, {3, 7}, {1, 1}, {20, 30}} {
			e, err := NewEvaluation(text, c.tok, size.batch, size.seq)
			if err != nil {
				t.Fatal(err)
			}
			for range 2 {
				ids := c.tok.Encode(text)
				count := 0
				for b := range e.Batches() {
					if len(b.Inputs) != size.batch*size.seq || len(b.Targets) != len(b.Inputs) || b.Count == 0 {
						t.Fatalf("%+v: batch %+v", size, b)
					}
					for i, target := range b.Targets {
						switch {
						case i >= b.Count && (target != -1 || b.Inputs[i] != 0):
							t.Fatalf("%+v: row %d of %d is %d → %d, want padding", size, i, b.Count, b.Inputs[i], target)
						case i < b.Count && (b.Inputs[i] != ids[count+i] || target != ids[count+i+1]):
							t.Fatalf("%+v: row %d is %d → %d", size, i, b.Inputs[i], target)
						}
					}
					count += b.Count
				}
				if count != c.tokens || e.Tokens() != c.tokens || e.Bytes() != c.bytes {
					t.Fatalf("%s: %d targets, Tokens %d, Bytes %d, want %d, %d bytes", c.tok.Name(), count, e.Tokens(), e.Bytes(),
						c.tokens, c.bytes)
				}
			}
			// A model that gives each byte a probability of 1/8 has 3 bits per byte, however the bytes form tokens.
			sum := 3 * math.Ln2 * float64(c.bytes)
			if loss, bpb := e.Score(sum); math.Abs(bpb-3) > 1e-12 || math.Abs(loss-sum/float64(c.tokens)) > 1e-12 {
				t.Errorf("%s: Score(%v) = %v, %v", c.tok.Name(), sum, loss, bpb)
			}
		}
	}
	for _, c := range []struct {
		text       string
		batch, seq int
	}{{"", 1, 1}, {"x", 1, 1}, {"text", 0, 1}, {"text", 1, 0}, {"text", math.MaxInt, 4}, {"text", 2, math.MaxInt}} {
		if _, err := NewEvaluation([]byte(c.text), ByteTokenizer{}, c.batch, c.seq); err == nil {
			t.Errorf("%+v is accepted", c)
		}
	}
}
