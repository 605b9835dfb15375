package baseline

import (
	"bytes"
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/splitmix"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/data"
)

func mustTrain(t testing.TB, text []byte) *Order2 {
	t.Helper()
	m, err := TrainOrder2(t.Context(), bytes.NewReader(text), nil)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// naive returns P(b | context) by Witten and Bell's formula, straight from the trigrams.
func naive(trigrams []string, context string, b byte) float64 {
	lower := 1.0 / 256
	if len(context) > 0 {
		lower = naive(trigrams, context[1:], b)
	}

	count, total, seen := 0.0, 0.0, make(map[byte]bool)
	for _, t := range trigrams {
		if t[2-len(context):2] == context {
			total++
			seen[t[2]] = true
			if t[2] == b {
				count++
			}
		}
	}

	if total == 0 {
		return lower
	}

	return (count + float64(len(seen))*lower) / (total + float64(len(seen)))
}

func TestOrder2MatchesTheFormula(t *testing.T) {
	r := randtest.New(t)
	for range 6 {
		text := make([]byte, 3+r.IntN(200))
		letters := 1 + r.IntN(6)
		for i := range text {
			text[i] = "\x00az\xff~e"[r.IntN(letters)]
		}
		var trigrams []string
		for i := 2; i < len(text); i++ {
			trigrams = append(trigrams, string(text[i-2:i+1]))
		}
		m := mustTrain(t, text)
		for range 60 {
			c := []byte{"\x00az\xff~e!"[r.IntN(7)], "\x00az\xff~e!"[r.IntN(7)]}
			sum := 0.0
			for b := range 256 {
				got := m.probability(c[0], c[1], byte(b))
				sum += got
				if want := naive(trigrams, string(c), byte(b)); math.Abs(got-want) > 1e-12 {
					t.Fatalf("P(%q | %q) after %q = %v, want %v", byte(b), c, text, got, want)
				}
			}
			if math.Abs(sum-1) > 1e-9 {
				t.Fatalf("the probabilities after %q add up to %v", c, sum)
			}
		}
	}
}

// TestOrder2FindsTheEntropyOfItsSource uses a source with an entropy of at most 2 bits: the two preceding
// bytes determine four equally likely next bytes. The model must reach the entropy, whereas an order-1
// model (3.9 bits here) does not.
func TestOrder2FindsTheEntropyOfItsSource(t *testing.T) {
	r := randtest.New(t)
	text := []byte{0, 0}
	for len(text) < 400_000 {
		n := len(text)
		text = append(text,
			byte(splitmix.Mix(uint64(text[n-2])<<16|uint64(text[n-1])<<8|uint64(r.IntN(4)))%16))
	}

	m := mustTrain(t, text[:300_000])

	// Two of the four bytes may be equal, so compute the source's actual code length for the held-out
	// part.
	entropy := 0.0
	for i := 300_001; i < len(text); i++ {
		same := 0
		for k := range uint64(4) {
			if byte(splitmix.Mix(uint64(text[i-2])<<16|uint64(text[i-1])<<8|k)%16) == text[i] {
				same++
			}
		}
		entropy -= math.Log2(float64(same) / 4)
	}

	entropy /= 100_000 - 1
	bpb, err := m.BitsPerByte(t.Context(), text[300_000:])
	if err != nil || math.Abs(bpb-entropy) > 0.02 {
		t.Errorf("%.4f bits per byte (%v), the source's entropy is %.4f", bpb, err, entropy)
	}
}

func TestOrder2KnowsNothingOfNoise(t *testing.T) {
	noise := texttest.Bytes(randtest.New(t), 200_000)
	bpb, err := mustTrain(t, noise[:100_000]).BitsPerByte(t.Context(), noise[100_000:])
	if err != nil || bpb < 8 || bpb > 9 {
		t.Errorf("noise: %v bits per byte, %v, want a little over 8", bpb, err)
	}
	zip, err := GzipBitsPerByte(t.Context(), noise)
	if err != nil || zip < 8 || zip > 8.01 {
		t.Errorf("noise: gzip needs %v bits per byte, %v, want a little over 8", zip, err)
	}
}

func TestOrder2Streams(t *testing.T) {
	text := texttest.Bytes(randtest.New(t), 5<<20/2)
	whole := mustTrain(t, text)
	var calls []int64
	pieces, err := TrainOrder2(t.Context(), iotest.HalfReader(bytes.NewReader(text)),
		func(n int64) {
			calls = append(calls, n)
		})
	if err != nil {
		t.Fatal(err)
	}

	a, _ := whole.BitsPerByte(t.Context(), text[:1000])
	b, _ := pieces.BitsPerByte(t.Context(), text[:1000])
	if a != b {
		t.Errorf("%v bits per byte when read at once, %v in pieces", a, b)
	}

	if len(calls) != 3 || calls[0] != 1<<20 || calls[2] != int64(len(text)) {
		t.Errorf("progress was told %v, want each MiB and the end", calls)
	}
}

func TestBaselineErrors(t *testing.T) {
	broken := errors.New("the disk is gone")
	if _, err := TrainOrder2(t.Context(), iotest.ErrReader(broken), nil); !errors.Is(err, broken) {
		t.Errorf("a reader that fails gives %v", err)
	}

	if _, err := TrainOrder2(t.Context(), strings.NewReader("ab"), nil); err == nil ||
		!strings.Contains(err.Error(), "2 bytes, want at least 3") {
		t.Errorf("two bytes give %v", err)
	}

	if _, err := mustTrain(t, []byte("abc")).BitsPerByte(t.Context(), []byte("a")); err == nil {
		t.Error("one byte is scored")
	}

	if _, err := GzipBitsPerByte(t.Context(), nil); err == nil {
		t.Error("gzip scores an empty text")
	}
}

func TestGzipBitsPerByte(t *testing.T) {
	// A run of one byte costs little more than the 18 bytes of header and trailer.
	got, err := GzipBitsPerByte(t.Context(), bytes.Repeat([]byte("a"), 10_000))
	if size := got * 10_000 / 8; err != nil || size < 18 || size > 60 {
		t.Errorf("10000 equal bytes become %v bytes, %v", size, err)
	}
}

func BenchmarkTrainOrder2(b *testing.B) {
	dir, err := data.GoSource()
	if err != nil {
		b.Fatal(err)
	}

	corpus, err := data.Open(dir, data.WithExtensions("go"))
	if err != nil {
		b.Fatal(err)
	}

	text := corpus.Train
	b.SetBytes(text.Size())
	for b.Loop() {
		if _, err := TrainOrder2(b.Context(), text.Reader(), nil); err != nil {
			b.Fatal(err)
		}
	}
}

// TestZeroOrder2 checks that a zero Order2 and a nil reader are errors.
func TestZeroOrder2(t *testing.T) {
	_, err := new(Order2).BitsPerByte(t.Context(), []byte("text"))
	require.ErrorContains(t, err, "TrainOrder2 makes an Order2")
}

// TestContextEnds checks that all functions that read text stop when the context is done, even in the
// middle of the text.
func TestContextEnds(t *testing.T) {
	enough := errors.New("enough")
	text := make([]byte, 8<<20)
	m := mustTrain(t, text[:100])
	ctx, cancel := context.WithCancelCause(t.Context())
	_, err := TrainOrder2(ctx, bytes.NewReader(text), func(read int64) {
		require.LessOrEqual(t, read, int64(2<<20))
		if read == 2<<20 {
			cancel(enough)
		}
	})

	require.ErrorIs(t, err, enough)
	require.ErrorContains(t, err, "after 2097152 bytes")
	for name, score := range map[string]func(context.Context, []byte) (float64, error){
		"BitsPerByte": m.BitsPerByte, "GzipBitsPerByte": GzipBitsPerByte,
	} {
		looks := &looking{Context: context.Background(), most: 3}
		_, err := score(looks, text)
		require.ErrorIs(t, err, context.Canceled, name)
	}
}

// looking is a context that is canceled after the given number of calls of Err.
type looking struct {
	context.Context
	most int
}

func (l *looking) Err() error {
	if l.most--; l.most < 0 {
		return context.Canceled
	}
	return nil
}
