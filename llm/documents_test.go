package llm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
)

// lossAndGradients runs a graph of a model in float64 on one batch.
func lossAndGradients(t *testing.T, c Config, b data.Batch, opts ...GraphOption) (loss float64, grads [][]float64) {
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

// TestDocumentsApart wants the loss of a sequence of documents, and its gradients, to be the means of those of each alone.
func TestDocumentsApart(t *testing.T) {
	r := texttest.Rand(t)
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
		loss, grads := lossAndGradients(t, alone, data.Batch{Inputs: b.Inputs[start:][:n], Targets: b.Targets[start:][:n], Count: n})
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

// TestDocumentsOff wants the bits of a model that looks at no documents from one whose sequences are one document each, and a
// configuration that is stored as before.
func TestDocumentsOff(t *testing.T) {
	r := texttest.Rand(t)
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

// TestAcrossDocuments trains on documents of which each holds the number after that of the one before: it can be told only by
// looking there.
func TestAcrossDocuments(t *testing.T) {
	const numbers, steps, last = 8, 200, 20
	tokens := endedTokens{&idTokens{tokenizer: "numbers", vocab: numbers + 1, fingerprint: "numbers"}, numbers}
	for i := range 2000 {
		m := tokens.Tokens.(*idTokens)
		m.ids = append(m.ids, numbers, i%numbers)
	}
	chance := math.Log(numbers) / 2 // every second token can be told
	for documents, fine := range map[bool]func(loss float64) bool{
		false: func(loss float64) bool { return loss < chance/2 },
		true:  func(loss float64) bool { return loss > 0.95*chance && loss < 1.2*chance },
	} {
		c := Config{Vocab: numbers + 1, Dim: 16, Layers: 1, Heads: 2, Seq: 16, Documents: documents}.Default()
		m, err := NewModel(c, tensor.Float32, 3)
		if err != nil {
			t.Fatal(err)
		}
		o, err := adamW()
		if err != nil {
			t.Fatal(err)
		}
		tr, err := NewTrainer(m, mustLoader(t, tokens, data.LoaderConfig{Batch: 8, Seq: c.Seq, Seed: 1}), o,
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
		t.Logf("documents apart: %v: loss %.3f, with the numbers unknown %.3f", documents, loss, chance)
		if !fine(loss) {
			t.Errorf("documents apart: %v: the loss is %.3f, with the numbers unknown %.3f", documents, loss, chance)
		}
	}
}

// TestResumeDocuments wants a resumed run to have the bits of a straight one, and to be refused where documents are treated
// otherwise than before.
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

// TestDocumentsNeedThem wants a loader that knows nothing of documents to be refused.
func TestDocumentsNeedThem(t *testing.T) {
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
	if err == nil || !strings.Contains(err.Error(), "Config.Documents") || !strings.Contains(err.Error(), "EndOfDocument() int") {
		t.Errorf("the error is %v", err)
	}
}

// TestDocumentsDecode wants what follows a text, which is one document, to be the same whatever the model does about others.
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

// idTokens are tokens in memory.
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

// endedTokens are tokens of which one ends each document.
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

// numberedText is a text of 30 files.
func numberedText(t *testing.T) *data.Text {
	t.Helper()
	c, err := data.Open(texttest.Files(t, texttest.Numbered(30)))
	require.NoError(t, err)
	return c.Train
}

func trainBPE(t *testing.T, seed uint64, vocab int) *tokenizer.BPE {
	t.Helper()
	b, err := tokenizer.TrainBPE(t.Context(), bytes.NewReader(texttest.Words(seed, 3000)), vocab, nil)
	require.NoError(t, err)
	return b
}
