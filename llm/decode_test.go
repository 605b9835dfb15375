package llm

import (
	"context"
	"iter"
	"math"
	"testing"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/sampler"
)

// apartBy is ‖x − y‖/‖y‖ of two slices of logits.
func apartBy(t *testing.T, x, y any) float64 {
	t.Helper()
	wide := func(v any) (w []float64) {
		if f, ok := v.([]float64); ok {
			return f
		}
		for _, f := range v.([]float32) {
			w = append(w, float64(f))
		}
		return w
	}
	a, b := wide(x), wide(y)
	if len(a) != len(b) || len(a) == 0 {
		t.Fatalf("%d logits, want %d", len(a), len(b))
	}
	var diff, norm float64
	for i := range a {
		diff, norm = diff+(a[i]-b[i])*(a[i]-b[i]), norm+b[i]*b[i]
	}
	return math.Sqrt(diff / norm)
}

// TestDecoding wants the logits of a sequence that grows to be those of the whole window: of a prompt and token by token, in the
// window and beyond it, of other sequences, and after training.
func TestDecoding(t *testing.T) {
	r := texttest.Rand(t)
	for dt, tolerance := range map[tensor.Dtype]float64{tensor.Float32: 1e-5, tensor.Float64: 1e-13} {
		c := tiny()
		c.SlotWidth, c.Untied = 16, true
		tr := newTrainer(t, trainerOptions{config: c, steps: 2, dt: dt})
		seq := c.Seq
		whole, err := (&Inference{Model: tr.Model}).runner(ForLogits, 1)
		if err != nil {
			t.Fatal(err)
		}
		defer whole.Machine.Close()
		for round := range 3 {
			next, err := tr.engine.Decoder()
			if err != nil {
				t.Fatal(err)
			}
			var all []int
			for range 1 + r.IntN(seq+2) {
				all = append(all, r.IntN(256))
			}
			d := tr.engine.(*host).decoding
			for range seq + 3 {
				window := all[max(0, len(all)-seq):]
				got, err := next(t.Context(), window)
				if err != nil {
					t.Fatal(err)
				}
				want, err := whole.Next(t.Context(), window)
				if err != nil {
					t.Fatal(err)
				}
				if off := apartBy(t, got, want); !(off < tolerance) {
					t.Fatalf("%v, round %d, after %d tokens: the logits differ by %.2g", dt, round, len(all), off)
				}
				if kept := len(d.tokens); kept != len(window) && (kept > 0 || len(window) < seq) {
					t.Errorf("%d tokens are kept of %d, in a window of %d", kept, len(window), seq)
				}
				all = append(all, r.IntN(256))
			}
		}
		// What is kept of a sequence does not outlive a step of training.
		for i := range 2 {
			next, err := tr.engine.Decoder()
			if err != nil {
				t.Fatal(err)
			}
			tokens := []int{5, 6, 7, 8}[:3+i]
			got, err := next(t.Context(), tokens)
			if err != nil {
				t.Fatal(err)
			}
			want, err := whole.Next(t.Context(), tokens)
			if err != nil {
				t.Fatal(err)
			}
			if off := apartBy(t, got, want); !(off < tolerance) {
				t.Errorf("%v, with %d steps: the logits differ by %.2g", dt, tr.Step(), off)
			}
			if err := tr.Run(context.Background()); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestDecodingRefusals wants errors of what is no sequence for the window, also where keys and values are kept.
func TestDecodingRefusals(t *testing.T) {
	c := tiny()
	m, err := NewModel(c, tensor.Float64, 1)
	if err != nil {
		t.Fatal(err)
	}
	i := &Inference{Model: m}
	defer i.Close()
	all := make([]int, c.Seq+1)
	for name, wrong := range map[string][]int{
		"none": nil, "too many": all, "not in the vocabulary": append(all[:c.Seq-1:c.Seq-1], c.Vocab),
	} {
		next, err := i.Decoder()
		if err != nil {
			t.Fatal(err)
		}
		for n := 1; n == 1 || n < len(wrong); n++ {
			if _, err := next(t.Context(), all[:n]); err != nil {
				t.Fatal(err)
			}
		}
		kept := len(i.decoding.tokens)
		if _, err := next(t.Context(), wrong); err == nil || kept == 0 {
			t.Errorf("%s, after %d tokens that are kept: no error", name, kept)
		}
		if n := len(i.decoding.tokens); n > kept {
			t.Errorf("%s: %d tokens are kept after the error, and %d before", name, n, kept)
		}
	}
}

// BenchmarkDecoding draws as many tokens as the window holds, at the example's default size.
func BenchmarkDecoding(b *testing.B) {
	c := Config{Vocab: 256, Dim: 192, Layers: 4, Heads: 4, Seq: 256, Kasmina: []int{1, 3}, Seeds: 16}.Default()
	m, err := NewModel(c, tensor.Float32, 1)
	if err != nil {
		b.Fatal(err)
	}
	g, err := NewGenerator(m)
	if err != nil {
		b.Fatal(err)
	}
	defer g.Close()
	s, err := sampler.New(sampler.Config{Temperature: 1, Seed: 1})
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := collect(g.Generate(b.Context(), []int{1}, c.Seq, s)); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*c.Seq), "µs/token")
}

// collect returns all tokens that are generated.
func collect(tokens iter.Seq2[int, error]) (all []int, err error) {
	for token, err := range tokens {
		if err != nil {
			return nil, err
		}
		all = append(all, token)
	}
	return all, nil
}
