package chatdata

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/llm/data"
)

// Pairs are the preference pairs of a data set, packed into rows. Both answers of a pair share a row, but
// attention does not reach from one into the other.
//
// Pairs implement [github.com/kasmina-go/kasmina/llm.ReferencedPairs]: they hold the log-probability of
// each answer from before training.
type Pairs struct {
	all         *Loader // its batches are the rows in order
	references  []float64
	evaluations []data.Batch // their references are filled in later
}

// NewPairs packs preference pairs into rows of seq tokens, for batches of the given number of rows. The
// sequences come from [Encoder.Encode]: each chosen answer, followed by the rejected one, both with their
// prompts. It is an error if a pair does not fit into a row.
func NewPairs(sequences []Sequence, batch, seq int) (*Pairs, error) {
	switch {
	case batch < 1 || seq < 1:
		return nil, fmt.Errorf("chatdata: NewPairs: batches of %d rows of %d tokens, want at least 1 of each",
			batch, seq)
	case len(sequences) == 0:
		return nil, errors.New("chatdata: NewPairs: there are no pairs")
	case len(sequences)%2 != 0:
		return nil, fmt.Errorf("chatdata: NewPairs: there are %d answers, and a pair has two", len(sequences))
	}

	lengths := PairLengths(sequences)
	for i, s := range sequences {
		switch n := lengths[i/2]; {
		case len(s.Learn) != len(s.IDs):
			return nil, fmt.Errorf("chatdata: NewPairs: %s: %d tokens with a mask of %d", s.Location(),
				len(s.IDs), len(s.Learn))
		case s.targets() == 0:
			return nil, fmt.Errorf("chatdata: NewPairs: an answer of %s has no tokens", s.Location())
		case n > seq:
			return nil, fmt.Errorf("chatdata: NewPairs: the two answers of %s have %d tokens with their "+
				"prompts, and a row of a batch has room for %d: shorten them, or use longer rows", s.Location(), n, seq)
		}
	}

	p := &Pairs{}
	p.all = newLoader(sequences, Pack(lengths, seq), data.LoaderConfig{Batch: batch, Seq: seq})
	p.prepare(p.all)
	return p, nil
}

// PairLengths returns the number of tokens that each pair takes in a row.
func PairLengths(sequences []Sequence) []int {
	lengths := make([]int, len(sequences)/2)
	for i := range lengths {
		lengths[i] = len(sequences[2*i].IDs) + len(sequences[2*i+1].IDs) - 2
	}
	return lengths
}

// prepare makes a loader return pairs.
func (p *Pairs) prepare(l *Loader) {
	l.pairs = p
	l.state.Data = "pairs-" + l.state.Data
	n := len(l.batch.Inputs)
	l.batch.Answers, l.batch.Reference = make([]int, n), make([]float64, n)
	for r, row := range l.rows {
		l.targets[r] = len(row)
	}
}

// sequencesOf returns the indices of the sequences in a row.
func (l *Loader) sequencesOf(row []int) []int {
	if l.pairs == nil {
		return row
	}

	all := make([]int, 0, 2*len(row))
	for _, i := range row {
		all = append(all, 2*i, 2*i+1)
	}
	return all
}

// fill marks the tokens of an answer in a batch, and adds the answer's reference. Token at of the batch
// is the first of its row, and the answer starts at position start of the row. A pair is numbered by the
// first token of its chosen answer.
func (p *Pairs) fill(b *data.Batch, at, start, answer int) {
	s := p.all.sequences[answer]
	first := at + start
	if answer%2 == 1 {
		first -= len(p.all.sequences[answer-1].IDs) - 1
	} else {
		b.Count++
	}

	// Each token's reference is a float32, but their sum is exact, because the second token gets the
	// rounding error of the first. An answer of one token needs no rounding: its log-probability is a
	// single float32.
	rest := 0.0
	if p.references != nil {
		rest = p.references[answer]
	}
	for j := range len(s.IDs) - 1 {
		k := at + start + j
		b.Answers[k], b.Reference[k] = -1, 0
		if !s.Learn[j+1] {
			continue
		}
		b.Answers[k] = 2*first + answer%2
		b.Reference[k] = float64(float32(rest))
		rest -= b.Reference[k]
	}
}

// Loader returns a loader that returns the pairs in an order that depends only on the seed. Set the
// references before reading batches.
func (p *Pairs) Loader(seed uint64) *Loader {
	c := p.all.config
	c.Seed = seed
	l := newLoader(p.all.sequences, p.all.rows, c)
	p.prepare(l)
	return l
}

// Count returns the number of pairs.
func (p *Pairs) Count() int { return len(p.all.sequences) / 2 }

// Fingerprint identifies the pairs and their division into rows.
func (p *Pairs) Fingerprint() string {
	return fmt.Sprintf("%s-%d", p.all.state.Data, p.all.config.Seq)
}

// References returns the log-probability of each answer from before training, or nil if they are not set.
func (p *Pairs) References() []float64 { return p.references }

// SetReferences sets the log-probability of each answer.
func (p *Pairs) SetReferences(all []float64) error {
	if len(all) != len(p.all.sequences) {
		return fmt.Errorf("chatdata: Pairs.SetReferences: %d numbers, want one for each of %d answers",
			len(all), len(p.all.sequences))
	}
	p.references = all
	for _, rows := range p.evaluations {
		p.refer(rows)
	}
	return nil
}

// batches calls f for all rows in order, in batches, with the indices of each batch's rows.
func (p *Pairs) batches(f func(b data.Batch, rows [][]int) error) error {
	l := p.all
	size := l.config.Batch
	for from := 0; from < len(l.rows); from += size {
		rows := l.rows[from:min(from+size, len(l.rows))]
		l.batch.Count = 0
		for i := range size {
			var row []int // empty after the last one
			if i < len(rows) {
				row = rows[i]
			}
			l.fill(i*l.config.Seq, row)
		}
		if err := f(l.batch, rows); err != nil {
			return err
		}
	}
	return nil
}

// ComputeReferences returns the log-probability of each answer, given a function that computes the
// log-probabilities of a batch's targets.
func (p *Pairs) ComputeReferences(logProbs func(data.Batch) ([]float64, error)) ([]float64, error) {
	all := make([]float64, len(p.all.sequences))
	err := p.batches(func(b data.Batch, rows [][]int) error {
		values, err := logProbs(b)
		if err != nil || values == nil {
			return err
		}
		if len(values) != len(b.Inputs) {
			return fmt.Errorf("chatdata: %d log-probabilities of %d tokens", len(values), len(b.Inputs))
		}

		for i, row := range rows {
			at := i * p.all.config.Seq
			for _, answer := range p.all.sequencesOf(row) {
				s := p.all.sequences[answer]
				for j := range len(s.IDs) - 1 {
					if s.Learn[j+1] {
						all[answer] += values[at+j]
					}
				}
				at += len(s.IDs) - 1
			}
		}
		return nil
	})
	return all, err
}

// Evaluation returns the pairs as an evaluation. Its loss is the mean loss of a pair, and its bits per byte
// are not a number.
func (p *Pairs) Evaluation() (*data.Evaluation, error) {
	var all data.Batch
	if err := p.batches(func(b data.Batch, rows [][]int) error {
		n, before := len(rows)*p.all.config.Seq, len(all.Inputs)
		for _, a := range b.Answers[:n] {
			if a >= 0 {
				a += 2 * before
			}
			all.Answers = append(all.Answers, a)
		}
		all.Inputs, all.Targets = append(all.Inputs, b.Inputs[:n]...), append(all.Targets, b.Targets[:n]...)
		all.Starts, all.Positions = append(all.Starts, b.Starts[:n]...), append(all.Positions, b.Positions[:n]...)
		return nil
	}); err != nil {
		return nil, err
	}

	all.Reference = make([]float64, len(all.Inputs))
	p.evaluations = append(p.evaluations, all)
	if p.references != nil {
		p.refer(all)
	}
	return data.NewPackedEvaluation(all, 1, p.all.config.Batch, p.all.config.Seq)
}

// refer writes the references to the rows of an evaluation.
func (p *Pairs) refer(all data.Batch) {
	at := 0
	_ = p.batches(func(b data.Batch, rows [][]int) error { // the function returns no error
		at += copy(all.Reference[at:], b.Reference[:len(rows)*p.all.config.Seq])
		return nil
	})
}
