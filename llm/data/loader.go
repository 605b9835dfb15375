package data

import (
	"errors"
	"fmt"
	"math/bits"

	"github.com/kasmina-go/kasmina/internal/guard"
	"github.com/kasmina-go/kasmina/internal/splitmix"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// A Batch holds sequences of token ids and, for each id, the id that follows it in the text. Both are
// [batch, seq] in row-major order. A target of -1 is ignored.
type Batch struct {
	Inputs, Targets []int
	Count           int // number of targets other than -1

	// Share is the weight of the batch's mean loss in the loss of its optimizer step. A trainer sets
	// it if batches have different numbers of targets. 0 means that all batches are weighted equally.
	Share float64

	// Key seeds the random numbers of dropout. A trainer gives each batch of a run its own key.
	Key int

	// Starts [batch, seq] is the start of each token's document, as a position in the token's sequence.
	// It is 0 if the document starts before the sequence. Starts is nil if the boundaries of documents
	// are unknown. The token that ends a document belongs to the next document and starts it, as in
	// SampleText. Targets ignore the boundaries of documents.
	Starts []int

	// Positions [batch, seq] is the position of each token, for models with learned position
	// embeddings. If it is nil, positions count from the start of each sequence of the batch.
	Positions []int

	// Answers [batch, seq] assigns each target to an answer of a preference pair: 2·i for the chosen
	// answer of pair i, 2·i+1 for the rejected one, and negative for all other tokens. It is nil if the
	// batch does not consist of pairs; otherwise, Count is the number of pairs.
	Answers []int

	// Reference [batch, seq] holds log-probabilities from before training. Only the sum over the tokens
	// of an answer matters. It is nil if Answers is nil.
	Reference []float64
}

// LoaderConfig configures the size of the batches of a Loader and the seed of their order.
type LoaderConfig struct {
	Batch int // sequences in a batch
	Seq   int // tokens in a sequence
	Seed  uint64
}

// LoaderState is a position of a Loader in its endless sequence of batches.
type LoaderState struct {
	Seed  uint64 `json:"seed"`
	Epoch int64  `json:"epoch"` // completed passes over the data
	Next  int64  `json:"next"`  // windows of this epoch returned so far
	Seq   int    `json:"seq"`
	Data  string `json:"data"` // fingerprint of the tokens
}

// A Loader returns an endless sequence of batches of a text, in an order that depends only on the seed.
// For each epoch it divides the text into windows of Seq tokens, with boundaries that differ from epoch
// to epoch. It returns them in a random order without storing a table. While a batch is in use, the
// Loader reads the next one in the background. It is not safe for concurrent use.
type Loader struct {
	tokens Tokens
	config LoaderConfig
	state  LoaderState    // of the batch that Next will return
	starts documentStarts // nil if the tokens have no known documents
	ahead  chan readAhead // receives that batch while it is being read; nil otherwise
	spare  Batch          // memory of the batch before the one in use
	inUse  Batch
}

// maxBatchTokens limits the memory of a Loader, which holds several numbers for each token of a
// batch, to a few GiB.
const maxBatchTokens = 1 << 26

type readAhead struct {
	batch Batch
	after LoaderState
	err   error
}

// NewLoader returns a Loader at the start of its first epoch. It returns an error if there are too
// few tokens for one sequence and the target of its last token, or if a batch exceeds 2²⁶ tokens.
func NewLoader(tokens Tokens, c LoaderConfig) (*Loader, error) {
	if tokens == nil {
		return nil, fmt.Errorf("data: NewLoader: the tokens are nil")
	}

	if err := checkBatches(c.Batch, c.Seq); err != nil {
		return nil, fmt.Errorf("data: NewLoader: %w", err)
	}

	if c.Batch > maxBatchTokens/c.Seq {
		return nil, fmt.Errorf("data: NewLoader: batches of %d sequences of %d tokens, want at "+
			"most %d tokens; TrainConfig.Accumulate adds up the gradients of several "+
			"batches", c.Batch, c.Seq, maxBatchTokens)
	}

	if tokens.Len() < int64(c.Seq)+1 {
		return nil, fmt.Errorf("data: NewLoader: the text has %d tokens, and one sequence of %d "+
			"with its last target needs %d: use more text or shorter "+
			"sequences", tokens.Len(), c.Seq, c.Seq+1)
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

// maxSide is the largest number of sequences in a batch and of tokens in a sequence. Numbers
// derived from them then fit into an int.
const maxSide = 1 << 24

// checkBatches returns an error unless both numbers are in the valid range.
func checkBatches(sequences, seq int) error {
	if min(sequences, seq) < 1 || max(sequences, seq) > maxSide {
		return fmt.Errorf("batches of %d sequences of %d tokens, want 1 to %d of each", sequences,
			seq, maxSide)
	}
	return nil
}

func newBatch(n int) Batch {
	return Batch{Inputs: make([]int, n), Targets: make([]int, n), Count: n}
}

// documentStarts sets starts[i] to the start of token i's document, as a position in the window, or to 0
// if the document starts before the window. offset is the position of the window in the text.
type documentStarts func(starts, window []int, offset int64)

// startsOf returns a function that finds the documents among the tokens. It is nil unless a token
// ends each document or the tokens are bytes of files.
func startsOf(t Tokens) documentStarts {
	if b, ok := t.(byteTokens); ok {
		return b.starts
	}

	e, ok := t.(tokenizer.DocumentEnder)
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

// Next returns the next batch. Its memory is reused after the next call. If Next returns an error,
// the following call tries to read the same batch again.
func (l *Loader) Next() (Batch, error) {
	if l.ahead == nil {
		l.readAhead()
	}

	r := <-l.ahead
	l.ahead = nil
	if r.err != nil {
		l.spare = r.batch
		return Batch{}, fmt.Errorf("data: Loader.Next: %w", r.err)
	}

	l.spare, l.inUse, l.state = l.inUse, r.batch, r.after
	l.readAhead()
	return l.inUse, nil
}

// readAhead starts to read the batch at l.state into l.spare. The channel has a buffer for the
// result, so that the goroutine ends even if nothing receives it.
func (l *Loader) readAhead() {
	l.ahead = make(chan readAhead, 1)
	go func(ahead chan<- readAhead, batch Batch, s LoaderState) {
		err := guard.Call(errTokens, "Tokens", func() error { return l.read(batch, &s) })
		ahead <- readAhead{batch: batch, after: s, err: err}
	}(l.ahead, l.spare, l.state)
}

// errTokens is wrapped by the error for a batch if a method of its Tokens panicked.
var errTokens = errors.New("a method of the tokens panicked")

// read fills a batch from the position s and advances s.
func (l *Loader) read(batch Batch, s *LoaderState) error {
	window := make([]int, s.Seq+1)
	for i := 0; i < len(batch.Inputs); i += s.Seq {
		offset := s.advance(l.tokens.Len())
		if err := l.tokens.ReadTokens(window, offset); err != nil {
			return err
		}
		copy(batch.Inputs[i:], window[:s.Seq])
		copy(batch.Targets[i:], window[1:])
		if l.starts != nil {
			l.starts(batch.Starts[i:][:s.Seq], window, offset)
		}
	}

	return nil
}

// advance moves the state past one window and returns the index of the window's first token. The windows
// of an epoch start at shift, shift + Seq, shift + 2 Seq and so on. shift is reduced if it would leave no
// complete window.
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

// windows returns the number of windows in the epoch and the start of the first one.
func (s *LoaderState) windows(tokens int64) (n, shift int64) {
	seq := int64(s.Seq)
	shift = min(int64(splitmix.Mix(s.key())%uint64(seq)), tokens-1-seq)
	return (tokens - 1 - shift) / seq, shift
}

// key returns the key of the epoch's order.
func (s *LoaderState) key() uint64 { return splitmix.Mix(splitmix.Mix(s.Seed) + uint64(s.Epoch)) }

// maxEpoch is the largest epoch in a valid state. No run reaches it, and counting from it cannot
// overflow.
const maxEpoch = 1 << 62

// Tokens returns the tokens that the loader reads.
func (l *Loader) Tokens() Tokens {
	return l.tokens
}

// VocabSize returns the size of the vocabulary of the tokens.
func (l *Loader) VocabSize() int {
	return l.tokens.VocabSize()
}

// Tokenizer identifies the tokenizer of the tokens, like their method of that name.
func (l *Loader) Tokenizer() string {
	return l.tokens.Tokenizer()
}

// Config returns the configuration given to NewLoader.
func (l *Loader) Config() (c LoaderConfig) {
	if l != nil {
		c = l.config
	}
	return c
}

// KnowsDocuments reports whether the batches contain the starts of documents.
func (l *Loader) KnowsDocuments() bool { return l != nil && l.starts != nil }

// InUse returns the batch that Next returned most recently. Before the first call of Next it is a
// batch of zeros.
func (l *Loader) InUse() (b Batch) {
	if l != nil {
		b = l.inUse
	}
	return b
}

// State returns the position of the loader. A loader set to it continues with the batch that Next
// would return.
func (l *Loader) State() (s LoaderState) {
	if l != nil {
		s = l.state
	}
	return s
}

// SetState moves the loader to a position that State returned, including its seed. The batch size may
// differ. SetState returns an error if the sequence length differs, if the position is invalid, or if
// the state belongs to other data, in which case the error wraps ErrChanged. After an error, the
// loader is unchanged.
func (l *Loader) SetState(s LoaderState) error {
	if s.Data != l.state.Data {
		return fmt.Errorf("data: Loader.SetState: %w: the state's fingerprint is %q, that of the "+
			"tokens is %q", ErrChanged, s.Data, l.state.Data)
	}

	if s.Seq != l.config.Seq {
		return fmt.Errorf("data: Loader.SetState: the state has sequences of %d tokens, the "+
			"loader %d", s.Seq, l.config.Seq)
	}

	if windows, _ := s.windows(l.tokens.Len()); s.Epoch < 0 || s.Epoch > maxEpoch || s.Next < 0 ||
		s.Next > windows {
		return fmt.Errorf("data: Loader.SetState: window %d of epoch %d, want one of 0 to %d in "+
			"an epoch of 0 to %d", s.Next, s.Epoch, windows, int64(maxEpoch))
	}

	if l.ahead != nil {
		l.spare = (<-l.ahead).batch
		l.ahead = nil
	}

	l.state = s
	return nil
}

// permute returns the image of i under a pseudorandom permutation of [0, n). It is a Feistel
// network of four rounds over the smallest even number of bits that hold n-1. While the result is
// outside [0, n), the network is applied again (cycle walking; Black and Rogaway, "Ciphers with
// arbitrary finite domains", 2002).
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
