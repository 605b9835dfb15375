package llm

import (
	"context"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/internal/cpu/sampling"
	"github.com/kasmina-go/kasmina/llm/sampler"
)

// A DrawFunc draws the token that follows a text, by a sampler. The token that it returns counts as drawn by the
// sampler. last announces that no further token of the text will be requested.
//
// A device can be ahead of the host: while the host handles a token, the device already computes the tokens that
// follow it. If the next call asks for something else, that work is discarded.
type DrawFunc = func(ctx context.Context, tokens []int, s *sampler.Sampler, last bool) (int, error)

// drawingMachine is a machine that draws tokens, as cudaops.Machine does.
type drawingMachine interface {
	Machine
	Draw(ctx context.Context, p sampling.Pass) (wait func() ([]int, error), err error)
}

// drawAhead is a step in progress. Its input is the token that the step before it draws.
type drawAhead struct {
	wait     func() ([]int, error)
	sampler  *sampler.Sampler
	revision uint64 // of the sampler after the token before it
	plan     *sampler.Plan
}

// settle gives up the steps in progress, and forgets cached keys and values that do not belong to the given tokens.
func (d *Decoding) settle(tokens []int) {
	if d.ahead == nil {
		return
	}
	d.ahead = nil
	d.tokens = d.tokens[:min(commonPrefix(d.tokens, tokens), len(tokens)-1)]
}

// unknownToken takes the place of a token that only the device knows.
const unknownToken = -1

// Draw implements [DrawFunc]. It needs a machine that draws tokens, except for the first token of a text and for
// samplers with log-probabilities.
func (d *Decoding) Draw(ctx context.Context, tokens []int, s *sampler.Sampler, last bool) (int, error) {
	n := len(tokens)
	now := d.ahead
	if now != nil && now.sampler == s && now.revision == s.Revision() && slices.Equal(d.tokens, tokens) {
		d.ahead = nil
	} else {
		d.settle(tokens)
		now = &drawAhead{sampler: s, plan: s.Plan()}
		if !d.canDraw(tokens) || now.plan == nil {
			return drawFrom(ctx, d.Next, tokens, s)
		}
		if err := d.reserveStep(n); err != nil {
			d.tokens = nil
			return 0, err
		}
		if err := d.launch(ctx, now, tokens[n-1], -1); err != nil {
			return 0, err
		}
	}

	// Start the next step before waiting for the token that is its input.
	var next *drawAhead
	if !last && n < d.model.Config.Seq && n < d.capacity() {
		next = &drawAhead{sampler: s, plan: now.plan}
		if err := d.launch(ctx, next, unknownToken, 0); err != nil {
			return 0, err
		}
	}

	drawn, err := now.wait()
	if err != nil {
		d.Forget()
		return 0, err
	}
	if drawn[0] < 0 { // Next and the sampler return an error that describes the logits
		d.tokens = d.tokens[:n-1]
		return drawFrom(ctx, d.Next, tokens, s)
	}

	s.Accept(drawn[0])
	if next != nil {
		d.tokens[n] = drawn[0]
		next.plan = s.Plan() // counts the token
		next.plan.Next(false)
		next.revision = s.Revision()
		d.ahead = next
	}
	return drawn[0], nil
}

// canDraw reports whether a single step computes the token that follows the given ones.
func (d *Decoding) canDraw(tokens []int) bool {
	last := len(tokens) - 1
	return d.draws && last > 0 && last < d.model.Config.Seq && slices.Equal(d.tokens, tokens[:last])
}

// launch starts a step for a token at the next position. If the token is unknown, it is the one drawn by the given row
// of the preceding step.
func (d *Decoding) launch(ctx context.Context, a *drawAhead, token, from int) error {
	m, ok := d.step.Machine.(drawingMachine)
	if !ok {
		return fmt.Errorf("llm: a %T draws no tokens", d.step.Machine)
	}
	if err := d.step.letToken(max(token, 0), len(d.tokens)); err != nil {
		return err
	}
	if err := d.step.seeds.steer(); err != nil {
		return err
	}

	pass := sampling.Pass{From: []int{from}, Rules: []*sampling.Rule{a.plan.Next(token == unknownToken)}, Rows: []int{0}}
	var err error
	if a.wait, err = m.Draw(ctx, pass); err == nil {
		d.tokens = append(d.tokens, token)
	}
	return err
}
