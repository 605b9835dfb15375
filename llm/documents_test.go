package llm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/optim"
)

// endedTokens are tokens of which one ends each document.
type endedTokens struct {
	Tokens
	end int
}

func (e endedTokens) EndOfDocument() int { return e.end }

// TestLoaderKnowsDocuments wants starts at the ends of files where tokens are bytes, and else at the token that ends a document.
func TestLoaderKnowsDocuments(t *testing.T) {
	text := mustOpen(t, writeFiles(t, numbered(30)), WithHeldOut(1e-9)).Train
	raw, err := Tokenize(text, ByteTokenizer{})
	if err != nil {
		t.Fatal(err)
	}
	bpe := tokenBPE(t)
	file := mustCache(t, filepath.Join(t.TempDir(), "tokens"), text, bpe)
	var ends []int64 // of the file's documents, without their last tokens
	for i, id := range allTokens(t, file) {
		if id == bpe.EndOfDocument() {
			ends = append(ends, int64(i))
		}
	}
	if len(ends) != text.Documents() {
		t.Fatalf("%d documents in the file, want %d", len(ends), text.Documents())
	}
	r := newRand(t)
	for name, c := range map[string]struct {
		tokens Tokens
		ends   []int64
	}{"bytes": {raw, text.ends}, "file": {file, ends}} {
		for range 20 {
			seq := 1 + r.IntN(min(200, int(c.tokens.Len())-1))
			l := mustLoader(t, c.tokens, LoaderConfig{Batch: 1, Seq: seq, Seed: r.Uint64()})
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
						t.Fatalf("%s: the document of token %d of the window of %d at %d starts at %d, want %d", name, i, seq, offset, start, want)
					}
				}
			}
		}
	}
	kept := mustCache(t, filepath.Join(t.TempDir(), "tokens"), text, ByteTokenizer{})
	for _, tokens := range []Tokens{upTo(20), kept} {
		if b := mustNext(t, mustLoader(t, tokens, LoaderConfig{Batch: 1, Seq: 9})); b.Starts != nil {
			t.Errorf("tokens that know of no documents: starts %v", b.Starts)
		}
	}
}

// lossAndGradients runs a graph of a model in float64 on one batch.
func lossAndGradients(t *testing.T, c Config, b Batch, opts ...GraphOption) (loss float64, grads [][]float64) {
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
	r := newRand(t)
	lengths := []int{1 + r.IntN(8), 1, 1 + r.IntN(20)}
	c := tiny()
	c.Documents, c.Seq = true, lengths[0]+lengths[1]+lengths[2]
	b := newBatch(c.Seq)
	for i := range b.Inputs {
		b.Inputs[i], b.Targets[i] = r.IntN(c.Vocab), r.IntN(c.Vocab)
	}
	start := 0
	var want float64
	var wantGrads [][]float64
	for _, n := range lengths {
		alone := c
		alone.Documents, alone.Seq = false, n
		loss, grads := lossAndGradients(t, alone, Batch{Inputs: b.Inputs[start:][:n], Targets: b.Targets[start:][:n], Count: n})
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
	r := newRand(t)
	off := tiny()
	on := off
	on.Documents = true
	b := newBatch(2 * off.Seq)
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
		batch  Batch
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
	tokens := endedTokens{&memoryTokens{tokenizer: "numbers", vocabSize: numbers + 1, fingerprint: "numbers"}, numbers}
	for i := range 2000 {
		m := tokens.Tokens.(*memoryTokens)
		m.ids = append(m.ids, numbers, uint32(i%numbers))
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
		tr, err := NewTrainer(m, mustLoader(t, tokens, LoaderConfig{Batch: 8, Seq: c.Seq, Seed: 1}), o,
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
	tokens := upTo(100)
	tokens.vocabSize = c.Vocab
	_, err = NewTrainer(m, mustLoader(t, tokens, LoaderConfig{Batch: 1, Seq: c.Seq}), o,
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

// TestSampleDocuments wants the bytes of a sample in pieces that are each of one document, without a gap, and as long as they
// can be.
func TestSampleDocuments(t *testing.T) {
	r := newRand(t)
	files := map[string]string{}
	for i := range 25 {
		raw := randomBytes(r, 1+r.IntN(3*sampleBlock))
		files[fmt.Sprint(i)] = string(bytes.ReplaceAll(raw, []byte{0}, []byte{1})) // a file with zeros is binary
	}
	text := mustOpen(t, writeFiles(t, files), WithHeldOut(1e-9)).Train
	whole := readAll(t, text)
	for _, limit := range []int{1, sampleBlock, sampleBlock + 100, 7*sampleBlock + 5, len(whole) - 1, len(whole), 1 << 30} {
		sample, err := text.Sample(limit)
		if err != nil {
			t.Fatal(err)
		}
		documents, err := text.SampleDocuments(limit)
		if err != nil || !bytes.Equal(slices.Concat(documents...), sample) {
			t.Fatalf("SampleDocuments(%d) holds something else than Sample, %v", limit, err)
		}
		last := 0 // where the document before ends
		for i, d := range documents {
			at := last + bytes.Index(whole[last:], d)
			document, starts := slices.BinarySearch(text.ends, int64(at))
			if starts {
				document++
			}
			if end := text.ends[document]; int64(at+len(d)) > end {
				t.Errorf("SampleDocuments(%d): piece %d goes on %d bytes beyond a document", limit, i, int64(at+len(d))-end)
			}
			if i > 0 && !starts && at == last {
				t.Errorf("SampleDocuments(%d): piece %d goes on where the one before ends", limit, i)
			}
			last = at + len(d)
		}
	}
	if _, err := text.SampleDocuments(0); err == nil {
		t.Error("SampleDocuments(0) is accepted")
	}
}

// TestDocumentEvaluation wants each document's tokens to be told from the others', and all that text to be scored.
func TestDocumentEvaluation(t *testing.T) {
	r := newRand(t)
	bpe := tokenBPE(t)
	for range 20 {
		var documents [][]byte
		for range 1 + r.IntN(6) {
			documents = append(documents, append(repetitive(r, 5+r.IntN(40)), "\n1"...)) // two tokens or more
		}
		batch, seq := 1+r.IntN(3), 1+r.IntN(12)
		for _, tok := range []Tokenizer{ByteTokenizer{}, bpe} {
			e, err := NewDocumentEvaluation(documents, tok, batch, seq)
			if err != nil {
				t.Fatal(err)
			}
			var ids, begins []int
			for i, d := range documents {
				begin := len(ids)
				if tok == Tokenizer(bpe) && i > 0 {
					begin--
					begins[begin] = begin
				}
				ids = append(ids, tok.Encode(d)...)
				if tok == Tokenizer(bpe) {
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
					if i < b.Count && (b.Inputs[i] != ids[at] || b.Targets[i] != ids[at+1] || start != max(0, begins[at]-(at-i%seq))) {
						t.Fatalf("%s: token %d is %d → %d, from %d", tok.Name(), at, b.Inputs[i], b.Targets[i], start)
					}
				}
				count += b.Count
			}
			if text, err := tok.Decode(ids[1:]); err != nil || count != len(ids)-1 || count != e.Tokens() || e.Bytes() != len(text) {
				t.Errorf("%s: %d targets, Tokens %d, Bytes %d, want %d and %d, %v", tok.Name(), count, e.Tokens(), e.Bytes(), len(ids)-1, len(text), err)
			}
		}
	}
	// One token, and the end of its document.
	if _, err := NewDocumentEvaluation([][]byte{{'x'}}, bpe, 1, 1); err == nil || !strings.Contains(err.Error(), "no text left to predict") {
		t.Errorf("a text with nothing to predict: the error is %v", err)
	}
	for _, documents := range [][][]byte{nil, {[]byte("x")}, {{}, {}}} {
		if _, err := NewDocumentEvaluation(documents, ByteTokenizer{}, 1, 1); err == nil || !strings.Contains(err.Error(), "NewDocumentEvaluation") {
			t.Errorf("%q: the error is %v", documents, err)
		}
	}
}
