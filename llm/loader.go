package llm

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"math/bits"
	"slices"
	"sync"

	"github.com/kasmina-go/kasmina/internal/splitmix"
)

// Tokens is text as token ids that can be read anywhere, which is all that a Loader asks of its data. The ids lie inside
// the vocabulary of the tokenizer that made them. Where one of them ends each document, a method EndOfDocument() int says which.
type Tokens interface {
	Len() int64
	// Tokenizer returns the name of the tokenizer, and VocabSize the size of its vocabulary.
	Tokenizer() string
	VocabSize() int
	// ReadTokens fills dst with the tokens from the given offset on.
	ReadTokens(dst []int, offset int64) error
	// Fingerprint identifies the text and its tokenizer, so that a run is not resumed on other data.
	Fingerprint() string
}

// Tokenize returns a text's tokens. With a ByteTokenizer they are read from the text's files when asked for. Any other
// tokenizer encodes the whole text now, in pieces of up to 1 MiB that end after a newline where there is one, and its
// tokens are kept in memory at four bytes each. It takes the text's fingerprint, which after
// [Text.Fingerprint] is known.
func Tokenize(text *Text, tok Tokenizer) (Tokens, error) {
	if text == nil || tok == nil {
		return nil, fmt.Errorf("llm: Tokenize: text and tokenizer must not be nil")
	}
	fingerprint, err := text.Fingerprint(context.Background(), nil)
	if err != nil {
		return nil, fmt.Errorf("llm: Tokenize: %w", err)
	}
	if _, ok := tok.(ByteTokenizer); ok {
		return byteTokens{text: text, fingerprint: fingerprint}, nil
	}
	t := &memoryTokens{tokenizer: tok.Name(), vocabSize: tok.VocabSize(), fingerprint: fingerprintOf(tok.Name(), fingerprint)}
	piece := make([]byte, 1<<20)
	for offset := int64(0); offset < text.Size(); {
		n := int(min(int64(len(piece)), text.Size()-offset))
		if _, err := text.ReadAt(piece[:n], offset); err != nil {
			return nil, fmt.Errorf("llm: Tokenize: %w", err)
		}
		if newline := bytes.LastIndexByte(piece[:n], '\n'); newline >= 0 && offset+int64(n) < text.Size() {
			n = newline + 1
		}
		for _, id := range tok.Encode(piece[:n]) {
			if err := checkID(id, tok.VocabSize()); err != nil {
				return nil, fmt.Errorf("llm: Tokenize: tokenizer %s made %w", tok.Name(), err)
			}
			t.ids = append(t.ids, uint32(id))
		}
		offset += int64(n)
	}
	return t, nil
}

// fingerprintOf stands for tokens by how they are made and the fingerprint of their text.
func fingerprintOf(how, text string) string {
	return fmt.Sprintf("%x", sha256.Sum256(fmt.Appendf(nil, "%s %s", how, text)))
}

func checkID(id, vocabSize int) error {
	if id < 0 || id >= vocabSize || int64(id) > math.MaxUint32 {
		return fmt.Errorf("id %d, outside its vocabulary [0, %d)", id, vocabSize)
	}
	return nil
}

// byteTokens are the tokens of a ByteTokenizer.
type byteTokens struct {
	ByteTokenizer
	text        *Text
	fingerprint string
}

func (b byteTokens) Tokenizer() string   { return b.Name() }
func (b byteTokens) Len() int64          { return b.text.Size() }
func (b byteTokens) Fingerprint() string { return b.fingerprint }

func (b byteTokens) ReadTokens(dst []int, offset int64) error {
	raw := make([]byte, len(dst))
	if _, err := b.text.ReadAt(raw, offset); err != nil {
		return err
	}
	widen(dst, raw)
	return nil
}

// starts is documentStarts.
func (b byteTokens) starts(starts, _ []int, offset int64) {
	next, _ := slices.BinarySearch(b.text.ends, offset+1)
	start := 0
	for i := range starts {
		if offset+int64(i) == b.text.ends[next] {
			start, next = i, next+1
		}
		starts[i] = start
	}
}

type memoryTokens struct {
	ids         []uint32
	tokenizer   string
	vocabSize   int
	fingerprint string
}

func (m *memoryTokens) Tokenizer() string   { return m.tokenizer }
func (m *memoryTokens) VocabSize() int      { return m.vocabSize }
func (m *memoryTokens) Len() int64          { return int64(len(m.ids)) }
func (m *memoryTokens) Fingerprint() string { return m.fingerprint }

func (m *memoryTokens) ReadTokens(dst []int, offset int64) error {
	if offset < 0 || offset+int64(len(dst)) > m.Len() {
		return io.ErrUnexpectedEOF
	}
	for i := range dst {
		dst[i] = int(m.ids[offset+int64(i)])
	}
	return nil
}

// A Batch holds sequences of token ids and for each id the one that follows it in the text, both [batch, seq] by rows. A
// target of -1 marks a row that counts for nothing.
type Batch struct {
	Inputs, Targets []int
	Count           int // targets that count

	// Starts [batch, seq] is the position in its sequence at which the document of each token begins, or 0 where that lies
	// before the sequence; nil where nobody knows of documents. The token that ends a document counts to the next one: that
	// begins with it, as it does in SampleText. Targets know no borders.
	Starts []int
}

// LoaderConfig sizes a Loader's batches and seeds its order.
type LoaderConfig struct {
	Batch int // sequences in a batch
	Seq   int // tokens in a sequence
	Seed  uint64
}

// LoaderState is the place of a Loader in its endless stream of batches.
type LoaderState struct {
	Seed  uint64 `json:"seed"`
	Epoch int64  `json:"epoch"` // passes over the data that are complete
	Next  int64  `json:"next"`  // windows of this epoch that have been handed out
	Seq   int    `json:"seq"`
	Data  string `json:"data"` // fingerprint of the tokens
}

// A Loader deals out batches of a text without end, in an order that depends on the seed alone. For each epoch the text is
// cut into windows of Seq tokens, at boundaries that move from epoch to epoch, and these are taken in a random order that
// needs no table of them. While a batch is in use, the next one is being read.
type Loader struct {
	tokens Tokens
	config LoaderConfig
	state  LoaderState    // of the batch that Next returns next
	starts documentStarts // nil where the tokens do not know
	ahead  chan readAhead // that batch, being read; nil when nothing is
	spare  Batch          // the memory of the batch before the one that is in use
	inUse  Batch
}

// maxBatchTokens keeps what a Loader holds of a batch, some numbers for each token, under a few GiB.
const maxBatchTokens = 1 << 26

type readAhead struct {
	batch Batch
	after LoaderState
	err   error
}

// NewLoader returns a Loader at the start of its first epoch. It is an error when the tokens do not suffice for one
// sequence and the target of its last token, and when a batch has more than 2²⁶ tokens.
func NewLoader(tokens Tokens, c LoaderConfig) (*Loader, error) {
	if tokens == nil {
		return nil, fmt.Errorf("llm: NewLoader: the tokens are nil")
	}
	if err := checkBatches(c.Batch, c.Seq); err != nil {
		return nil, fmt.Errorf("llm: NewLoader: %w", err)
	}
	if c.Batch > maxBatchTokens/c.Seq {
		return nil, fmt.Errorf("llm: NewLoader: batches of %d sequences of %d tokens, want at most %d tokens; TrainConfig.Accumulate adds "+
			"up the gradients of several batches", c.Batch, c.Seq, maxBatchTokens)
	}
	if tokens.Len() < int64(c.Seq)+1 {
		return nil, fmt.Errorf("llm: NewLoader: the text has %d tokens, and one sequence of %d with its last target needs %d: "+
			"it takes more text, or shorter sequences", tokens.Len(), c.Seq, c.Seq+1)
	}
	l := &Loader{
		tokens: tokens,
		config: c,
		state:  LoaderState{Seed: c.Seed, Seq: c.Seq, Data: tokens.Fingerprint()},
		starts: startsOf(tokens),
		spare:  newBatch(c.Batch * c.Seq),
		inUse:  newBatch(c.Batch * c.Seq),
	}
	if l.starts != nil {
		l.spare.Starts, l.inUse.Starts = make([]int, c.Batch*c.Seq), make([]int, c.Batch*c.Seq)
	}
	return l, nil
}

// checkBatches returns an error unless batches of that size can be.
func checkBatches(sequences, seq int) error {
	if min(sequences, seq) < 1 || max(sequences, seq) > maxField {
		return fmt.Errorf("batches of %d sequences of %d tokens, want 1 to %d of each", sequences, seq, maxField)
	}
	return nil
}

func newBatch(n int) Batch {
	return Batch{Inputs: make([]int, n), Targets: make([]int, n), Count: n}
}

// documentStarts sets starts[i] to where the document of token i of a window begins, or 0 if before it. The window's tokens
// stand at the given offset.
type documentStarts func(starts, window []int, offset int64)

// startsOf returns how to find the documents among tokens that end each with a token of its own, or are bytes of files; nil
// for others.
func startsOf(t Tokens) documentStarts {
	if b, ok := t.(byteTokens); ok {
		return b.starts
	}
	e, ok := t.(documentEnder)
	if !ok || e.EndOfDocument() < 0 {
		return nil
	}
	end := e.EndOfDocument()
	return func(starts, window []int, _ int64) {
		start := 0
		for i := range starts {
			if window[i] == end {
				start = i
			}
			starts[i] = start
		}
	}
}

var errNoLoader = errors.New("the loader is nil or its zero value: NewLoader makes one")

// Next returns the next batch. Its memory is used again after the following call. After an error the same batch is tried
// again.
func (l *Loader) Next() (Batch, error) {
	if l == nil || l.tokens == nil {
		return Batch{}, fmt.Errorf("llm: Loader.Next: %w", errNoLoader)
	}
	if l.ahead == nil {
		l.readAhead()
	}
	r := <-l.ahead
	l.ahead = nil
	if r.err != nil {
		l.spare = r.batch
		return Batch{}, fmt.Errorf("llm: Loader.Next: %w", r.err)
	}
	l.spare, l.inUse, l.state = l.inUse, r.batch, r.after
	l.readAhead()
	return l.inUse, nil
}

// readAhead starts to read the batch at l.state into l.spare. The channel has room for the result, so that the goroutine
// ends even when nobody asks for it.
func (l *Loader) readAhead() {
	l.ahead = make(chan readAhead, 1)
	go func(ahead chan<- readAhead, batch Batch, s LoaderState) {
		window := make([]int, s.Seq+1)
		for i := 0; i < len(batch.Inputs); i += s.Seq {
			offset := s.advance(l.tokens.Len())
			if err := l.tokens.ReadTokens(window, offset); err != nil {
				ahead <- readAhead{batch: batch, err: err}
				return
			}
			copy(batch.Inputs[i:], window[:s.Seq])
			copy(batch.Targets[i:], window[1:])
			if l.starts != nil {
				l.starts(batch.Starts[i:][:s.Seq], window, offset)
			}
		}
		ahead <- readAhead{batch: batch, after: s}
	}(l.ahead, l.spare, l.state)
}

// advance moves the state past one window and returns the token at which that window starts. The boundaries of an epoch
// are at shift, shift + Seq, shift + 2 Seq and so on; a shift that would leave no whole window is cut back.
func (s *LoaderState) advance(tokens int64) int64 {
	seq := int64(s.Seq)
	windows, shift := s.windows(tokens)
	if s.Next >= windows {
		s.Epoch++
		s.Next = 0
		windows, shift = s.windows(tokens)
	}
	w := permute(uint64(s.Next), uint64(windows), s.key())
	s.Next++
	return shift + int64(w)*seq
}

// windows returns how many windows the epoch has and where the first one starts.
func (s *LoaderState) windows(tokens int64) (n, shift int64) {
	seq := int64(s.Seq)
	shift = min(int64(splitmix.Mix(s.key())%uint64(seq)), tokens-1-seq)
	return (tokens - 1 - shift) / seq, shift
}

// key returns the key of the epoch's order.
func (s *LoaderState) key() uint64 { return splitmix.Mix(splitmix.Mix(s.Seed) + uint64(s.Epoch)) }

// maxEpoch is the largest epoch that a state may be in. No run gets there, and counting on from it
// cannot overflow.
const maxEpoch = 1 << 62

// State returns the loader's place: a loader set to it continues with the batch that Next returns next.
func (l *Loader) State() LoaderState { return l.state }

// SetState moves the loader to a place that State returned, its seed included; the batch size may differ. A state of
// other data is an ErrDataChanged, and a state that is refused changes nothing.
func (l *Loader) SetState(s LoaderState) error {
	if l == nil || l.tokens == nil {
		return fmt.Errorf("llm: Loader.SetState: %w", errNoLoader)
	}
	if s.Data != l.state.Data {
		return fmt.Errorf("llm: Loader.SetState: %w: the state's fingerprint is %q, that of the tokens is %q", ErrDataChanged,
			s.Data, l.state.Data)
	}
	if s.Seq != l.config.Seq {
		return fmt.Errorf("llm: Loader.SetState: the state is of sequences of %d tokens, the loader's have %d", s.Seq, l.config.Seq)
	}
	if windows, _ := s.windows(l.tokens.Len()); s.Epoch < 0 || s.Epoch > maxEpoch || s.Next < 0 ||
		s.Next > windows {
		return fmt.Errorf("llm: Loader.SetState: window %d of epoch %d, want one of 0 to %d in an epoch of 0 to %d", s.Next,
			s.Epoch, windows, int64(maxEpoch))
	}
	if l.ahead != nil {
		l.spare = (<-l.ahead).batch
		l.ahead = nil
	}
	l.state = s
	return nil
}

// permute returns the image of i under a pseudorandom permutation of [0, n): a Feistel network of four rounds over the
// least even number of bits that hold n-1, applied again while the result lies outside (cycle walking; Black and Rogaway,
// "Ciphers with arbitrary finite domains", 2002).
func permute(i, n, key uint64) uint64 {
	half := (bits.Len64(n-1) + 1) / 2
	mask := uint64(1)<<half - 1
	for {
		left, right := i>>half, i&mask
		for round := range uint64(4) {
			left, right = right, left^(splitmix.Mix(key+round<<56+right)&mask)
		}
		if i = left<<half | right; i < n {
			return i
		}
	}
}

// Evaluation is held-out text cut into batches, always the same ones. Every token but the first is a target once; rows
// that are left over in the last batch have the target -1.
type Evaluation struct {
	ids    []int
	begins []int // the token that begins the document of each; nil where nobody knows
	bytes  int
	batch  int
	seq    int

	hashed sync.Once
	hash   string
}

// fingerprint stands for the tokens and how they are batched.
func (e *Evaluation) fingerprint() string {
	e.hashed.Do(func() {
		e.hash = fingerprintOf(fmt.Sprint("evaluation ", e.batch, e.seq, e.bytes), fmt.Sprint(e.ids, e.begins))
	})
	return e.hash
}

// NewEvaluation encodes the text, for batches of the given number of sequences of seq tokens. The text has to make at least
// two tokens, and those after the first have to stand for some of it.
func NewEvaluation(text []byte, tok Tokenizer, batch, seq int) (*Evaluation, error) {
	return newEvaluation("NewEvaluation", [][]byte{text}, false, tok, batch, seq)
}

// NewDocumentEvaluation is NewEvaluation of several documents, or parts of such, for a model with Config.Documents: batches say
// where they start. They are encoded one by one, and if the tokenizer is a BPE, or has a method EndOfDocument() int as a BPE
// has, that token follows each and is a target too.
func NewDocumentEvaluation(documents [][]byte, tok Tokenizer, batch, seq int) (*Evaluation, error) {
	return newEvaluation("NewDocumentEvaluation", documents, true, tok, batch, seq)
}

func newEvaluation(name string, documents [][]byte, apart bool, tok Tokenizer, batch, seq int) (*Evaluation, error) {
	if tok == nil {
		return nil, fmt.Errorf("llm: %s: the tokenizer is nil", name)
	}
	if err := checkBatches(batch, seq); err != nil {
		return nil, fmt.Errorf("llm: %s: %w", name, err)
	}
	e := &Evaluation{batch: batch, seq: seq}
	read := 0
	for _, text := range documents {
		e.add(tok, text, apart)
		read += len(text)
	}
	if len(e.ids) < 2 {
		return nil, fmt.Errorf("llm: %s: %d bytes of held-out text make %d tokens, want at least 2", name, read, len(e.ids))
	}
	targets, err := tok.Decode(e.ids[1:])
	if err != nil {
		return nil, fmt.Errorf("llm: %s: %w", name, err)
	}
	if e.bytes = len(targets); e.bytes == 0 {
		return nil, fmt.Errorf("llm: %s: %d bytes of held-out text make %d tokens, and after the first one there is no text left to predict",
			name, read, len(e.ids))
	}
	return e, nil
}

// add appends a document's tokens, and if documents are to be kept apart where it begins: with the token that ends the one
// before, as in a Batch.
func (e *Evaluation) add(tok Tokenizer, text []byte, apart bool) {
	ids := tok.Encode(text)
	if !apart {
		e.ids = append(e.ids, ids...)
		return
	}
	begin := len(e.ids)
	end, ended := tok.(documentEnder)
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

// Score turns the sum of the losses of all targets, in nats, into the mean loss in nats per token and bits per byte:
// sum / (ln 2 · bytes). A batch adds its mean loss times its Count to the sum.
func (e *Evaluation) Score(sum float64) (loss, bitsPerByte float64) {
	return sum / float64(e.Tokens()), sum / math.Ln2 / float64(e.Bytes())
}
