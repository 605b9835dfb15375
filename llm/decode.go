package llm

import (
	"context"
	"errors"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/llm/internal/kvcache"
)

// decoding computes logits on the CPU for a sequence that grows by one token at a time. It keeps
// the keys and values of the tokens before, and so takes a pass over one row for another token.
// Where there are none to go on from, at first and when a token has left the window, which moves
// all others to other positions, it takes a pass over a window that holds the tokens. Time and
// memory are those of the tokens that there are: Config.Seq may be much larger.
type decoding struct {
	model        *Model
	window, step Runner
	rows         int // of the window, 0 before there is one
	cache        *kvcache.Cache
	tokens       []int // whose keys and values are in the cache
}

func newDecoding(m *Model) (*decoding, error) {
	d := &decoding{model: m, cache: newCache(m.Config)}
	step, err := m.Graph(ForLogits, 1, func(b *graphBuilder) { b.cache = d.cache })
	if err != nil {
		return nil, err
	}
	d.step, err = onCPU(step)
	return d, err
}

func (d *decoding) close() (err error) {
	if d.rows > 0 {
		err = d.window.Machine.Close()
	}
	return errors.Join(err, d.step.Machine.Close())
}

// reserve makes the window one for so many tokens.
func (d *decoding) reserve(tokens int) error {
	rows := d.cache.Room(tokens)
	if rows == d.rows {
		return nil
	}
	g, err := d.model.Graph(ForLogits, 1, func(b *graphBuilder) { b.seq = rows })
	if err != nil {
		return err
	}
	w, err := onCPU(g, slices.Concat(g.keys, g.values)...)
	if err != nil {
		return err
	}
	if d.rows > 0 {
		err = d.window.Machine.Close()
	}
	d.window, d.rows = w, rows
	return err
}

// next returns the logits for what follows the tokens.
func (d *decoding) next(ctx context.Context, tokens []int) (any, error) {
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
	if err := d.cache.Fill(d.window.Machine.Value, d.window.keys, d.window.values); err != nil {
		return nil, err
	}
	d.tokens = slices.Clone(tokens)
	return logits, nil
}

func newCache(c Config) *kvcache.Cache {
	return kvcache.New(kvcache.Config{Layers: c.Layers, Heads: c.Heads, KVHeads: c.KVHeads,
		HeadDim: c.HeadDim, Base: c.Base, Seq: c.Seq})
}
