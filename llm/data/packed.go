package data

import (
	"fmt"
	"iter"
	"slices"
)

// NewPackedEvaluation returns an evaluation of sequences of seq tokens. A sequence may contain several
// documents, and tokens without a target, like those of package chatdata. rows must contain a whole
// number of sequences. bytes is the number of bytes of text that the targets represent.
//
// If rows contains preference pairs, each pair is numbered by the index of its first token, and no pair
// may span two sequences. The references may change until the evaluation is used.
func NewPackedEvaluation(rows Batch, bytes, batch, seq int) (*Evaluation, error) {
	if err := checkBatches(batch, seq); err != nil {
		return nil, fmt.Errorf("data: NewPackedEvaluation: %w", err)
	}

	n := len(rows.Inputs)
	if n == 0 || n%seq != 0 || len(rows.Targets) != n || len(rows.Starts) != n || len(rows.Positions) != n {
		return nil, fmt.Errorf("data: NewPackedEvaluation: %d inputs, %d targets, %d starts and %d positions, "+
			"want a whole number of sequences of %d of each", n, len(rows.Targets), len(rows.Starts),
			len(rows.Positions), seq)
	}

	for at := 0; at < n; at += seq {
		if countTargets(rows.Targets[at:at+seq]) == 0 {
			return nil, fmt.Errorf("data: NewPackedEvaluation: sequence %d has no targets", at/seq)
		}
	}

	if bytes < 1 {
		return nil, fmt.Errorf("data: NewPackedEvaluation: the targets stand for %d bytes of text, want at "+
			"least 1", bytes)
	}

	if rows.Answers != nil && (len(rows.Answers) != n || len(rows.Reference) != n) {
		return nil, fmt.Errorf("data: NewPackedEvaluation: the answers of %d tokens and references of %d, want %d",
			len(rows.Answers), len(rows.Reference), n)
	}

	rows.Count = rows.count()
	return &Evaluation{packed: &rows, bytes: bytes, batch: batch, seq: seq}, nil
}

// count returns the number of preference pairs or, if there are none, the number of targets.
func (b Batch) count() int {
	if b.Answers == nil {
		return countTargets(b.Targets)
	}

	pairs := map[int]bool{}
	for _, a := range b.Answers {
		if a >= 0 {
			pairs[a/2] = true
		}
	}
	return len(pairs)
}

func countTargets(targets []int) (n int) {
	for _, t := range targets {
		if t >= 0 {
			n++
		}
	}
	return n
}

// packedIDs yields the inputs and targets of packed sequences.
func (e *Evaluation) packedIDs() iter.Seq[int] {
	return func(yield func(int) bool) {
		for i, id := range e.packed.Inputs {
			if !yield(id) || e.packed.Targets[i] >= 0 && !yield(e.packed.Targets[i]) {
				return
			}
		}
	}
}

// packedBatches yields the packed sequences in batches. The last batch is padded with sequences without
// targets.
func (e *Evaluation) packedBatches(yield func(Batch) bool) {
	n := e.batch * e.seq
	for at := 0; at < len(e.packed.Inputs); at += n {
		b := Batch{Inputs: make([]int, n), Targets: slices.Repeat([]int{-1}, n), Starts: make([]int, n),
			Positions: make([]int, n)}
		for i := range b.Positions {
			b.Positions[i] = i % e.seq
		}

		copy(b.Inputs, e.packed.Inputs[at:])
		copy(b.Targets, e.packed.Targets[at:])
		copy(b.Starts, e.packed.Starts[at:])
		copy(b.Positions, e.packed.Positions[at:])
		if e.packed.Answers != nil {
			b.Answers, b.Reference = slices.Repeat([]int{-1}, n), make([]float64, n)
			copy(b.Reference, e.packed.Reference[at:])
			for i := range copy(b.Answers, e.packed.Answers[at:]) {
				if b.Answers[i] >= 0 {
					b.Answers[i] -= 2 * at // pairs are numbered by their first tokens
				}
			}
		}
		b.Count = b.count()
		if !yield(b) {
			return
		}
	}
}
