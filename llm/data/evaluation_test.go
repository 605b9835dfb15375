package data

import (
	"math"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

func TestEvaluation(t *testing.T) {
	text := texttest.Bytes(randtest.New(t), 101)
	for _, c := range []struct {
		tok           tokenizer.Tokenizer
		tokens, bytes int
	}{{tokenizer.Bytes{}, 100, 100}, {pairs{1 << 17}, 50, 99}} {
		for _, size := range []struct{ batch, seq int }{{2, 10}, {3, 7}, {1, 1}, {20, 30}} {
			e, err := NewEvaluation(text, c.tok, size.batch, size.seq)
			if err != nil {
				t.Fatal(err)
			}

			for range 2 {
				ids := c.tok.Encode(text)
				count := 0
				for b := range e.Batches() {
					if len(b.Inputs) != size.batch*size.seq || len(b.Targets) != len(b.Inputs) ||
						b.Count == 0 {
						t.Fatalf("%+v: batch %+v", size, b)
					}

					for i, target := range b.Targets {
						switch {
						case i >= b.Count && (target != -1 || b.Inputs[i] != 0):
							t.Fatalf("%+v: row %d of %d is %d → %d, want padding", size, i, b.Count,
								b.Inputs[i], target)
						case i < b.Count && (b.Inputs[i] != ids[count+i] ||
							target != ids[count+i+1]):
							t.Fatalf("%+v: row %d is %d → %d", size, i, b.Inputs[i], target)
						}
					}
					count += b.Count
				}

				if count != c.tokens || e.Tokens() != c.tokens || e.Bytes() != c.bytes {
					t.Fatalf("%s: %d targets, Tokens %d, Bytes %d, want %d, %d bytes", c.tok.Name(),
						count, e.Tokens(), e.Bytes(), c.tokens, c.bytes)
				}
			}

			// A model that assigns each byte a probability of 1/8 has 3 bits per byte, regardless of how
			// bytes form tokens.
			sum := 3 * math.Ln2 * float64(c.bytes)
			if loss, bpb := e.Score(sum); math.Abs(bpb-3) > 1e-12 ||
				math.Abs(loss-sum/float64(c.tokens)) > 1e-12 {
				t.Errorf("%s: Score(%v) = %v, %v", c.tok.Name(), sum, loss, bpb)
			}
		}
	}

	for _, c := range []struct {
		text       string
		batch, seq int
	}{{"", 1, 1}, {"x", 1, 1}, {"text", 0, 1}, {"text", 1, 0}, {"text", math.MaxInt, 4}, {"text", 2,
		math.MaxInt}} {
		if _, err := NewEvaluation([]byte(c.text), tokenizer.Bytes{}, c.batch, c.seq); err == nil {
			t.Errorf("%+v is accepted", c)
		}
	}
}

// TestDocumentEvaluation checks that the start of each token's document is known, and that all text is
// scored.
func TestDocumentEvaluation(t *testing.T) {
	r := randtest.New(t)
	bpe := tokenBPE(t)
	for range 20 {
		var documents [][]byte
		for range 1 + r.IntN(6) {
			// at least two tokens
			documents = append(documents, append(texttest.Repetitive(r, 5+r.IntN(40)), "\n1"...))
		}

		batch, seq := 1+r.IntN(3), 1+r.IntN(12)
		for _, tok := range []tokenizer.Tokenizer{tokenizer.Bytes{}, bpe} {
			e, err := NewDocumentEvaluation(documents, tok, batch, seq)
			if err != nil {
				t.Fatal(err)
			}

			var ids, begins []int
			for i, d := range documents {
				begin := len(ids)
				if tok == tokenizer.Tokenizer(bpe) && i > 0 {
					begin--
					begins[begin] = begin
				}
				ids = append(ids, tok.Encode(d)...)
				if tok == tokenizer.Tokenizer(bpe) {
					ids = append(ids, bpe.EndOfDocument())
				}
				for range len(ids) - len(begins) {
					begins = append(begins, begin)
				}
			}

			count := 0
			for b := range e.Batches() {
				for i, start := range b.Starts {
					at := count + i
					if start < 0 || start > i%seq || i%seq > 0 && start < b.Starts[i-1] {
						t.Fatalf("%s: starts %v in sequences of %d", tok.Name(), b.Starts, seq)
					}
					if i < b.Count && (b.Inputs[i] != ids[at] || b.Targets[i] != ids[at+1] ||
						start != max(0, begins[at]-(at-i%seq))) {
						t.Fatalf("%s: token %d is %d → %d, from %d", tok.Name(), at, b.Inputs[i],
							b.Targets[i], start)
					}
				}
				count += b.Count
			}

			if text, err := tok.Decode(ids[1:]); err != nil || count != len(ids)-1 ||
				count != e.Tokens() || e.Bytes() != len(text) {
				t.Errorf("%s: %d targets, Tokens %d, Bytes %d, want %d and %d, %v", tok.Name(),
					count, e.Tokens(), e.Bytes(), len(ids)-1, len(text), err)
			}
		}
	}

	// One token and the end of its document.
	if _, err := NewDocumentEvaluation([][]byte{{'x'}}, bpe, 1, 1); err == nil ||
		!strings.Contains(err.Error(), "no text left to predict") {
		t.Errorf("a text with nothing to predict: the error is %v", err)
	}

	for _, documents := range [][][]byte{nil, {[]byte("x")}, {{}, {}}} {
		if _, err := NewDocumentEvaluation(documents, tokenizer.Bytes{}, 1, 1); err == nil ||
			!strings.Contains(err.Error(), "NewDocumentEvaluation") {
			t.Errorf("%q: the error is %v", documents, err)
		}
	}
}
