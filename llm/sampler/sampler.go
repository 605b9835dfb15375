// Package sampler draws tokens from a model's logits. It supports temperature, top-k, top-p, min-p,
// penalties for repeated tokens, and biases, and the tokens drawn are reproducible from a seed.
package sampler

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/kasmina-go/kasmina/internal/cpu/sampling"
)

// ErrNotFinite reports a logit that is NaN or +Inf.
var ErrNotFinite = sampling.ErrNotFinite

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
//
// Probabilities are rounded to 24 bits, and tokens that are less than 2⁻⁴⁰ times as probable as the most
// probable one are never drawn. A GPU draws exactly the same tokens from the same logits.
type Sampler struct {
	config Config
	rule   sampling.Rule // without random number and entries
	source *rand.PCG
	narrow sampling.Drawer[float32]
	wide   sampling.Drawer[float64]

	entries  map[int]sampling.Entry // tokens with penalties or biases
	sorted   []sampling.Entry       // the same, by id; nil if they have changed
	revision uint64                 // changes whenever the next draw may change

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
	s := &Sampler{config: c, source: rand.NewPCG(c.Seed, 0), rule: ruleOf(c), entries: map[int]sampling.Entry{}}
	for id, bias := range c.Bias {
		s.entries[id] = sampling.Entry{ID: id, Bias: sampling.Narrow(bias)}
	}
	return s, nil
}

// ruleOf returns the part of a config's rule that is the same for all tokens.
func ruleOf(c Config) sampling.Rule {
	r := sampling.Rule{Greedy: c.Temperature == 0, TopK: c.TopK, TopP: sampling.ShareOf(c.TopP),
		MinWeight: sampling.WeightOf(c.MinP), Vocab: c.Vocab, Repetition: sampling.Narrow(c.Repetition),
		Presence: sampling.Narrow(c.Presence), Frequency: sampling.Narrow(c.Frequency)}
	if !r.Greedy {
		r.Scale = sampling.ScaleOf(c.Temperature)
	}
	if c.Repetition > 0 && r.Repetition == 0 { // 0 would disable it
		r.Repetition = math.SmallestNonzeroFloat32
	}
	return r
}

// repeats reports whether Repetition changes logits.
func (s *Sampler) repeats() bool { return s.config.Repetition != 0 && s.config.Repetition != 1 }

// counts reports whether any setting depends on the tokens drawn.
func (s *Sampler) counts() bool {
	return s.repeats() || s.config.Presence != 0 || s.config.Frequency != 0
}

// Observe informs the sampler of tokens it has not drawn, such as those of a prompt. Repetition
// applies to them.
func (s *Sampler) Observe(ids ...int) {
	if !s.repeats() {
		return
	}
	for _, id := range ids {
		if e := s.entries[id]; !e.Occurred {
			e.ID, e.Occurred = id, true
			s.change(e)
		}
	}
}

// Constrain makes the sampler draw only tokens that c allows. The sampler informs c of the tokens drawn. A nil c
// removes the constraint.
func (s *Sampler) Constrain(c Constraint) {
	s.constraint = c
	s.revision++
}

// Done reports whether the sampler's constraint considers the text complete. A sampler without a constraint
// is never done.
func (s *Sampler) Done() bool { return s != nil && s.constraint != nil && s.constraint.Done() }

// change replaces an entry.
func (s *Sampler) change(e sampling.Entry) {
	s.entries[e.ID] = e
	s.sorted = nil
	s.revision++
}

// next returns the rule for the next draw, without a random number. Its entries must not be modified.
func (s *Sampler) next() sampling.Rule {
	r := s.rule
	r.Greedy = s.config.Temperature == 0 // also for the zero value
	if len(s.entries) > 0 && s.sorted == nil {
		for _, id := range slices.Sorted(maps.Keys(s.entries)) {
			s.sorted = append(s.sorted, s.entries[id])
		}
	}
	r.Entries = s.sorted
	return r
}

// accept counts a token that was drawn by the rule of next.
func (s *Sampler) accept(id int) {
	s.revision++
	if s.counts() {
		e := s.entries[id]
		e.ID, e.Occurred, e.Drawn = id, true, e.Drawn+1
		s.change(e)
	}
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
	if v := s.config.Vocab; v > 0 && v < len(logits) {
		logits = logits[:v]
	}

	// The random number is used up only if the draw succeeds.
	r, source := s.next(), s.source
	if s.constraint != nil {
		var err error
		if r.Allowed, err = s.constraint.Allowed(); err != nil {
			return 0, fmt.Errorf("sampler: Draw: %w", err)
		}
	}
	if !r.Greedy {
		advanced := *s.source
		source = &advanced
		r.Uniform = source.Uint64()
	}

	var id int
	var err error
	switch x := any(logits).(type) {
	case []float32:
		id, err = s.narrow.Draw(x, &r)
	case []float64:
		id, err = s.wide.Draw(x, &r)
	}
	if err != nil {
		return 0, fmt.Errorf("sampler: Draw: %w", err)
	}

	if s.constraint != nil {
		if err := s.constraint.Accept(id); err != nil {
			return 0, fmt.Errorf("sampler: Draw: %w", err)
		}
	}
	s.source = source
	s.accept(id)
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

// A Plan is what a device needs to draw a sampler's next tokens. It is meant for the engines of this module.
type Plan struct {
	rule   sampling.Rule
	source *rand.PCG
}

// Plan returns a plan for the next tokens, or nil if a device cannot draw them, because log-probabilities are
// requested, there is a constraint, or too many tokens have penalties. The sampler's own state changes only when Accept is called.
func (s *Sampler) Plan() *Plan {
	if s.config.LogProbs || s.constraint != nil || len(s.entries) > mostEntries {
		return nil
	}
	p := &Plan{rule: s.next()}
	if !p.rule.Greedy {
		source := *s.source
		p.source = &source
	}
	return p
}

// mostEntries is the largest number of tokens with penalties or biases in a plan.
const mostEntries = sampling.MostEntries / 8

// Next returns the rule for the next token. If later is set, the rule takes into account one more token, which the
// device knows.
func (p *Plan) Next(later bool) *sampling.Rule {
	r := p.rule
	if p.source != nil {
		r.Uniform = p.source.Uint64()
	}
	if later && (r.Repetition != 0 && r.Repetition != 1 || r.Presence != 0 || r.Frequency != 0) {
		r.Pending = []int{0}
	}
	return &r
}

// Accept counts a token that a device has drawn as [Plan] describes.
func (s *Sampler) Accept(id int) {
	if s.config.Temperature > 0 {
		s.source.Uint64()
	}
	s.accept(id)
}

// Revision returns a number that changes with every draw, and with every other change to the tokens that the sampler
// will draw.
func (s *Sampler) Revision() uint64 { return s.revision }

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
	restored := new(rand.PCG)
	if err := restored.UnmarshalBinary(state); err != nil {
		return fmt.Errorf("sampler: Sampler.SetState: %w", err)
	}
	s.source = restored
	s.revision++
	return nil
}
