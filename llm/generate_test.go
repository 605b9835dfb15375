package llm

import (
	"context"
	"errors"
	"iter"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
)

func newGenerator(t *testing.T, c Config) (*Generator, *sampler.Sampler) {
	t.Helper()
	m, err := NewModel(c, tensor.Float32, 1)
	require.NoError(t, err)
	g, err := NewGenerator(m)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.Close()) })
	s, err := sampler.New(sampler.Config{Temperature: 1, Seed: 3})
	require.NoError(t, err)
	return g, s
}

// TestGenerateStreams wants tokens as they are drawn, no more after the caller has had enough, and
// the end with the context.
func TestGenerateStreams(t *testing.T) {
	g, s := newGenerator(t, tiny())
	taken := 0
	for _, err := range g.Generate(t.Context(), []int{1}, math.MaxInt, s) {
		require.NoError(t, err)
		if taken++; taken == 3 {
			break
		}
	}
	enough := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	taken = 0
	var last error
	for _, err := range g.Generate(ctx, []int{1}, math.MaxInt, s) {
		require.NoError(t, last, "it goes on after an error")
		if last = err; err == nil {
			if taken++; taken == 4 {
				cancel(enough)
			}
		}
	}
	require.ErrorIs(t, last, enough)
	require.Equal(t, 4, taken)
	var none context.Context
	_, err := collect(g.Generate(none, []int{1}, 1, s))
	require.ErrorContains(t, err, "the context is nil")
}

// TestGenerateStopsWithinAPass wants the context to end the pass over a prompt, which may take
// minutes, and the generator to be as good as before.
func TestGenerateStopsWithinAPass(t *testing.T) {
	g, s := newGenerator(t, tiny())
	enough := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	logits, err := g.decoder()
	require.NoError(t, err)
	cancel(enough)
	_, err = logits(ctx, []int{1, 2, 3})
	require.ErrorIs(t, err, enough)
	_, err = logits(t.Context(), []int{1, 2})
	require.NoError(t, err)
	_, err = logits(ctx, []int{1, 2, 3})
	require.ErrorIs(t, err, enough)
	want, err := logits(t.Context(), []int{1, 2, 3})
	require.NoError(t, err)
	again, err := g.decoder()
	require.NoError(t, err)
	got, err := again(t.Context(), []int{1, 2, 3})
	require.NoError(t, err)
	require.Less(t, apartBy(t, got, want), 1e-5)
	tokens, err := collect(g.Generate(t.Context(), []int{1}, 5, s))
	require.NoError(t, err)
	require.Len(t, tokens, 5)
}

// TestGenerateOfAWideWindow wants time and memory to follow the tokens that there are: a file may
// name a window of 2²⁴ positions for a model of some bytes. Passes over such a window would take
// days.
func TestGenerateOfAWideWindow(t *testing.T) {
	c := smallConfig()
	c.Seq = 1 << 24
	g, s := newGenerator(t, c)
	bounded.Run(t, 2<<20, func() { // 16 MiB and more if it were for the window
		tokens, err := collect(g.Generate(t.Context(), []int{0, 1, 2, 1, 0}, 40, s))
		require.NoError(t, err)
		require.Len(t, tokens, 40)
	})
}

// TestWindowsThatGrow wants the same logits from a window for the tokens as from one for all, over
// several sizes.
func TestWindowsThatGrow(t *testing.T) {
	c := tiny()
	c.Seq = 100
	m, err := NewModel(c, tensor.Float64, 1)
	require.NoError(t, err)
	i := &Inference{Model: m}
	defer i.Close()
	whole, err := i.runner(ForLogits, 1)
	require.NoError(t, err)
	defer whole.Machine.Close()
	r := texttest.Rand(t)
	var all []int
	for len(all) < c.Seq+3 {
		all = append(all, r.IntN(c.Vocab))
	}
	for _, first := range []int{1, 16, 17, 40, 100, 3} {
		next, err := i.Decoder()
		require.NoError(t, err)
		for n := first; n <= len(all); n++ {
			window := all[max(0, n-c.Seq):n]
			got, err := next(t.Context(), window)
			require.NoError(t, err)
			if n%7 > 0 && n > first && n < c.Seq {
				continue
			}
			want, err := whole.Next(t.Context(), window)
			require.NoError(t, err)
			require.Less(t, apartBy(t, got, want), 1e-13, "%d tokens, the first %d at once", n, first)
		}
	}
}

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

// paddedTrainer returns a trainer of a model whose vocabulary is larger than that of its tokenizer.
func paddedTrainer(t *testing.T, bpe *tokenizer.BPE, text *data.Text, vocab int) *Trainer {
	t.Helper()
	config := tiny()
	config.Vocab = vocab
	m, err := NewModel(config, tensor.Float32, 1)
	if err != nil {
		t.Fatal(err)
	}
	tokens, err := data.Tokenize(t.Context(), text, bpe)
	if err != nil {
		t.Fatal(err)
	}
	loader, err := data.NewLoader(tokens, data.LoaderConfig{Batch: 2, Seq: config.Seq, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	o, err := adamW()
	if err != nil {
		t.Fatal(err)
	}
	tr, err := NewTrainer(m, loader, o, TrainConfig{Steps: 2, Batch: 2, Clip: 1, Schedule: optim.Constant(0.01)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tr.Close() })
	return tr
}

// TestPaddedVocabulary draws much from a model that has learnt nearly nothing, and two thirds of whose vocabulary stand for
// no text, after a prompt and from the start of a document.
func TestPaddedVocabulary(t *testing.T) {
	text := numberedText(t)
	bpe := trainBPE(t, 1, 270)
	tr := paddedTrainer(t, bpe, text, 3*bpe.VocabSize())
	dir := t.TempDir()
	for _, prompt := range []string{"", "if"} {
		tr.On(SampleText(tr, bpe, prompt, 60, sampler.Config{Temperature: 1, Seed: 5}, filepath.Join(dir, "after"+prompt), 0))
	}
	if err := tr.Run(context.Background()); err != nil {
		t.Fatal(err)
	}
	samples := map[string]string{}
	for _, name := range []string{"after", "afterif"} {
		s, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || len(s) < 30 {
			t.Errorf("sample %q, %v", s, err)
		}
		samples[name] = string(s)
	}
	if !strings.HasPrefix(samples["afterif"], "if") || strings.HasPrefix(samples["after"], "if") || samples["afterif"][2:] == samples["after"] {
		t.Errorf("samples %q", samples)
	}
}

// TestOtherTokenizer wants a checkpoint to be refused by a trainer whose data is in other tokens, also with new settings.
func TestOtherTokenizer(t *testing.T) {
	text := numberedText(t)
	tr := paddedTrainer(t, trainBPE(t, 1, 270), text, 320)
	path := filepath.Join(t.TempDir(), "model")
	tr.On(Checkpoint(tr, path, 0))
	if err := tr.Run(context.Background()); err != nil {
		t.Fatal(err)
	}
	other := paddedTrainer(t, trainBPE(t, 2, 268), text, 320)
	err := other.Resume(t.Context(), path, WithNewSettings(nil))
	if !errors.Is(err, ErrSettings) || !strings.Contains(err.Error(), `those of "bpe-270-`) ||
		!strings.Contains(err.Error(), `those of "bpe-268-`) {
		t.Errorf("got %v, want ErrSettings and both tokenizers", err)
	}
}

// TestLogitsFollowTheLoss compares the logits of a position with the loss of a batch in which only that position counts:
// log Σ exp(logits) − logits[target].
func TestLogitsFollowTheLoss(t *testing.T) {
	r := texttest.Rand(t)
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1, dt: tensor.Float64})
	seq := tr.Model.Config.Seq
	b := zeroBatch(seq)
	for range 5 {
		n, target := 1+r.IntN(seq), r.IntN(256)
		for i := range b.Inputs {
			b.Inputs[i], b.Targets[i] = r.IntN(256), -1
		}
		b.Targets[n-1] = target
		logitsOf, err := tr.engine.Decoder()
		if err != nil {
			t.Fatal(err)
		}
		got, err := logitsOf(t.Context(), b.Inputs[:n])
		if err != nil {
			t.Fatal(err)
		}
		logits := got.([]float64)
		sum := 0.0
		for _, l := range logits {
			sum += math.Exp(l)
		}
		want, err := tr.loss(b)
		if loss := math.Log(sum) - logits[target]; err != nil || math.Abs(loss-want) > 1e-9 || len(logits) != 256 {
			t.Errorf("after %d tokens: the logits' loss is %v, want %v, %v", n, loss, want, err)
		}
	}
}
