package llm

import (
	"errors"
	"fmt"
	"slices"
)

// Generator draws text from a model, token by token, on the CPU. Each token sees as many of the tokens before it as the model's
// training sequences were long. Up to that length a token takes a pass over one row, since keys and values are kept; beyond it
// every token moves the others to other positions, and takes a pass over the whole window.
type Generator struct {
	seq     int
	decoder func() (func(tokens []int) (any, error), error)
	close   func() error
}

// NewGenerator returns a generator that uses the model's parameters as they are at each call.
func NewGenerator(m *Model) (*Generator, error) {
	if m == nil {
		return nil, errors.New("llm: NewGenerator: the model is nil")
	}
	i := &Inference{Model: m}
	if _, err := i.Decoder(); err != nil {
		return nil, err
	}
	return &Generator{m.Config.Seq, i.Decoder, i.Close}, nil
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
	logits, err := g.decoder()
	if err != nil {
		return nil, fmt.Errorf("llm: Generate: %w", err)
	}
	all := slices.Clone(prompt)
	for range n {
		if err := stopped(); err != nil {
			return nil, err
		}
		next, err := drawFrom(logits, all[max(0, len(all)-g.seq):], s)
		if err != nil {
			return nil, fmt.Errorf("llm: Generate: token %d: %w", len(all)-len(prompt)+1, err)
		}
		all = append(all, next)
	}
	return all[len(prompt):], nil
}

// drawFrom draws the token that follows.
func drawFrom(logits func(tokens []int) (any, error), tokens []int, s *Sampler) (int, error) {
	v, err := logits(tokens)
	if err != nil {
		return 0, err
	}
	if x, ok := v.([]float32); ok {
		return Sample(s, x)
	}
	return Sample(s, v.([]float64))
}
