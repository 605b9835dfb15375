// Package sampler draws tokens from a model's logits: by temperature, the most probable only, and
// in an order that a seed repeats.
package sampler

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
)

// Config says how tokens are drawn from logits. The zero value is greedy.
type Config struct {
	// Temperature T ≥ 0 divides the logits: P(i) = softmax(logits / T)ᵢ. 0 always takes the largest
	// logit.
	Temperature float64
	// TopK keeps only the k most probable tokens; 0 keeps all.
	TopK int
	// TopP in (0, 1] keeps only the fewest most probable tokens whose probabilities, taken after
	// TopK, add up to at least TopP; 0 keeps all. (Holtzman et al., "The curious case of neural
	// text degeneration", 2020.)
	//
	// Other programs keep only the most probable token at a top_p of 0: that is [MostProbable].
	TopP float64
	// Vocab is the size of the tokenizer's vocabulary, where the model's is larger: ids from it on
	// are never drawn. 0 is that of the logits.
	Vocab int
	Seed  uint64
}

// MostProbable is the TopP that keeps only the most probable token.
const MostProbable = math.SmallestNonzeroFloat64

// Nucleus returns the TopP of a top_p as options and files give it. There, 0 keeps only the most
// probable token.
func Nucleus(p float64) float64 {
	if p == 0 {
		return MostProbable
	}
	return p
}

// A Sampler draws tokens. Among tokens with equal logits the one with the smaller id counts as the
// more probable. The tokens drawn depend on the config and the logits alone. A Sampler is not safe
// for use by several goroutines.
type Sampler struct {
	config  Config
	source  *rand.PCG
	choices []choice // memory for Draw
}

// A choice is a token with its logit and its probability relative to the most probable token.
type choice struct {
	id     int
	logit  float64
	weight float64
}

// New checks the config.
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

// Draw draws the id of the next token from the logits, which it leaves as they are. It is an error
// when a logit is NaN or +Inf, or all are -Inf; -Inf rules a token out. An error draws nothing.
func Draw[T float32 | float64](s *Sampler, logits []T) (int, error) {
	if s == nil {
		return 0, fmt.Errorf("sampler: Draw: the sampler is nil")
	}

	if v := s.config.Vocab; v > 0 && v < len(logits) {
		logits = logits[:v]
	}

	s.choices = s.choices[:0]
	most := len(logits)
	switch k := s.config.TopK; {
	case s.config.Temperature == 0:
		most = 1
	case k > 0:
		most = min(most, k)
	}

	for i, logit := range logits {
		l := float64(logit)
		if l-l != 0 {
			if math.IsInf(l, -1) {
				continue
			}
			return 0, fmt.Errorf("sampler: Draw: logits[%d] is %v", i, l)
		}
		s.add(choice{id: i, logit: l}, most)
	}

	if len(s.choices) == 0 {
		return 0, fmt.Errorf("sampler: Draw: none of %d logits is more than -Inf", len(logits))
	}

	if s.config.Temperature == 0 {
		return s.choices[0].id, nil
	}

	return s.draw(s.keep()), nil
}

// add takes in a choice, of all the most probable ones. They stay a heap once they are the most
// that are wanted: none is more probable than choice (i-1)/2 of the others. Later ids lose ties.
func (s *Sampler) add(c choice, most int) {
	if len(s.choices) < most {
		if s.choices = append(s.choices, c); len(s.choices) == most && s.config.TopK > 0 {
			for at := most/2 - 1; at >= 0; at-- {
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

// sink puts a choice of the heap below those that are less probable.
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

// keep returns the choices that TopK and TopP leave over, with their weights.
func (s *Sampler) keep() []choice {
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

// draw returns the id of one of the choices, with probabilities in proportion to their weights.
func (s *Sampler) draw(kept []choice) int {
	total := 0.0
	for _, c := range kept {
		total += c.weight
	}

	// The top 53 bits make a number in [0, 1) that a float64 holds exactly.
	rest := float64(s.source.Uint64()>>11) * 0x1p-53 * total
	for _, c := range kept {
		if rest -= c.weight; rest < 0 {
			return c.id
		}
	}

	return kept[0].id // only after rounding in the subtractions
}

// State returns the state of the random numbers, to be kept with a checkpoint.
func (s *Sampler) State() ([]byte, error) {
	if s == nil || s.source == nil {
		return nil, errors.New("sampler: Sampler.State: the sampler is nil or its zero value: " +
			"New makes one")
	}
	return s.source.MarshalBinary()
}

// SetState continues with the random numbers of a state that State returned.
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
