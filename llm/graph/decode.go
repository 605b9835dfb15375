package graph

import (
	"context"
	"errors"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm/arch"
	"github.com/kasmina-go/kasmina/llm/internal/kvcache"
	"gorgonia.org/gorgonia"
)

// Decoding computes logits on the CPU for a sequence that grows by one token at a time. It keeps
// the keys and values of the tokens before, and so takes a pass over one row for another token.
// Where there are none to go on from, at first and when a token has left the window, which moves
// all others to other positions, it takes a pass over a window that holds the tokens. Time and
// memory are those of the tokens that there are: Config.Seq may be much larger.
// It is for one goroutine at a time.
type Decoding struct {
	model        Model
	window, step Runner
	rows         int // of the window, 0 before there is one
	cache        *kvcache.Cache
	tokens       []int // whose keys and values are in the cache
}

// NewDecoding returns a decoding of a model as it is at each call.
func NewDecoding(m Model) (*Decoding, error) {
	d := &Decoding{model: m, cache: newCache(m.Config)}
	step, err := Build(m, ForLogits, 1, func(b *builder) { b.blocks.Cache = d.cache })
	if err != nil {
		return nil, err
	}
	d.step, err = OnCPU(step)
	return d, err
}

// Close frees the machines.
func (d *Decoding) Close() (err error) {
	if d.cache == nil {
		return nil
	}
	if d.rows > 0 {
		err = d.window.Machine.Close()
	}
	return errors.Join(err, d.step.Machine.Close())
}

// Kept is how many tokens have keys and values that are kept.
func (d *Decoding) Kept() int { return len(d.tokens) }

// Forget drops the keys and values of the tokens before: the model may have changed.
func (d *Decoding) Forget() { d.tokens = nil }

// reserve makes the window one for so many tokens.
func (d *Decoding) reserve(tokens int) error {
	rows := d.cache.Room(tokens)
	if rows == d.rows {
		return nil
	}
	g, err := Build(d.model, ForLogits, 1, WithWindow(rows))
	if err != nil {
		return err
	}
	w, err := OnCPU(g, slices.Concat(g.blocks.Keys, g.blocks.Values)...)
	if err != nil {
		return err
	}
	if d.rows > 0 {
		err = d.window.Machine.Close()
	}
	d.window, d.rows = w, rows
	return err
}

// Next returns the logits for what follows the tokens.
func (d *Decoding) Next(ctx context.Context, tokens []int) (any, error) {
	if d.cache == nil || ctx == nil {
		return nil, errors.New("llm: the context is nil, or the decoder its zero value")
	}
	seq, last := d.model.Config.Seq, len(tokens)-1
	if last > 0 && last < seq && slices.Equal(d.tokens, tokens[:last]) {
		d.cache.Position = last
		if err := gorgonia.Let(d.step.IDs, ids(tokens[last:])); err != nil {
			return nil, err
		}
		logits, err := d.step.compute(ctx, d.step.Logits)
		if err == nil {
			d.tokens = append(d.tokens, tokens[last])
		}
		return logits, err
	}
	d.tokens = nil
	if err := d.reserve(len(tokens)); err != nil {
		return nil, err
	}
	logits, err := d.window.Next(ctx, tokens)
	if err != nil || len(tokens) == seq { // the next token moves the window
		return logits, err
	}
	if err := d.cache.Fill(d.window.Machine.Value, d.window.blocks.Keys,
		d.window.blocks.Values); err != nil {
		return nil, err
	}
	d.tokens = slices.Clone(tokens)
	return logits, nil
}

func newCache(c arch.Config) *kvcache.Cache {
	attentions := c.Layers
	for _, p := range c.Planted {
		if p.Site == blueprints.Stream && p.Kind == blueprints.Attention.String() {
			attentions++
		}
	}
	return kvcache.New(kvcache.Config{Attentions: attentions, HeadDim: c.HeadDim, Seq: c.Seq,
		Scale: c.AttentionScale})
}
