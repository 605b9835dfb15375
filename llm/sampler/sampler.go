// Package sampler draws tokens from a model's logits. It supports temperature, top-k, top-p, min-p,
// penalties for repeated tokens, and biases, and the tokens drawn are reproducible from a seed.
package sampler

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
)

// ErrNotFinite reports a logit that is NaN or +Inf.
var ErrNotFinite = errors.New("logits are not finite")

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
	// In other programs, a top_p of 0 keeps only the most probable token; use [MostProbable] for
	// that.
	TopP float64
	// MinP in [0, 1] keeps only tokens that are at least MinP times as probable as the most probable
	// one; 0 keeps all. It applies after TopK and TopP. (Nguyen et al., "Turning up the heat: min-p
	// sampling for creative and coherent LLM outputs", 2025.)
	MinP float64

	// Repetition r > 0 divides the positive logits of tokens that have occurred, in the text given to
	// Observe or among the tokens drawn, by r, and multiplies their negative logits by r. 0 and 1 change
	// nothing. (Keskar et al., "CTRL: a conditional transformer language model for controllable
	// generation", 2019.)
	Repetition float64
	// Presence is subtracted from the logits of tokens that the sampler has drawn before.
	Presence float64
	// Frequency is subtracted from a token's logit once for each time that the sampler has drawn it.
	Frequency float64
	// Bias is added to the logits of the given tokens. -Inf rules a token out.
	Bias map[int]float64

	// LogProbs makes Draw compute the log-probabilities that LogProb and Top return. Top returns the
	// given number of tokens.
	LogProbs bool
	Top      int

	// Vocab is the size of the tokenizer's vocabulary if the model's is larger, so that ids of Vocab
	// and above are never drawn. If it is 0, all logits count.
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

// A Sampler draws tokens. Among tokens with equal logits, the one with the smallest id counts as the
// most probable. The tokens drawn depend only on the config and the logits. A Sampler is not safe for
// concurrent use.
type Sampler struct {
	config  Config
	source  *rand.PCG
	choices []choice // scratch memory of Draw

	drawn    map[int]int  // how often each token has been drawn, if a penalty needs it
	occurred map[int]bool // tokens drawn or observed, if Repetition needs them

	logProb float64 // of the last token drawn
	top     []TokenProb

	constraint Constraint // or nil
}

// A Constraint restricts the tokens that can be drawn, as package grammar does for JSON.
type Constraint interface {
	// Allowed returns the tokens that can be drawn next, as bits: token i is bit i%64 of element i/64.
	Allowed() ([]uint64, error)
	// Accept is called with the token that has been drawn.
	Accept(id int) error
	// Done reports whether the text is complete, so that no more tokens are needed.
	Done() bool
}

// A TokenProb is a token with its log-probability.
type TokenProb struct {
	ID      int
	LogProb float64
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
	case !(c.MinP >= 0 && c.MinP <= 1):
		return nil, fmt.Errorf("sampler: New: MinP is %v, want 0 to 1", c.MinP)
	case !(c.Repetition >= 0) || math.IsInf(c.Repetition, 1):
		return nil, fmt.Errorf("sampler: New: Repetition is %v, want a finite number of at least 0",
			c.Repetition)
	case c.Presence-c.Presence != 0:
		return nil, fmt.Errorf("sampler: New: Presence is %v, want a finite number", c.Presence)
	case c.Frequency-c.Frequency != 0:
		return nil, fmt.Errorf("sampler: New: Frequency is %v, want a finite number", c.Frequency)
	case c.Top < 0:
		return nil, fmt.Errorf("sampler: New: Top is %d, want at least 0", c.Top)
	case c.Top > 0 && !c.LogProbs:
		return nil, fmt.Errorf("sampler: New: Top is %d without LogProbs", c.Top)
	case c.Vocab < 0:
		return nil, fmt.Errorf("sampler: New: Vocab is %d, want at least 0", c.Vocab)
	}

	for _, id := range slices.Sorted(maps.Keys(c.Bias)) {
		if bias := c.Bias[id]; id < 0 || math.IsNaN(bias) || math.IsInf(bias, 1) {
			return nil, fmt.Errorf("sampler: New: Bias[%d] is %v, want ids of at least 0, and finite "+
				"numbers or -Inf", id, bias)
		}
	}

	c.Bias = maps.Clone(c.Bias)
	s := &Sampler{config: c, source: rand.NewPCG(c.Seed, 0)}
	if c.Presence != 0 || c.Frequency != 0 {
		s.drawn = map[int]int{}
	}
	if c.Repetition != 0 && c.Repetition != 1 {
		s.occurred = map[int]bool{}
	}
	return s, nil
}

// Observe informs the sampler of tokens it has not drawn, such as those of a prompt. Repetition
// applies to them.
func (s *Sampler) Observe(ids ...int) {
	if s.occurred == nil {
		return
	}
	for _, id := range ids {
		s.occurred[id] = true
	}
}

// Constrain makes the sampler draw only tokens that c allows. The sampler informs c of the tokens drawn. A nil c
// removes the constraint.
func (s *Sampler) Constrain(c Constraint) { s.constraint = c }

// Done reports whether the sampler's constraint considers the text complete. A sampler without a constraint
// is never done.
func (s *Sampler) Done() bool { return s != nil && s.constraint != nil && s.constraint.Done() }

// adjusted returns the logit of a token after penalties and bias.
func (s *Sampler) adjusted(id int, logit float64) float64 {
	if s.occurred[id] {
		if logit > 0 {
			logit /= s.config.Repetition
		} else {
			logit *= s.config.Repetition
		}
	}

	if n := s.drawn[id]; n > 0 {
		logit -= s.config.Presence + float64(n)*s.config.Frequency
	}

	return logit + s.config.Bias[id]
}

// LogProb returns the log-probability of the last token drawn. This is the model's own
// log-probability, unaffected by temperature or any other setting except that tokens outside Vocab
// are ignored.
func (s *Sampler) LogProb() float64 { return s.logProb }

// Top returns the tokens that were most probable at the last draw, in order, and their
// log-probabilities, as LogProb defines them. The next draw overwrites them.
func (s *Sampler) Top() []TokenProb { return s.top }

// Draw returns the id of the next token without modifying the logits. A logit of -Inf rules a token out.
// If a logit is NaN or +Inf, or all are -Inf, Draw returns an error and the sampler's state doesn't change.
func Draw[T float32 | float64](s *Sampler, logits []T) (int, error) {
	if s == nil {
		return 0, fmt.Errorf("sampler: Draw: the sampler is nil")
	}

	if v := s.config.Vocab; v > 0 && v < len(logits) {
		logits = logits[:v]
	}

	var allowed []uint64
	if s.constraint != nil {
		var err error
		if allowed, err = s.constraint.Allowed(); err != nil {
			return 0, fmt.Errorf("sampler: Draw: %w", err)
		}
	}

	s.choices = s.choices[:0]
	limit := len(logits)
	switch k := s.config.TopK; {
	case s.config.Temperature == 0:
		limit = 1
	case k > 0:
		limit = min(limit, k)
	}

	changed := s.drawn != nil || s.occurred != nil || len(s.config.Bias) > 0
	bound := T(math.Inf(-1)) // the least of the choices, if there are as many as needed
	for i, logit := range logits {
		if logit <= bound && !changed { // false for NaN
			continue
		}
		if allowed != nil && (i/64 >= len(allowed) || allowed[i/64]>>(i%64)&1 == 0) {
			continue
		}
		l := float64(logit)
		if changed && l-l == 0 {
			l = s.adjusted(i, l)
		}
		if l-l != 0 {
			if math.IsInf(l, -1) {
				continue
			}
			return 0, fmt.Errorf("sampler: Draw: %w: logits[%d] is %v", ErrNotFinite, i, l)
		}
		s.add(choice{id: i, logit: l}, limit)
		if len(s.choices) == limit && (limit == 1 || s.config.TopK > 0) {
			bound = T(s.choices[0].logit)
		}
	}

	if len(s.choices) == 0 {
		which := ""
		if allowed != nil {
			which = " that the constraint allows"
		}
		return 0, fmt.Errorf("sampler: Draw: none of %d logits%s is more than -Inf", len(logits), which)
	}

	id := s.choices[0].id
	if s.config.Temperature > 0 {
		id = s.draw(s.candidates())
	}

	if s.constraint != nil {
		if err := s.constraint.Accept(id); err != nil {
			return 0, fmt.Errorf("sampler: Draw: %w", err)
		}
	}
	if s.drawn != nil {
		s.drawn[id]++
	}
	s.Observe(id)
	if s.config.LogProbs {
		record(s, logits, id)
	}

	return id, nil
}

// record computes the log-probabilities of a drawn token and of the most probable ones.
func record[T float32 | float64](s *Sampler, logits []T, id int) {
	largest := float64(slices.Max(logits))
	total := 0.0
	for _, l := range logits {
		total += math.Exp(float64(l) - largest)
	}

	norm := largest + math.Log(total)
	s.logProb = float64(logits[id]) - norm

	// The tokens found so far are sorted, and as ids increase, later ids lose ties.
	s.top = s.top[:0]
	for i, l := range logits {
		p := TokenProb{ID: i, LogProb: float64(l) - norm}
		if math.IsInf(p.LogProb, -1) {
			continue
		}
		if len(s.top) == s.config.Top && (s.config.Top == 0 || p.LogProb <= s.top[len(s.top)-1].LogProb) {
			continue
		}

		at := len(s.top)
		for at > 0 && p.LogProb > s.top[at-1].LogProb {
			at--
		}
		if len(s.top) == s.config.Top {
			s.top = s.top[:len(s.top)-1]
		}
		s.top = slices.Insert(s.top, at, p)
	}
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

// candidates returns the choices that remain after TopK, TopP and MinP, with their weights.
func (s *Sampler) candidates() []choice {
	kept := s.nucleus()
	if s.config.MinP == 0 {
		return kept
	}

	// Weights are relative to the most probable token, which has the weight 1.
	return slices.DeleteFunc(kept, func(c choice) bool { return c.weight < s.config.MinP })
}

// nucleus returns the choices that remain after TopK and TopP, with their weights.
func (s *Sampler) nucleus() []choice {
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

// State returns the state of the random number generator, to be saved in a checkpoint. It does not
// include the tokens that penalties count.
func (s *Sampler) State() ([]byte, error) {
	if s == nil || s.source == nil {
		return nil, errors.New("sampler: Sampler.State: the sampler is nil or its zero value: " +
			"New makes one")
	}
	return s.source.MarshalBinary()
}

// SetState restores a state returned by State.
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
