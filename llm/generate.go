package llm

import (
	"errors"
	"fmt"
)

// Generator draws text from a model, token by token. Each token sees as many of the tokens before it as the model's
// training sequences were long.
type Generator struct {
	seq    int
	logits func(tokens []int) (any, error)
	close  func() error
}

// NewGenerator returns a generator that uses the model's parameters as they are at each call.
func NewGenerator(m *Model) (*Generator, error) {
	if m == nil {
		return nil, errors.New("llm: NewGenerator: the model is nil")
	}
	r, err := (&Inference{Model: m}).runner(ForLogits, 1)
	if err != nil {
		return nil, err
	}
	return &Generator{m.Config.Seq, r.Next, r.Machine.Close}, nil
}

// Close frees the generator's machine.
func (g *Generator) Close() error { return g.close() }

// Generate returns n tokens that s draws to continue the prompt, which needs at least one token.
func (g *Generator) Generate(prompt []int, n int, s *Sampler) ([]int, error) {
	return g.generate(prompt, n, s, func() error { return nil })
}

// generate asks stopped before each token whether to go on.
func (g *Generator) generate(prompt []int, n int, s *Sampler, stopped func() error) ([]int, error) {
	switch {
	case len(prompt) == 0:
		return nil, errors.New("llm: Generate: the prompt is empty, want at least one token")
	case n < 0:
		return nil, fmt.Errorf("llm: Generate: asked for %d tokens, want at least 0", n)
	case s == nil:
		return nil, errors.New("llm: Generate: the sampler is nil")
	}
	all := append(make([]int, 0, len(prompt)+n), prompt...)
	for range n {
		if err := stopped(); err != nil {
			return nil, err
		}
		next, err := g.next(all, s)
		if err != nil {
			return nil, fmt.Errorf("llm: Generate: token %d: %w", len(all)-len(prompt)+1, err)
		}
		all = append(all, next)
	}
	return all[len(prompt):], nil
}

// next draws the token that follows.
func (g *Generator) next(tokens []int, s *Sampler) (int, error) {
	logits, err := g.logits(tokens[max(0, len(tokens)-g.seq):])
	if err != nil {
		return 0, err
	}
	if x, ok := logits.([]float32); ok {
		return Sample(s, x)
	}
	return Sample(s, logits.([]float64))
}
