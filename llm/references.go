package llm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/llm/data"
)

// ReferencedPairs are preference pairs that need the log-probabilities of their answers under the model
// before training. The pairs of package chatdata implement it.
type ReferencedPairs interface {
	// Fingerprint identifies the pairs.
	Fingerprint() string
	// References returns the log-probability of each answer, or nil before SetReferences.
	References() []float64
	// SetReferences sets the log-probabilities of all answers.
	SetReferences([]float64) error
	// ComputeReferences calls logProbs with batches of pairs and returns the log-probability of each
	// answer. logProbs returns the log-probabilities of the batch's targets. If it returns nil, the
	// answers in the batch get 0.
	ComputeReferences(logProbs func(data.Batch) ([]float64, error)) ([]float64, error)
}

// References is a [Part] that computes the log-probabilities of preference pairs before the first step,
// so that training needs no second model. Checkpoints contain them. If several ranks train, each computes
// a share.
//
// An untrained low-rank adapter does not change the model, so the reference of a model with new adapters
// is its base model.
type References struct{ sets []ReferencedPairs }

var (
	_ Part       = (*References)(nil)
	_ RunStarter = (*References)(nil)
)

// NewReferences returns a part for the pairs that a run uses for training or evaluation. Add it to the
// trainer with [Trainer.Use].
func NewReferences(sets ...ReferencedPairs) *References { return &References{sets} }

// Name implements [Part].
func (*References) Name() string { return "references" }

// StartRun implements [RunStarter].
func (r *References) StartRun(u Turn) error {
	for _, set := range r.sets {
		if set.References() != nil {
			continue
		}
		if step := u.Last().Step; step > 0 {
			return fmt.Errorf("the model has made %d steps, and the log-probabilities from before the first "+
				"one are not known: start a new run", step)
		}

		e, ok := u.t.driver.engine.(PreferenceMeter)
		if !ok {
			return errors.New("the engine cannot compute log-probabilities")
		}
		all, err := r.compute(u, e, set)
		if err != nil {
			return err
		}
		if err := set.SetReferences(all); err != nil {
			return err
		}
	}

	return nil
}

// compute returns the references of a set of pairs. The ranks compute every ranks-th batch each and exchange the results.
func (r *References) compute(u Turn, e PreferenceMeter, set ReferencedPairs) ([]float64, error) {
	defer u.t.team.busy("computing the references of the preference pairs")()
	rank, ranks := 0, 1
	team := u.t.team.ranks()
	if team != nil {
		rank, ranks = team.Rank(), team.Ranks()
	}

	i := 0
	own, err := set.ComputeReferences(func(b data.Batch) ([]float64, error) {
		if i++; (i-1)%ranks != rank {
			return nil, nil
		}
		return e.LogProbs(u.Context(), b)
	})
	if err = u.t.team.agree(err); err != nil || team == nil {
		return own, err
	}

	var text []byte
	for _, x := range own {
		text = binary.LittleEndian.AppendUint64(text, math.Float64bits(x))
	}
	all, err := team.Exchange(text)
	if err != nil {
		return nil, err
	}

	// Each number was computed by one rank, and is 0 on all others.
	sum := make([]float64, len(own))
	for from, part := range all {
		if len(part) != len(text) {
			return nil, fmt.Errorf("rank %d has %d references, want %d", from, len(part)/8, len(sum))
		}
		for k := range sum {
			sum[k] += math.Float64frombits(binary.LittleEndian.Uint64(part[8*k:]))
		}
	}
	return sum, nil
}

// Save implements [Part].
func (r *References) Save(w *CheckpointWriter) error {
	for i, set := range r.sets {
		w.Value(fmt.Sprintf("pairs-%d", i), set.Fingerprint())
		all := set.References()
		if all == nil {
			return errors.New("the references have not been computed yet")
		}
		if err := w.Tensor(fmt.Sprintf("set-%d", i), []int{len(all)}, all); err != nil {
			return err
		}
	}
	return nil
}

// Load implements [Part].
func (r *References) Load(c *CheckpointReader) (install func(), err error) {
	loaded := make([][]float64, len(r.sets))
	for i, set := range r.sets {
		var pairs string
		if err := c.Value(fmt.Sprintf("pairs-%d", i), &pairs); err != nil {
			return nil, err
		}
		if pairs != set.Fingerprint() {
			c.Differs("set %d has other pairs", i)
			continue
		}

		_, values, err := c.Tensor(fmt.Sprintf("set-%d", i))
		if err != nil {
			return nil, err
		}
		all, ok := values.([]float64)
		if !ok {
			return nil, fmt.Errorf("the references are a %T", values)
		}
		for k, x := range all {
			if x-x != 0 {
				return nil, fmt.Errorf("reference %d of set %d is %v", k, i, x)
			}
		}
		loaded[i] = all
	}

	// If a set rejects its references, it remains without them, and the next run reports an error.
	return func() {
		for i, all := range loaded {
			if all != nil {
				_ = r.sets[i].SetReferences(all)
			}
		}
	}, nil
}
