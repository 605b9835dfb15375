package llm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/internal/processor"
	"github.com/kasmina-go/kasmina/internal/randtest"
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

// TestGenerateStreams checks that tokens arrive as they are drawn, and that drawing stops when the
// caller breaks out of the loop or the context is canceled.
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
}

// TestGenerateStopsWithinAPass checks that canceling the context stops a pass over a prompt, which may
// take minutes, and that the generator remains usable.
func TestGenerateStopsWithinAPass(t *testing.T) {
	m, err := NewModel(tiny(), tensor.Float32, 1)
	require.NoError(t, err)
	i := &Inference{Model: m}
	enough := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	logits, err := i.Decoder()
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
	again, err := i.Decoder()
	require.NoError(t, err)
	got, err := again(t.Context(), []int{1, 2, 3})
	require.NoError(t, err)
	require.Less(t, apartBy(t, got, want), 1e-5)
	require.NoError(t, i.Close())
}

// TestGenerateStopsWithinAnOp checks that canceling the context stops even an op that takes up most
// of a pass, by requiring that a pass canceled after a quarter of its processor time saves much of
// the rest.
func TestGenerateStopsWithinAnOp(t *testing.T) {
	// Helpers on other processors would poll for work, which takes processor time too.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))

	for name, widen := range randtest.Sample(t, 1, map[string]func(*Config){
		"attention": func(c *Config) { c.Seq, c.Dim, c.Heads, c.HeadDim, c.FF = 8000, 8, 1, 8, 1 },
		"SiLUMLP": func(c *Config) {
			c.Seq, c.Dim, c.Heads, c.HeadDim, c.FF = 1024, 512, 1, 2, 8192
		},
	}) {
		t.Run(name, func(t *testing.T) {
			c := Config{Vocab: 5, Layers: 1, KVHeads: 1, Base: 10000, Eps: 1e-5}
			widen(&c)
			g, s := newGenerator(t, c)
			prompt := make([]int, c.Seq)
			pass := func(ctx context.Context) (time.Duration, error) {
				start := processor.Time(t)
				_, err := collect(g.Generate(ctx, prompt, 1, s))
				return processor.Time(t) - start, err
			}
			_, err := pass(t.Context()) // allocates memory
			require.NoError(t, err)
			least := 1.
			for range 7 { // the system may delay the goroutine that cancels
				whole, err := pass(t.Context())
				require.NoError(t, err)
				ctx, cancel := context.WithCancel(t.Context())
				go func(start time.Duration) {
					for processor.Time(t)-start < whole/4 {
						time.Sleep(time.Millisecond)
					}
					cancel()
				}(processor.Time(t))
				took, err := pass(ctx)
				<-ctx.Done()
				if err == nil {
					continue
				}
				require.ErrorIs(t, err, context.Canceled)
				if least = min(least, took.Seconds()/whole.Seconds()); least < 0.6 {
					return
				}
			}
			t.Errorf("passes that end after a quarter take %.2f of a whole one's time, and more",
				least)
		})
	}
}

// TestGenerateOfAWideWindow checks that time and memory depend on the number of tokens rather than on
// Config.Seq. A small file may claim a window of 2²⁴ positions, and passes over such a window would take
// days.
func TestGenerateOfAWideWindow(t *testing.T) {
	c := smallConfig()
	c.Seq = 1 << 24
	g, s := newGenerator(t, c)
	bounded.Run(t, 2<<20, func() { // for the whole window it would be 16 MiB and more
		tokens, err := collect(g.Generate(t.Context(), []int{0, 1, 2, 1, 0}, 40, s))
		require.NoError(t, err)
		require.Len(t, tokens, 40)
	})
}

// TestWindowsThatGrow checks that windows sized for the tokens give the same logits as a full window, for
// several sizes.
func TestWindowsThatGrow(t *testing.T) {
	c := tiny()
	c.Seq = 100
	m, err := NewModel(c, tensor.Float64, 1)
	require.NoError(t, err)
	i := &Inference{Model: m}
	defer i.Close()
	whole := wholeLogits(t, m)
	defer whole.Machine.Close()
	r := randtest.New(t)
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
			require.Less(t, apartBy(t, got, want), 1e-13, "%d tokens, the first %d at once", n,
				first)
		}
	}
}

// wholeLogits returns a runner that computes a model's logits over the whole window on the CPU, without a
// cache.
func wholeLogits(t *testing.T, m *Model) Runner {
	g, err := m.Graph(ForLogits, 1)
	require.NoError(t, err)
	whole, err := runnerOnCPU(g)
	require.NoError(t, err)
	return whole
}

// apartBy returns ‖x − y‖/‖y‖ for two slices of logits.
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

// TestDecoding checks that cached decoding of a growing sequence gives the same logits as passes over the
// whole window: for a prompt and token by token, within the window and beyond it, for a new sequence, and
// after training.
func TestDecoding(t *testing.T) {
	r := randtest.New(t)
	tolerances := map[tensor.Dtype]float64{tensor.Float32: 1e-5, tensor.Float64: 1e-13}
	for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		tolerance := tolerances[dt]
		c := tiny()
		c.SlotWidth, c.Untied = 16, true
		tr := newTrainer(t, trainerOptions{config: c, steps: 2, dt: dt})
		seq := c.Seq
		whole := wholeLogits(t, tr.Model)
		defer whole.Machine.Close()
		for round := range 3 {
			next, err := tr.driver.engine.Decoder()
			if err != nil {
				t.Fatal(err)
			}
			var all []int
			for range 1 + r.IntN(seq+2) {
				all = append(all, r.IntN(256))
			}
			d := tr.driver.engine.(*cpuEngine)
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
					t.Fatalf("%v, round %d, after %d tokens: the logits differ by %.2g",
						dt, round, len(all), off)
				}
				if kept := d.Kept(); kept != len(window) && (kept > 0 || len(window) < seq) {
					t.Errorf("%d tokens are kept of %d, in a window of %d", kept, len(window), seq)
				}
				all = append(all, r.IntN(256))
			}
		}
		// The cache of a sequence must not survive a step of training.
		for i := range 2 {
			next, err := tr.driver.engine.Decoder()
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

// TestDecodingRefusals checks that decoding returns an error for invalid sequences, even after it has
// cached valid ones.
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
		"none": nil, "too many": all,
		"not in the vocabulary": append(all[:c.Seq-1:c.Seq-1], c.Vocab),
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
		kept := i.Kept()
		if _, err := next(t.Context(), wrong); err == nil || kept == 0 {
			t.Errorf("%s, after %d tokens that are kept: no error", name, kept)
		}
		if n := i.Kept(); n > kept {
			t.Errorf("%s: %d tokens are kept after the error, and %d before", name, n, kept)
		}
	}
}

// BenchmarkDecoding draws a full window of tokens, at the example's default size.
func BenchmarkDecoding(b *testing.B) {
	c := Config{Vocab: 256, Dim: 192, Layers: 4, Heads: 4, Seq: 256,
		Kasmina: []int{1, 3}, Seeds: 16}.Default()
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

// collect returns all generated tokens.
func collect(tokens iter.Seq2[int, error]) (all []int, err error) {
	for token, err := range tokens {
		if err != nil {
			return nil, err
		}
		all = append(all, token)
	}
	return all, nil
}

// paddedTrainer returns a trainer for a model with a larger vocabulary than its tokenizer's.
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

	tr, err := NewTrainer(m, loader, o, TrainConfig{Steps: 2, Batch: 2, Clip: 1,
		Schedule: optim.Constant(0.01)})
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { tr.Close() })
	return tr
}

// TestPaddedVocabulary draws long samples from an almost untrained model after a prompt and from the
// start of a document. Two thirds of the model's vocabulary represent no text.
func TestPaddedVocabulary(t *testing.T) {
	text := numberedText(t)
	bpe := trainBPE(t, 1, 270)
	tr := paddedTrainer(t, bpe, text, 3*bpe.VocabSize())
	dir := t.TempDir()
	for _, prompt := range []string{"", "if"} {
		tr.On(SampleText(tr, bpe, prompt, 60, sampler.Config{Temperature: 1, Seed: 5},
			filepath.Join(dir, "after"+prompt), 0))
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

	if !strings.HasPrefix(samples["afterif"], "if") || strings.HasPrefix(samples["after"], "if") ||
		samples["afterif"][2:] == samples["after"] {
		t.Errorf("samples %q", samples)
	}
}

// TestOtherTokenizer checks that a checkpoint is rejected if the trainer's data is tokenized
// differently, even with new settings.
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
	if !errors.Is(err, ErrSettings) || !strings.Contains(err.Error(), `tokenizer "bpe-270-`) ||
		!strings.Contains(err.Error(), `by "bpe-268-`) {
		t.Errorf("got %v, want ErrSettings and both tokenizers", err)
	}
}

// TestLogitsFollowTheLoss compares the logits of a position with the loss of a batch that counts only
// that position: log Σ exp(logits) − logits[target].
func TestLogitsFollowTheLoss(t *testing.T) {
	r := randtest.New(t)
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1, dt: tensor.Float64})
	seq := tr.Model.Config.Seq
	b := zeroBatch(seq)
	for range 5 {
		n, target := 1+r.IntN(seq), r.IntN(256)
		for i := range b.Inputs {
			b.Inputs[i], b.Targets[i] = r.IntN(256), -1
		}
		b.Targets[n-1] = target
		logitsOf, err := tr.driver.engine.Decoder()
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
		want, err := tr.driver.loss(b)
		if loss := math.Log(sum) - logits[target]; err != nil || math.Abs(loss-want) > 1e-9 ||
			len(logits) != 256 {
			t.Errorf("after %d tokens: the logits' loss is %v, want %v, %v", n, loss, want, err)
		}
	}
}

// lossAndGradients runs a float64 model's graph on one batch.
func lossAndGradients(t *testing.T, c Config, b data.Batch, opts ...GraphOption) (loss float64,
	grads [][]float64) {
	t.Helper()
	m, err := NewModel(c, tensor.Float64, 11)
	if err != nil {
		t.Fatal(err)
	}

	g, err := m.Graph(ForTraining, len(b.Inputs)/c.Seq, opts...)
	if err != nil {
		t.Fatal(err)
	}

	machine := gorgonia.NewTapeMachine(g.G, gorgonia.BindDualValues(g.Params...))
	defer machine.Close()
	if err := errors.Join(g.Let(b), machine.RunAll()); err != nil {
		t.Fatal(err)
	}

	for _, p := range g.Params {
		d, err := p.Grad()
		if err != nil {
			t.Fatal(err)
		}
		grads = append(grads, d.Data().([]float64))
	}

	return g.Loss.Value().Data().(float64), grads
}

// TestDocumentsAreIndependent checks that the loss of a sequence of documents, and its gradients, are the weighted
// means of each document's own.
func TestDocumentsAreIndependent(t *testing.T) {
	r := randtest.New(t)
	lengths := []int{1 + r.IntN(8), 1, 1 + r.IntN(20)}
	c := tiny()
	c.Documents, c.Seq = true, lengths[0]+lengths[1]+lengths[2]
	b := zeroBatch(c.Seq)
	for i := range b.Inputs {
		b.Inputs[i], b.Targets[i] = r.IntN(c.Vocab), r.IntN(c.Vocab)
	}

	start := 0
	var want float64
	var wantGrads [][]float64
	for _, n := range lengths {
		alone := c
		alone.Documents, alone.Seq = false, n
		loss, grads := lossAndGradients(t, alone, data.Batch{Inputs: b.Inputs[start:][:n],
			Targets: b.Targets[start:][:n], Count: n})
		share := float64(n) / float64(c.Seq)
		want += loss * share
		for i, g := range grads {
			if start == 0 {
				wantGrads = append(wantGrads, make([]float64, len(g)))
			}
			for j, v := range g {
				wantGrads[i][j] += v * share
			}
		}
		for range n {
			b.Starts = append(b.Starts, start)
		}
		start += n
	}

	for name, opts := range map[string][]GraphOption{"plain": nil, "recompute": {WithRecompute()}} {
		loss, grads := lossAndGradients(t, c, b, opts...)
		if math.Abs(loss-want) > 1e-12*want {
			t.Errorf("%s: the loss is %v, want %v", name, loss, want)
		}
		for i, g := range grads {
			for j, v := range g {
				if math.Abs(v-wantGrads[i][j]) > 1e-12 {
					t.Fatalf("%s: gradient %d[%d] is %v, want %v", name, i, j, v, wantGrads[i][j])
				}
			}
		}
	}
}

// TestDocumentsOff checks that Config.Documents does not affect the results if every sequence is a
// single document, and that the stored configuration omits it when it is not set.
func TestDocumentsOff(t *testing.T) {
	r := randtest.New(t)
	off := tiny()
	on := off
	on.Documents = true
	b := zeroBatch(2 * off.Seq)
	for i := range b.Inputs {
		b.Inputs[i], b.Targets[i] = r.IntN(off.Vocab), r.IntN(off.Vocab)
	}

	marked := b
	for i := range b.Inputs {
		marked.Starts = append(marked.Starts, i%off.Seq/5*5)
	}

	loss, grads := lossAndGradients(t, off, b)
	for name, c := range map[string]struct {
		config Config
		batch  data.Batch
	}{"ignored": {off, marked}, "one each": {on, b}} {
		l, g := lossAndGradients(t, c.config, c.batch)
		if l != loss || !slices.EqualFunc(g, grads, slices.Equal) {
			t.Errorf("%s: the loss is %v, want %v, or a gradient is another", name, l, loss)
		}
	}

	if l, _ := lossAndGradients(t, on, marked); l == loss {
		t.Errorf("the loss is %v whether attention keeps documents apart or not", l)
	}

	text, err := json.Marshal(off)
	if err != nil || strings.Contains(string(text), "ocuments") {
		t.Errorf("the configuration is stored as %s, %v", text, err)
	}
}

// TestAcrossDocuments trains on documents that each hold the successor of the previous document's number.
// The model can predict it only by attending to the previous document.
func TestAcrossDocuments(t *testing.T) {
	const numbers, steps, last = 8, 200, 20
	tokens := endedTokens{&idTokens{tokenizer: "numbers", vocab: numbers + 1,
		fingerprint: "numbers"}, numbers}
	for i := range 2000 {
		m := tokens.Tokens.(*idTokens)
		m.ids = append(m.ids, numbers, i%numbers)
	}

	chance := math.Log(numbers) / 2 // every second token is an end of document, and predictable
	for documents, fine := range map[bool]func(loss float64) bool{
		false: func(loss float64) bool { return loss < chance/2 },
		true:  func(loss float64) bool { return loss > 0.95*chance && loss < 1.2*chance },
	} {
		c := Config{Vocab: numbers + 1, Dim: 16, Layers: 1, Heads: 2, Seq: 16,
			Documents: documents}.Default()
		m, err := NewModel(c, tensor.Float32, 3)
		if err != nil {
			t.Fatal(err)
		}
		o, err := adamW()
		if err != nil {
			t.Fatal(err)
		}
		tr, err := NewTrainer(m,
			mustLoader(t, tokens, data.LoaderConfig{Batch: 8, Seq: c.Seq, Seed: 1}), o,
			TrainConfig{Steps: steps, Batch: 8, Schedule: optim.Constant(0.01)})
		if err != nil {
			t.Fatal(err)
		}
		defer tr.Close()
		var loss float64
		tr.On(func(e Event) error {
			if e.Kind == StepEnd && e.Step > steps-last {
				loss += e.Loss / last
			}
			return nil
		})
		if err := tr.Run(context.Background()); err != nil {
			t.Fatal(err)
		}
		t.Logf("documents apart: %v: loss %.3f, with the numbers unknown %.3f",
			documents, loss, chance)
		if !fine(loss) {
			t.Errorf("documents apart: %v: the loss is %.3f, with the numbers unknown %.3f",
				documents, loss, chance)
		}
	}
}

// TestResumeDocuments checks that a resumed run reproduces an uninterrupted one bit for bit, and that
// it is rejected if Config.Documents has changed.
func TestResumeDocuments(t *testing.T) {
	c := tiny()
	c.Documents = true
	path := filepath.Join(t.TempDir(), "model.safetensors")
	straight := newTrainer(t, trainerOptions{config: c, steps: 12, recompute: true})
	straight.On(func(e Event) error {
		if e.Kind == StepEnd && e.Step == 5 {
			return straight.Save(path)
		}
		return nil
	})

	resumed := newTrainer(t, trainerOptions{config: c, steps: 12, recompute: true})
	if err := straight.Run(context.Background()); err != nil {
		t.Fatal(err)
	}

	if err := errors.Join(resumed.Resume(t.Context(), path),
		resumed.Run(context.Background())); err != nil {
		t.Fatal(err)
	}

	checkSame(t, straight, resumed)
	other := newTrainer(t, trainerOptions{config: tiny(), steps: 12})
	if err := other.Resume(t.Context(), path); !errors.Is(err, ErrArchitecture) ||
		!strings.Contains(err.Error(), "Documents is false here and true there") {
		t.Errorf("resumed without documents: %v", err)
	}

	if m, err := LoadModel(t.Context(), path); err != nil || !m.Config.Documents {
		t.Errorf("the model is loaded as %+v, %v", m, err)
	}
}

// TestDocumentsNeedBoundaries checks that a loader without document boundaries is rejected.
func TestDocumentsNeedBoundaries(t *testing.T) {
	c := tiny()
	c.Documents = true
	m, err := NewModel(c, tensor.Float32, 1)
	if err != nil {
		t.Fatal(err)
	}

	o, err := adamW()
	if err != nil {
		t.Fatal(err)
	}

	tokens := &idTokens{ids: make([]int, 100), vocab: c.Vocab}
	_, err = NewTrainer(m, mustLoader(t, tokens, data.LoaderConfig{Batch: 1, Seq: c.Seq}), o,
		TrainConfig{Steps: 1, Batch: 1, Schedule: optim.Constant(0.01)})
	if err == nil || !strings.Contains(err.Error(), "Config.Documents") ||
		!strings.Contains(err.Error(), "EndOfDocument() int") {
		t.Errorf("the error is %v", err)
	}
}

// TestDocumentsDecode checks that Config.Documents does not affect decoding, since the decoded text is a
// single document.
func TestDocumentsDecode(t *testing.T) {
	var logits [2][]string
	for i, documents := range []bool{false, true} {
		c := tiny()
		c.Documents = documents
		m, err := NewModel(c, tensor.Float32, 2)
		if err != nil {
			t.Fatal(err)
		}
		engine := &Inference{Model: m}
		next, err := engine.Decoder()
		if err != nil {
			t.Fatal(err)
		}
		for n := 1; n <= c.Seq; n++ {
			x, err := next(t.Context(), []int{7, 10, 3, 10, 10, 1, 2, 3, 4, 5, 6, 7}[:n])
			if err != nil {
				t.Fatal(err)
			}
			logits[i] = append(logits[i], fmt.Sprint(x))
		}
		if err := engine.Close(); err != nil {
			t.Fatal(err)
		}
	}

	if !slices.Equal(logits[0], logits[1]) {
		t.Error("the logits differ")
	}
}

// idTokens is a sequence of tokens in memory.
type idTokens struct {
	ids         []int
	tokenizer   string
	vocab       int
	fingerprint string
}

func (m *idTokens) Tokenizer() string   { return m.tokenizer }
func (m *idTokens) VocabSize() int      { return m.vocab }
func (m *idTokens) Len() int64          { return int64(len(m.ids)) }
func (m *idTokens) Fingerprint() string { return m.fingerprint }

func (m *idTokens) ReadTokens(dst []int, offset int64) error {
	if copy(dst, m.ids[min(int(offset), len(m.ids)):]) < len(dst) {
		return io.ErrUnexpectedEOF
	}
	return nil
}

// endedTokens is a sequence of tokens with an end-of-document token.
type endedTokens struct {
	data.Tokens
	end int
}

func (e endedTokens) EndOfDocument() int { return e.end }

func mustLoader(t testing.TB, tokens data.Tokens, c data.LoaderConfig) *data.Loader {
	t.Helper()
	l, err := data.NewLoader(tokens, c)
	require.NoError(t, err)
	return l
}

func zeroBatch(n int) data.Batch {
	return data.Batch{Inputs: make([]int, n), Targets: make([]int, n), Count: n}
}

// numberedText returns a text of 30 files.
func numberedText(t *testing.T) *data.Text {
	t.Helper()
	c, err := data.Open(texttest.Files(t, texttest.Numbered(30)))
	require.NoError(t, err)
	return c.Train
}

func trainBPE(t *testing.T, seed uint64, vocab int) *tokenizer.BPE {
	t.Helper()
	b, err := tokenizer.TrainBPE(t.Context(), bytes.NewReader(texttest.Words(seed, 3000)), vocab,
		nil)
	require.NoError(t, err)
	return b
}
