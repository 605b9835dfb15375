// Package sampler draws tokens from a model's logits. It supports temperature, top-k and top-p, and the
// tokens drawn are reproducible from a seed.
package sampler

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
)

// Config describes how tokens are drawn from logits. The zero value always draws the most probable token.
type Config struct {
	// Temperature T ≥ 0 divides the logits: P(i) = softmax(logits / T)ᵢ. If it is 0, the largest logit
	// always wins.
	Temperature float64
	// TopK keeps only the k most probable tokens; 0 keeps all.
	TopK int
	// TopP in (0, 1] keeps the smallest set of most probable tokens whose probabilities, renormalized
	// after TopK, add up to at least TopP; 0 keeps all. (Holtzman et al., "The curious case of neural
	// text degeneration", 2020.)
	//
	// In other programs a top_p of 0 keeps only the most probable token: use [MostProbable] for that.
	TopP float64
	// Vocab is the size of the tokenizer's vocabulary if the model's is larger: ids of Vocab and above
	// are never drawn. If it is 0, all logits count.
	Vocab int
	Seed  uint64
}

// MostProbable is a TopP that keeps only the most probable token.
const MostProbable = math.SmallestNonzeroFloat64

// Nucleus converts a top_p from an option or a file to a TopP. Unlike TopP, a top_p of 0 keeps only the
// most probable token.
func Nucleus(p float64) float64 {
	if p == 0 {
		return MostProbable
	}
	return p
}

// A Sampler draws tokens. Among tokens with equal logits, the one with the smallest id counts as the most
// probable. The tokens drawn depend only on the config and the logits. A Sampler must not be used by
// several goroutines at once.
type Sampler struct {
	config  Config
	source  *rand.PCG
	choices []choice // scratch memory of Draw
}

// A choice is a token with its logit and its probability relative to the most probable token.
type choice struct {
	id     int
	logit  float64
	weight float64
}

// New returns a sampler, or an error if the config is invalid.
func New(c Config) (*Sampler, error) {
	switch {
	case !(c.Temperature >= 0) || math.IsInf(c.Temperature, 1):
		return nil, fmt.Errorf("sampler: New: Temperature is %v, want a finite number of at "+
			"least 0", c.Temperature)
	case c.TopK < 0:
		return nil, fmt.Errorf("sampler: New: TopK is %d, want at least 0", c.TopK)
	case !(c.TopP >= 0 && c.TopP <= 1):
		return nil, fmt.Errorf("sampler: New: TopP is %v, want 0 to 1", c.TopP)
	case c.Vocab < 0:
		return nil, fmt.Errorf("sampler: New: Vocab is %d, want at least 0", c.Vocab)
	}

	return &Sampler{config: c, source: rand.NewPCG(c.Seed, 0)}, nil
}

// Draw returns the id of the next token without modifying the logits. A logit of -Inf rules a token out.
// If a logit is NaN or +Inf, or all are -Inf, Draw returns an error and the random state doesn't advance.
func Draw[T float32 | float64](s *Sampler, logits []T) (int, error) {
	if s == nil {
		return 0, fmt.Errorf("sampler: Draw: the sampler is nil")
	}

	if v := s.config.Vocab; v > 0 && v < len(logits) {
		logits = logits[:v]
	}

	s.choices = s.choices[:0]
	limit := len(logits)
	switch k := s.config.TopK; {
	case s.config.Temperature == 0:
		limit = 1
	case k > 0:
		limit = min(limit, k)
	}

	for i, logit := range logits {
		l := float64(logit)
		if l-l != 0 {
			if math.IsInf(l, -1) {
				continue
			}
			return 0, fmt.Errorf("sampler: Draw: logits[%d] is %v", i, l)
		}
		s.add(choice{id: i, logit: l}, limit)
	}

	if len(s.choices) == 0 {
		return 0, fmt.Errorf("sampler: Draw: none of %d logits is more than -Inf", len(logits))
	}

	if s.config.Temperature == 0 {
		return s.choices[0].id, nil
	}

	return s.draw(s.candidates()), nil
}

// add considers one more choice and keeps the most probable ones. Once the set is full, it forms a heap
// with the least probable choice at the root. As ids are added in increasing order, later ids lose ties.
func (s *Sampler) add(c choice, limit int) {
	if len(s.choices) < limit {
		if s.choices = append(s.choices, c); len(s.choices) == limit && s.config.TopK > 0 {
			for at := limit/2 - 1; at >= 0; at-- {
				s.sink(at)
			}
		}
		return
	}

	if c.logit > s.choices[0].logit {
		s.choices[0] = c
		s.sink(0)
	}
}

// sink moves a choice down the heap until both of its children are more probable.
func (s *Sampler) sink(at int) {
	for {
		least := at
		for child := 2*at + 1; child <= 2*at+2 && child < len(s.choices); child++ {
			if moreProbable(s.choices[child], s.choices[least]) > 0 {
				least = child
			}
		}
		if least == at {
			return
		}
		s.choices[at], s.choices[least] = s.choices[least], s.choices[at]
		at = least
	}
}

func moreProbable(a, b choice) int {
	return cmp.Or(cmp.Compare(b.logit, a.logit), cmp.Compare(a.id, b.id))
}

// candidates returns the choices that remain after TopK and TopP, with their weights.
func (s *Sampler) candidates() []choice {
	kept := s.choices
	best := slices.MinFunc(kept, moreProbable).logit
	if s.config.TopK > 0 || s.config.TopP > 0 {
		slices.SortFunc(kept, moreProbable)
	}

	total := 0.0
	for i := range kept {
		kept[i].weight = math.Exp((kept[i].logit - best) / s.config.Temperature)
		total += kept[i].weight
	}

	if s.config.TopP == 0 {
		return kept
	}

	sum := 0.0
	for i := range kept {
		if sum += kept[i].weight; sum >= s.config.TopP*total {
			return kept[:i+1]
		}
	}

	return kept
}

// draw returns the id of one of the choices, with probabilities proportional to their weights.
func (s *Sampler) draw(kept []choice) int {
	total := 0.0
	for _, c := range kept {
		total += c.weight
	}

	// The top 53 bits give a number in [0, 1) that a float64 represents exactly.
	rest := float64(s.source.Uint64()>>11) * 0x1p-53 * total
	for _, c := range kept {
		if rest -= c.weight; rest < 0 {
			return c.id
		}
	}

	return kept[0].id // reached only if the subtractions were rounded
}

// State returns the state of the random number generator, to be saved in a checkpoint.
func (s *Sampler) State() ([]byte, error) {
	if s == nil || s.source == nil {
		return nil, errors.New("sampler: Sampler.State: the sampler is nil or its zero value: " +
			"New makes one")
	}
	return s.source.MarshalBinary()
}

// SetState restores a state that State returned.
func (s *Sampler) SetState(state []byte) error {
	if s == nil {
		return errors.New("sampler: Sampler.SetState: the sampler is nil: New makes one")
	}
	restored := new(rand.PCG)
	if err := restored.UnmarshalBinary(state); err != nil {
		return fmt.Errorf("sampler: Sampler.SetState: %w", err)
	}
	s.source = restored
	return nil
}
