package llm

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
)

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
