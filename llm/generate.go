package llm

import (
	"errors"
	"fmt"

	"gorgonia.org/gorgonia"
)

// Generator draws text from a model, token by token. Each token sees as many of the tokens before it as the model's
// training sequences were long.
type Generator struct {
	config  Config
	graph   *Graph
	machine gorgonia.VM
	window  []int
}

// NewGenerator returns a generator that uses the model's parameters as they are at each call.
func NewGenerator(m *Model) (*Generator, error) {
	if m == nil {
		return nil, errors.New("llm: NewGenerator: the model is nil")
	}
	g, err := m.Graph(ForLogits, 1)
	if err != nil {
		return nil, err
	}
	return &Generator{m.Config, g, gorgonia.NewTapeMachine(g.G), make([]int, m.Config.Seq)}, nil
}

// Close frees the generator's machine.
func (g *Generator) Close() error { return g.machine.Close() }

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

// next draws the token that follows. The window is filled up with zeros to the right, which the model, being causal, does
// not see from the last token's position.
func (g *Generator) next(tokens []int, s *Sampler) (int, error) {
	tokens = tokens[max(0, len(tokens)-g.config.Seq):]
	clear(g.window[copy(g.window, tokens):])
	g.machine.Reset()
	if err := gorgonia.Let(g.graph.IDs, ids(g.window)); err != nil {
		return 0, err
	}
	if err := g.machine.RunAll(); err != nil {
		return 0, err
	}
	v, last := g.config.Vocab, len(tokens)-1
	switch logits := g.graph.Logits.Value().Data().(type) {
	case []float32:
		return Sample(s, logits[last*v:][:v])
	case []float64:
		return Sample(s, logits[last*v:][:v])
	default:
		return 0, fmt.Errorf("the logits are a %T", logits)
	}
}
