package llm

import (
	"context"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/internal/cpu/sampling"
	"github.com/kasmina-go/kasmina/llm/sampler"
)

// A DrawFunc draws the token that follows the given tokens, as s would draw it from their logits, and advances s
// accordingly. last means that no further token of this text will be requested.
//
// A device may run ahead of the host and compute the following tokens while the host is still processing this one. If
// the next call does not continue the text, that work is discarded.
type DrawFunc = func(ctx context.Context, tokens []int, s *sampler.Sampler, last bool) (int, error)

// drawingMachine is a machine that draws tokens, as cudaops.Machine does.
type drawingMachine interface {
	Machine
	Draw(ctx context.Context, p sampling.Pass) (wait func() ([]int, error), err error)
}

// drawAhead is a step in progress on the device. Its input is the token that the preceding step draws.
type drawAhead struct {
	wait     func() ([]int, error)
	sampler  *sampler.Sampler
	revision uint64 // the sampler's revision after the preceding token
	plan     *sampler.Plan
}

// settle discards the step in progress, along with cached keys and values that do not belong to the given tokens.
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
// samplers that report log-probabilities.
func (d *Decoding) Draw(ctx context.Context, tokens []int, s *sampler.Sampler, last bool) (int, error) {
	n := len(tokens)

	// Use the step in progress if it continues this text, or start one.
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

// canDraw reports whether the token that follows the given ones can be drawn on the device in a single step.
func (d *Decoding) canDraw(tokens []int) bool {
	last := len(tokens) - 1
	return d.draws && last > 0 && last < d.model.Config.Seq && slices.Equal(d.tokens, tokens[:last])
}

// launch starts a step whose input is a token at the next position. If the token is unknownToken, the input is the
// token that the preceding step draws for the row given by from. For all other tokens, from is −1.
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
