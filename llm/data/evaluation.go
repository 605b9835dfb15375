package data

import (
	"fmt"
	"iter"
	"math"
	"slices"
	"sync"

	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// An Evaluation is held-out text divided into a fixed list of batches. Every token except the first is a
// target exactly once. Unused rows of the last batch have the target -1. Methods may be called
// concurrently.
type Evaluation struct {
	ids       []int
	docStarts []int  // for each token, the token that starts its document; nil if documents are unknown
	packed    *Batch // packed sequences instead of ids and docStarts; may be nil
	bytes     int
	batch     int
	seq       int

	hashed sync.Once
	hash   string
}

// Fingerprint identifies the tokens and their division into batches.
func (e *Evaluation) Fingerprint() string {
	e.hashed.Do(func() {
		if e.packed != nil {
			e.hash = fingerprintOf(fmt.Sprint("packed evaluation ", e.batch, e.seq, e.bytes),
				fmt.Sprint(*e.packed))
			return
		}
		e.hash = fingerprintOf(fmt.Sprint("evaluation ", e.batch, e.seq, e.bytes),
			fmt.Sprint(e.ids, e.docStarts))
	})
	return e.hash
}

// NewEvaluation encodes held-out text, such as the result of [Text.Sample], and divides it into batches of the given
// number of sequences of seq tokens. It returns an error unless the text has at least two tokens and the tokens after
// the first represent at least one byte.
func NewEvaluation(text []byte, tok tokenizer.Tokenizer, batch, seq int) (*Evaluation, error) {
	return newEvaluation("NewEvaluation", [][]byte{text}, false, tok, batch, seq)
}

// NewDocumentEvaluation is like [NewEvaluation] for several documents, or parts of documents, and a
// model with Config.Documents. The batches contain the start positions of the documents. Each
// document is encoded separately. If the tokenizer is a [tokenizer.DocumentEnder] with an
// end-of-document token, that token follows each document and is a target as well.
func NewDocumentEvaluation(documents [][]byte, tok tokenizer.Tokenizer,
	batch, seq int) (*Evaluation, error) {
	return newEvaluation("NewDocumentEvaluation", documents, true, tok, batch, seq)
}

func newEvaluation(name string, documents [][]byte, separate bool, tok tokenizer.Tokenizer,
	batch, seq int) (*Evaluation, error) {
	if err := checkBatches(batch, seq); err != nil {
		return nil, fmt.Errorf("data: %s: %w", name, err)
	}

	e := &Evaluation{batch: batch, seq: seq}
	read := 0
	for _, text := range documents {
		e.add(tok, text, separate)
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

// add appends the tokens of a document. If separate is set, it also records where the document starts,
// which is at the token that ends the previous document, as in a Batch.
func (e *Evaluation) add(tok tokenizer.Tokenizer, text []byte, separate bool) {
	ids := tok.Encode(text)
	if !separate {
		e.ids = append(e.ids, ids...)
		return
	}

	begin := len(e.ids)
	end, ended := tok.(tokenizer.DocumentEnder)
	ended = ended && end.EndOfDocument() >= 0
	if ended && begin > 0 {
		begin--
		e.docStarts[begin] = begin
	}

	if ended {
		ids = append(ids, end.EndOfDocument())
	}

	e.ids = append(e.ids, ids...)
	for len(e.docStarts) < len(e.ids) {
		e.docStarts = append(e.docStarts, begin)
	}
}

// Tokens returns the total number of targets.
func (e *Evaluation) Tokens() int {
	if e.packed != nil {
		return e.packed.Count
	}
	return len(e.ids) - 1
}

// Seq returns the number of tokens in a sequence.
func (e *Evaluation) Seq() int { return e.seq }

// IDs yields all tokens in the order of the sequences.
func (e *Evaluation) IDs() iter.Seq[int] {
	if e.packed != nil {
		return e.packedIDs()
	}
	return slices.Values(e.ids)
}

// Bytes returns the number of text bytes that the targets represent.
func (e *Evaluation) Bytes() int { return e.bytes }

// Batches yields the batches in order. The memory of a batch is reused for the next one.
func (e *Evaluation) Batches() iter.Seq[Batch] {
	if e.packed != nil {
		return e.packedBatches
	}

	return func(yield func(Batch) bool) {
		b := newBatch(e.batch * e.seq)
		if e.docStarts != nil {
			b.Starts = make([]int, len(b.Inputs))
		}

		for start := 0; start < e.Tokens(); start += len(b.Inputs) {
			b.Count = copy(b.Targets, e.ids[start+1:])
			copy(b.Inputs, e.ids[start:start+b.Count])
			for i := b.Count; i < len(b.Inputs); i++ {
				b.Inputs[i], b.Targets[i] = 0, -1
			}
			for i := range b.Starts { // unused rows belong to the last document
				at := min(start+i, len(e.docStarts)-1)
				b.Starts[i] = max(0, e.docStarts[at]-(start+i-i%e.seq))
			}
			if !yield(b) {
				return
			}
		}
	}
}

// Score converts the sum of the losses of all targets, in nats, to the mean loss in nats per token
// and to bits per byte, sum / (ln 2 · bytes). To form the sum, add the mean loss of each batch
// times its Count. Preference pairs have a loss per pair, and no bits per byte.
func (e *Evaluation) Score(sum float64) (loss, bitsPerByte float64) {
	if e.packed != nil && e.packed.Answers != nil {
		return sum / float64(e.Tokens()), math.NaN()
	}
	return sum / float64(e.Tokens()), sum / math.Ln2 / float64(e.Bytes())
}
