package chatdata

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/kasmina-go/kasmina/llm/data"
)

// A Loader returns an endless series of batches of packed sequences. Each epoch goes through all rows
// in a new order that depends only on the seed and the epoch. A Loader is not safe for concurrent
// use.
type Loader struct {
	sequences []Sequence
	pairs     *Pairs  // whose answers the sequences are, two for each pair; nil for other data
	rows      [][]int // indices of the sequences, or of the pairs, in each row
	targets   []int   // number of targets, or of pairs, in each row
	vocab     int     // larger than every id
	config    data.LoaderConfig
	state     data.LoaderState
	batch     data.Batch

	order []int // indices of the rows, in the order of the epoch
	epoch int64 // epoch that order belongs to, or -1
}

// NewLoader packs sequences into rows of c.Seq tokens and returns a Loader at the start of its first
// epoch.
//
// The batches specify where each sequence of a row starts, so that attention does not reach from one
// sequence into another. The target of every token that is not learned is -1, as are the targets in
// the unused rest of a row.
//
// A sequence of c.Seq+1 tokens still fits, because its last token is only a target. It is an error if
// a sequence is longer, or if there is nothing to learn at all. Sequences without learned tokens are
// left out, so that every batch contains targets.
func NewLoader(sequences []Sequence, c data.LoaderConfig) (*Loader, error) {
	if c.Batch < 1 || c.Seq < 1 {
		return nil, fmt.Errorf("chatdata: NewLoader: batches of %d rows of %d tokens, want at least 1 of each",
			c.Batch, c.Seq)
	}

	lengths, learned := make([]int, len(sequences)), false
	for i, s := range sequences {
		if len(s.Learn) != len(s.IDs) {
			return nil, fmt.Errorf("chatdata: NewLoader: %s: %d tokens with a mask of %d", s.Location(),
				len(s.IDs), len(s.Learn))
		}
		if lengths[i] = max(0, len(s.IDs)-1); lengths[i] > c.Seq {
			return nil, fmt.Errorf("chatdata: NewLoader: %s has %d tokens, and a row of a batch has room for %d",
				s.Location(), len(s.IDs), c.Seq+1)
		}
		if s.targets() == 0 {
			lengths[i] = c.Seq + 1 // Pack leaves out sequences longer than a row
			continue
		}
		learned = true
	}

	if !learned {
		return nil, errors.New("chatdata: NewLoader: there is nothing to learn")
	}

	l := newLoader(sequences, Pack(lengths, c.Seq), c)
	for r, row := range l.rows {
		for _, i := range row {
			l.targets[r] += sequences[i].targets()
		}
	}
	return l, nil
}

// newLoader returns a loader without the numbers of targets.
func newLoader(sequences []Sequence, rows [][]int, c data.LoaderConfig) *Loader {
	l := &Loader{sequences: sequences, rows: rows, targets: make([]int, len(rows)), config: c,
		state: data.LoaderState{Seed: c.Seed, Seq: c.Seq, Data: fingerprint(sequences)}, epoch: -1}
	for _, s := range sequences {
		if s.targets() > 0 {
			l.vocab = max(l.vocab, slices.Max(s.IDs)+1)
		}
	}

	n := c.Batch * c.Seq
	l.batch = data.Batch{Inputs: make([]int, n), Targets: make([]int, n), Starts: make([]int, n),
		Positions: make([]int, n)}
	return l
}

// targets returns the number of learned tokens. The first token cannot be learned, because nothing
// precedes it.
func (s Sequence) targets() (n int) {
	for _, learn := range s.Learn[min(1, len(s.Learn)):] {
		if learn {
			n++
		}
	}
	return n
}

// fingerprint returns a string that identifies the tokens and masks of sequences.
func fingerprint(sequences []Sequence) string {
	h := sha256.New()
	var buf []byte
	for _, s := range sequences {
		buf = binary.AppendUvarint(buf[:0], uint64(len(s.IDs)))
		for i, id := range s.IDs {
			learn := uint64(0)
			if s.Learn[i] {
				learn = 1
			}
			buf = binary.AppendUvarint(buf, uint64(id)<<1|learn)
		}
		h.Write(buf)
	}

	return "chat-" + hex.EncodeToString(h.Sum(nil))
}

// Rows returns the number of rows into which the sequences are packed.
func (l *Loader) Rows() int { return len(l.rows) }

// Config returns the configuration that was passed to NewLoader.
func (l *Loader) Config() data.LoaderConfig { return l.config }

// VocabSize returns a number that is larger than every token id.
func (l *Loader) VocabSize() int { return l.vocab }

// Tokenizer returns "", because sequences do not record which tokenizer produced them.
func (l *Loader) Tokenizer() string { return "" }

// CountTargets returns the number of tokens to learn in the given number of next batches, without
// advancing the loader.
func (l *Loader) CountTargets(batches int) (n int) {
	state, order, epoch := l.state, l.order, l.epoch
	for range batches * l.config.Batch {
		n += l.targets[l.nextRow()]
	}
	l.state, l.order, l.epoch = state, order, epoch
	return n
}

// KnowsDocuments reports that batches specify where sequences start.
func (l *Loader) KnowsDocuments() bool { return true }

// State returns the loader's position. A loader set to it continues with the batch that Next would
// return.
func (l *Loader) State() data.LoaderState { return l.state }

// SetState moves the loader to a position returned by State. The batch size may differ. The error is
// a [data.ErrChanged] if the state belongs to different data.
func (l *Loader) SetState(s data.LoaderState) error {
	switch {
	case s.Data != l.state.Data:
		return fmt.Errorf("chatdata: Loader.SetState: %w", data.ErrChanged)
	case s.Seq != l.state.Seq:
		return fmt.Errorf("chatdata: Loader.SetState: the state has rows of %d tokens, and the loader has rows of %d",
			s.Seq, l.state.Seq)
	case s.Epoch < 0 || s.Next < 0 || s.Next > int64(len(l.rows)):
		return fmt.Errorf("chatdata: Loader.SetState: the position is invalid: epoch %d, row %d of %d", s.Epoch, s.Next, len(l.rows))
	}

	l.state = s
	l.epoch = -1
	return nil
}

// Next returns the next batch. Its memory is reused by the following call.
func (l *Loader) Next() (data.Batch, error) {
	if l.pairs != nil && l.pairs.references == nil {
		return data.Batch{}, errors.New("chatdata: the log-probabilities of the pairs from before training are " +
			"missing: add llm.NewReferences to the trainer")
	}

	l.batch.Count = 0
	for i := range l.config.Batch {
		l.fill(i*l.config.Seq, l.rows[l.nextRow()])
	}
	return l.batch, nil
}

// nextRow moves the state past one row and returns its index in rows.
func (l *Loader) nextRow() int {
	if l.state.Next >= int64(len(l.rows)) {
		l.state.Epoch++
		l.state.Next = 0
	}

	if l.epoch != l.state.Epoch {
		l.epoch = l.state.Epoch
		l.order = rand.New(rand.NewPCG(l.state.Seed, uint64(l.epoch))).Perm(len(l.rows))
	}

	row := l.order[l.state.Next]
	l.state.Next++
	return row
}

// fill writes a row to the batch, from a position on.
func (l *Loader) fill(at int, row []int) {
	b, start := &l.batch, 0
	for _, i := range l.sequencesOf(row) {
		s := l.sequences[i]
		n := len(s.IDs) - 1
		if n < 1 {
			continue
		}
		copy(b.Inputs[at+start:], s.IDs[:n])
		for j := range n {
			target := -1
			if s.Learn[j+1] {
				target = s.IDs[j+1]
				if l.pairs == nil {
					b.Count++
				}
			}
			b.Targets[at+start+j] = target
			b.Starts[at+start+j] = start
			b.Positions[at+start+j] = j
		}
		if l.pairs != nil {
			l.pairs.fill(b, at, start, i)
		}
		start += n
	}

	// The rest of the row is padding: a sequence without targets.
	for j := start; j < l.config.Seq; j++ {
		if l.pairs != nil {
			b.Answers[at+j], b.Reference[at+j] = -1, 0
		}
		b.Inputs[at+j], b.Targets[at+j], b.Starts[at+j], b.Positions[at+j] = 0, -1, start, j-start
	}
}

// InUse returns the batch that Next returned last, or a batch of zeros before the first call.
func (l *Loader) InUse() data.Batch { return l.batch }

// Sequences returns the sequences of the loader.
func (l *Loader) Sequences() []Sequence { return slices.Clip(l.sequences) }

// Evaluation packs held-out sequences for evaluations in batches of rows of seq tokens. Its bits per byte
// count only the bytes of the learned text.
func (e *Encoder) Evaluation(sequences []Sequence, batch, seq int) (*data.Evaluation, error) {
	l, err := NewLoader(sequences, data.LoaderConfig{Batch: 1, Seq: seq})
	if err != nil {
		return nil, err
	}

	var rows data.Batch
	for range l.Rows() {
		b, err := l.Next()
		if err != nil {
			return nil, err
		}
		rows.Inputs, rows.Targets = append(rows.Inputs, b.Inputs...), append(rows.Targets, b.Targets...)
		rows.Starts, rows.Positions = append(rows.Starts, b.Starts...), append(rows.Positions, b.Positions...)
	}

	return data.NewPackedEvaluation(rows, max(1, len(e.learnedText(sequences))), batch, seq)
}
