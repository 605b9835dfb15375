package data

import (
	"fmt"
	"iter"
	"math"
	"slices"
	"sync"

	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// Evaluation is held-out text cut into batches, always the same ones. Every token but the first is
// a target once; rows that are left over in the last batch have the target -1. All methods may be
// called at the same time.
type Evaluation struct {
	ids    []int
	begins []int // the token that begins the document of each; nil where nobody knows
	bytes  int
	batch  int
	seq    int

	hashed sync.Once
	hash   string
}

// Fingerprint stands for the tokens and how they are batched.
func (e *Evaluation) Fingerprint() string {
	e.hashed.Do(func() {
		e.hash = fingerprintOf(fmt.Sprint("evaluation ", e.batch, e.seq, e.bytes),
			fmt.Sprint(e.ids, e.begins))
	})
	return e.hash
}

// NewEvaluation encodes the text, for batches of the given number of sequences of seq tokens. The
// text has to make at least two tokens, and those after the first have to stand for some of it.
func NewEvaluation(text []byte, tok tokenizer.Tokenizer, batch, seq int) (*Evaluation, error) {
	return newEvaluation("NewEvaluation", [][]byte{text}, false, tok, batch, seq)
}

// NewDocumentEvaluation is NewEvaluation of several documents, or parts of such, for a model with
// Config.Documents: batches say where they start. They are encoded one by one. If the tokenizer is
// a BPE, or has a method EndOfDocument() int as a BPE has, that token follows each and is a target
// too.
func NewDocumentEvaluation(documents [][]byte, tok tokenizer.Tokenizer,
	batch, seq int) (*Evaluation, error) {
	return newEvaluation("NewDocumentEvaluation", documents, true, tok, batch, seq)
}

func newEvaluation(name string, documents [][]byte, apart bool, tok tokenizer.Tokenizer,
	batch, seq int) (*Evaluation, error) {
	if tok == nil {
		return nil, fmt.Errorf("data: %s: the tokenizer is nil", name)
	}
	if err := checkBatches(batch, seq); err != nil {
		return nil, fmt.Errorf("data: %s: %w", name, err)
	}
	e := &Evaluation{batch: batch, seq: seq}
	read := 0
	for _, text := range documents {
		e.add(tok, text, apart)
		read += len(text)
	}
	if len(e.ids) < 2 {
		return nil,
			fmt.Errorf("data: %s: %d bytes of held-out text make %d tokens, want at least 2", name,
				read, len(e.ids))
	}
	targets, err := tok.Decode(e.ids[1:])
	if err != nil {
		return nil, fmt.Errorf("data: %s: %w", name, err)
	}
	if e.bytes = len(targets); e.bytes == 0 {
		return nil, fmt.Errorf("data: %s: %d bytes of held-out text make %d tokens, and after "+
			"the first one there is no text left to predict", name, read, len(e.ids))
	}
	return e, nil
}

// add appends a document's tokens. If documents are to be kept apart, it also notes where it
// begins: with the token that ends the one before, as in a Batch.
func (e *Evaluation) add(tok tokenizer.Tokenizer, text []byte, apart bool) {
	ids := tok.Encode(text)
	if !apart {
		e.ids = append(e.ids, ids...)
		return
	}
	begin := len(e.ids)
	end, ended := tok.(tokenizer.DocumentEnder)
	ended = ended && end.EndOfDocument() >= 0
	if ended && begin > 0 {
		begin--
		e.begins[begin] = begin
	}
	if ended {
		ids = append(ids, end.EndOfDocument())
	}
	e.ids = append(e.ids, ids...)
	for len(e.begins) < len(e.ids) {
		e.begins = append(e.begins, begin)
	}
}

// Tokens returns the number of targets in all batches together.
func (e *Evaluation) Tokens() int { return len(e.ids) - 1 }

// Seq returns the number of tokens in a sequence.
func (e *Evaluation) Seq() int { return e.seq }

// IDs yields all tokens, those of the first sequence first.
func (e *Evaluation) IDs() iter.Seq[int] { return slices.Values(e.ids) }

// Bytes returns the number of bytes that the targets stand for.
func (e *Evaluation) Bytes() int { return e.bytes }

// Batches yields the batches in order. A batch's memory is used again for the following one.
func (e *Evaluation) Batches() iter.Seq[Batch] {
	return func(yield func(Batch) bool) {
		b := newBatch(e.batch * e.seq)
		if e.begins != nil {
			b.Starts = make([]int, len(b.Inputs))
		}
		for start := 0; start < e.Tokens(); start += len(b.Inputs) {
			b.Count = copy(b.Targets, e.ids[start+1:])
			copy(b.Inputs, e.ids[start:start+b.Count])
			for i := b.Count; i < len(b.Inputs); i++ {
				b.Inputs[i], b.Targets[i] = 0, -1
			}
			for i := range b.Starts { // rows that are left over belong to the last document
				at := min(start+i, len(e.begins)-1)
				b.Starts[i] = max(0, e.begins[at]-(start+i-i%e.seq))
			}
			if !yield(b) {
				return
			}
		}
	}
}

// Score turns the sum of the losses of all targets, in nats, into two figures. They are the mean
// loss in nats per token, and bits per byte: sum / (ln 2 · bytes). A batch adds its mean loss times
// its Count to the sum.
func (e *Evaluation) Score(sum float64) (loss, bitsPerByte float64) {
	return sum / float64(e.Tokens()), sum / math.Ln2 / float64(e.Bytes())
}
