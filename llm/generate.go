package llm

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/kasmina-go/kasmina/llm/sampler"
)

// Generator draws text from a model, token by token. Each token attends to at most Config.Seq tokens,
// the length of the model's training sequences.
//
// Up to that length, each token takes only a pass over a single row, since keys and values are
// cached. Beyond it, every new token shifts the positions of the others and takes a pass over the
// whole window.
//
// Only one goroutine may use a Generator at a time, unless it belongs to a [Batcher]. While a trainer
// runs, each token waits for the end of the current step.
type Generator struct {
	config  Config
	decoder func() (logitsFunc, error)
	drawer  func() (DrawFunc, error) // nil if the host draws all tokens
	close   func() error
	embed   func(ctx context.Context, texts [][]int, p Pooling) ([][]float64, error) // nil if it cannot
}

// NewGenerator returns a generator that runs on the CPU and uses the model's current parameters at
// each call.
func NewGenerator(m *Model) (*Generator, error) {
	defer take(m)()
	i := &Inference{Model: m}
	if _, err := i.Decoder(); err != nil {
		return nil, err
	}
	return &Generator{config: m.Config, decoder: func() (logitsFunc, error) { return i.lockingDecoder(m) },
		close: i.Close}, nil
}

// logitsFunc returns the logits for the token that follows the given tokens. See Engine.Decoder.
type logitsFunc = func(ctx context.Context, tokens []int) (any, error)

// lockingDecoder returns a decoder that locks the model during each call and uses its current
// parameters.
func (i *Inference) lockingDecoder(m *Model) (logitsFunc, error) {
	var next logitsFunc
	var seen uint64
	return func(ctx context.Context, tokens []int) (any, error) {
		defer take(m)()
		if now := changesOf(m); next == nil || now != seen {
			if err := pull(m, paramNames(m)...); err != nil {
				return nil, err
			}
			var err error
			if next, err = i.Decoder(); err != nil { // forgets the tokens so far
				return nil, err
			}
			seen = now
		}
		return next(ctx, tokens)
	}, nil
}

// paramNames returns the names of all parameters.
func paramNames(m *Model) []string {
	names := make([]string, len(m.Params))
	for i, p := range m.Params {
		names[i] = p.Name
	}
	return names
}

// GeneratorOf returns a generator that takes its logits from decoder, which is called once for each text.
func GeneratorOf(c Config, decoder func() (logitsFunc, error)) *Generator {
	return &Generator{config: c, decoder: decoder}
}

// Close frees the generator's machine.
func (g *Generator) Close() error {
	if g == nil || g.close == nil {
		return nil
	}
	return g.close()
}

// Generate yields n tokens, drawn by s, that continue the prompt, which must contain at least one
// token. Each token is yielded as soon as it is drawn:
//
//	for token, err := range generator.Generate(ctx, prompt, 100, sampler) {
//		if err != nil {
//			return err
//		}
//		...
//	}
//
// If the sampler has a constraint, iteration also stops when the text is complete.
//
// Iteration stops after the first error. Cancellation of the context is such an error, and is noticed
// even during a pass over the model. If the model changes between two tokens, the next token is drawn
// from the changed model.
func (g *Generator) Generate(ctx context.Context, prompt []int, n int,
	s *sampler.Sampler) iter.Seq2[int, error] {
	return func(yield func(int, error) bool) {
		if err := g.generate(ctx, prompt, n, s, func(token int) bool {
			return yield(token,
				nil)
		}); err != nil {
			yield(0, fmt.Errorf("llm: Generate: %w", err))
		}
	}
}

// generate calls yield with each token until yield returns false.
func (g *Generator) generate(ctx context.Context, prompt []int, n int, s *sampler.Sampler,
	yield func(token int) bool) error {
	switch {
	case len(prompt) == 0:
		return errors.New("the prompt is empty, want at least one token")
	case n < 0:
		return fmt.Errorf("asked for %d tokens, want at least 0", n)
	case s == nil:
		return errors.New("the sampler is nil")
	}

	draw, err := g.draws()
	if err != nil {
		return err
	}

	window := slices.Clone(prompt[max(0, len(prompt)-g.config.Seq):])
	for i := range n {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		next, err := draw(ctx, window, s, i == n-1)
		if err != nil {
			return fmt.Errorf("token %d: %w", i+1, err)
		}
		if !yield(next) || s.Done() {
			return nil
		}
		if len(window) == g.config.Seq {
			window = slices.Delete(window, 0, 1)
		}
		window = append(window, next)
	}

	return nil
}

// draws returns the function that draws the tokens of a text.
func (g *Generator) draws() (DrawFunc, error) {
	if g.drawer != nil {
		if draw, err := g.drawer(); draw != nil || err != nil {
			return draw, err
		}
	}

	logits, err := g.decoder()
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, tokens []int, s *sampler.Sampler, _ bool) (int, error) {
		return drawFrom(ctx, logits, tokens, s)
	}, nil
}

// drawFrom draws the token that follows the given tokens.
func drawFrom(ctx context.Context, logits func(ctx context.Context, tokens []int) (any, error),
	tokens []int, s *sampler.Sampler) (int, error) {
	v, err := logits(ctx, tokens)
	if err != nil {
		return 0, err
	}
	return drawToken(v, s)
}

// drawToken draws a token from logits, a []float32 or []float64.
func drawToken(logits any, s *sampler.Sampler) (int, error) {
	if x, ok := logits.([]float32); ok {
		return sampler.Draw(s, x)
	}
	return sampler.Draw(s, logits.([]float64))
}
