package llm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/internal/splitmix"
	"github.com/kasmina-go/kasmina/llm/data"
)

// A Loader returns an endless series of batches for a [Trainer]. [data.Loader] reads running text,
// and [github.com/kasmina-go/kasmina/llm/chatdata.Loader] reads packed conversations.
//
// The batches depend only on the loader's state, so that a run continues bit for bit from a saved
// state, and all ranks of a run read the same batches.
type Loader interface {
	// Config returns the size of the batches and the seed of their order.
	Config() data.LoaderConfig

	// VocabSize returns a number that is larger than every token id.
	VocabSize() int

	// Tokenizer identifies the tokenizer of the ids. It is "" if the loader does not know it.
	Tokenizer() string

	// KnowsDocuments reports whether batches specify where documents start.
	KnowsDocuments() bool

	// Next returns the next batch. Its memory is reused by the following call.
	Next() (data.Batch, error)

	// InUse returns the batch that Next returned last, or a batch of zeros before the first one.
	InUse() data.Batch

	// State returns the loader's position, and SetState moves the loader to a position returned by
	// State. The error of SetState wraps data.ErrChanged if the position belongs to other data.
	State() data.LoaderState
	SetState(data.LoaderState) error
}

// A MaskedLoader is a [Loader] whose batches differ in their number of targets, because some tokens
// are only context.
//
// The loss of a step is then the mean over all targets of the step. Each batch is weighted by its
// number of targets, so that the loss and its gradient do not depend on how a step is divided into
// batches or among ranks.
type MaskedLoader interface {
	Loader

	// CountTargets returns the number of targets in the next batches, without moving the loader.
	CountTargets(batches int) int
}

var _ Loader = (*data.Loader)(nil)

// stepBatches hands out the batches of one step.
type stepBatches struct {
	loader  Loader
	batches int       // number of batches of the step
	targets int       // number of targets of the step, or 0 if all batches are weighted equally
	shares  []float64 // shares of the batches handed out so far in the loss of the step
}

func newStepBatches(l Loader, batches int) *stepBatches {
	s := &stepBatches{loader: l, batches: batches}
	if m, ok := l.(MaskedLoader); ok && batches > 1 {
		s.targets = m.CountTargets(batches)
	}
	return s
}

// next returns the next batch of the step.
func (s *stepBatches) next() (data.Batch, error) {
	key := dropoutKey(s.loader.State())
	b, err := s.loader.Next()
	if err != nil {
		return b, err
	}

	if s.targets > 0 {
		if b.Count < 1 {
			return b, fmt.Errorf("a batch has no targets: the loader must leave out sequences " +
				"without targets")
		}
		b.Share = float64(b.Count) / float64(s.targets)
	}

	s.shares = append(s.shares, b.Share)
	b.Key = key
	return b, nil
}

// dropoutKey returns the key of the batch at a position of a loader. It is never negative.
func dropoutKey(s data.LoaderState) int {
	return int(splitmix.Mix(splitmix.Mix(s.Seed+uint64(s.Epoch))+uint64(s.Next)) >> 1)
}

// weigh returns the contribution of a batch's mean loss to the loss of the step.
func (s *stepBatches) weigh(batch int, loss float64) float64 {
	if s.targets > 0 {
		return loss * s.shares[batch]
	}
	return loss / float64(s.batches)
}
