package data

import (
	"errors"
	"fmt"
	"math/bits"

	"github.com/kasmina-go/kasmina/internal/guard"
	"github.com/kasmina-go/kasmina/internal/splitmix"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// A Batch holds sequences of token ids and for each id the one that follows it in the text, both
// [batch, seq] by rows. A target of -1 marks a row that counts for nothing.
type Batch struct {
	Inputs, Targets []int
	Count           int // targets that count

	// Starts [batch, seq] is the position in its sequence at which the document of each token
	// begins. It is 0 where that lies before the sequence, and nil where nobody knows of documents.
	// The token that ends a document counts to the next one: that begins with it, as it does in
	// SampleText. Targets know no borders.
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

// A Loader deals out batches of a text without end, in an order that depends on the seed alone. For
// each epoch the text is cut into windows of Seq tokens, at boundaries that move from epoch to
// epoch. They are taken in a random order that needs no table of them. While a batch is in use, the
// next one is being read. A Loader is for one goroutine at a time.
type Loader struct {
	tokens Tokens
	config LoaderConfig
	state  LoaderState    // of the batch that Next returns next
	starts documentStarts // nil where the tokens do not know
	ahead  chan readAhead // that batch, being read; nil when nothing is
	spare  Batch          // the memory of the batch before the one that is in use
	inUse  Batch
}

// maxBatchTokens keeps what a Loader holds of a batch, some numbers for each token, under a few
// GiB.
const maxBatchTokens = 1 << 26

type readAhead struct {
	batch Batch
	after LoaderState
	err   error
}

// NewLoader returns a Loader at the start of its first epoch. It is an error when the tokens do not
// suffice for one sequence and the target of its last token. So is a batch of more than 2²⁶ tokens.
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
			"with its last target needs %d: it takes more text, or shorter "+
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

// maxSide is how many sequences a batch may have, and tokens a sequence: what is derived from them
// stays inside the range of int.
const maxSide = 1 << 24

// checkBatches returns an error unless batches of that size can be.
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

// documentStarts sets starts[i] to where the document of token i of a window begins, or 0 if before
// it. The window's tokens stand at the given offset.
type documentStarts func(starts, window []int, offset int64)

// startsOf returns how to find the documents among tokens, where each ends with a token of its own
// or tokens are bytes of files. It is nil for others.
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

var errNoLoader = errors.New("the loader is nil or its zero value: NewLoader makes one")

// Next returns the next batch. Its memory is used again after the following call. After an error
// the same batch is tried again.
func (l *Loader) Next() (Batch, error) {
	if l == nil || l.tokens == nil {
		return Batch{}, fmt.Errorf("data: Loader.Next: %w", errNoLoader)
	}
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

// readAhead starts to read the batch at l.state into l.spare. The channel has room for the result,
// so that the goroutine ends even when nobody asks for it.
func (l *Loader) readAhead() {
	l.ahead = make(chan readAhead, 1)
	go func(ahead chan<- readAhead, batch Batch, s LoaderState) {
		err := guard.Call(errTokens, "Tokens", func() error { return l.read(batch, &s) })
		ahead <- readAhead{batch: batch, after: s, err: err}
	}(l.ahead, l.spare, l.state)
}

// errTokens is wrapped by the error of a batch whose tokens panicked.
var errTokens = errors.New("a method of the tokens panicked")

// read fills a batch from a state on, and moves the state.
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

// advance moves the state past one window and returns the token at which that window starts. The
// boundaries of an epoch are at shift, shift + Seq, shift + 2 Seq and so on. A shift that would
// leave no whole window is cut back.
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

// Tokens returns what the loader reads, and nil if nobody has made it.
func (l *Loader) Tokens() Tokens {
	if l == nil {
		return nil
	}
	return l.tokens
}

// Config returns that of NewLoader.
func (l *Loader) Config() (c LoaderConfig) {
	if l != nil {
		c = l.config
	}
	return c
}

// KnowsDocuments reports whether batches say where documents start.
func (l *Loader) KnowsDocuments() bool { return l != nil && l.starts != nil }

// InUse returns the batch that Next returned last: one of zeros before the first.
func (l *Loader) InUse() (b Batch) {
	if l != nil {
		b = l.inUse
	}
	return b
}

// State returns the loader's place: a loader set to it continues with the batch that Next returns
// next.
func (l *Loader) State() (s LoaderState) {
	if l != nil {
		s = l.state
	}
	return s
}

// SetState moves the loader to a place that State returned, its seed included; the batch size may
// differ. A state of other data is an ErrChanged, and a state that is refused changes nothing.
func (l *Loader) SetState(s LoaderState) error {
	if l == nil || l.tokens == nil {
		return fmt.Errorf("data: Loader.SetState: %w", errNoLoader)
	}
	if s.Data != l.state.Data {
		return fmt.Errorf("data: Loader.SetState: %w: the state's fingerprint is %q, that of the "+
			"tokens is %q", ErrChanged, s.Data, l.state.Data)
	}
	if s.Seq != l.config.Seq {
		return fmt.Errorf("data: Loader.SetState: the state is of sequences of %d tokens, the "+
			"loader's have %d", s.Seq, l.config.Seq)
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
// network of four rounds over the least even number of bits that hold n-1. It is applied again
// while the result lies outside (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite
// domains", 2002).
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
