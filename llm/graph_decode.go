package llm

import (
	"context"
	"errors"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/op/kvcache"
)

// Decoding computes logits for a sequence that grows by one token at a time. It keeps the keys and
// values of the tokens before, and so takes a pass over one row for another token. Where there are
// none to go on from, it takes a pass over a window that holds the tokens. That is so at first and
// when a token has left the window, which moves all others to other positions. Time and memory are
// those of the tokens that there are: Config.Seq may be much larger. It is for one goroutine at a
// time.
type Decoding struct {
	model        ModelParts
	make         func(*Graph) (Machine, error)
	least        int    // rows of a window
	initial      int    // positions that are kept at first
	window, step Runner // without machines before there are any
	tokens       []int  // whose keys and values are kept
}

// A keeper is a machine that keeps keys and values on a device. Keep takes over those of the first
// positions from another machine. They are its outputs, or both are an attention to what is kept
// there, as cached is here.
type keyKeeper interface {
	Keep(cached *gorgonia.Node, from gorgonia.VM, keys, values *gorgonia.Node) error
}

const (
	// smallestWindow is how many positions a GPU computes in the time of one.
	smallestWindow = 128
	// fewKept is how many positions a machine keeps at first. More take another one, of twice as
	// many.
	fewKept = 1024
)

// NewDecoding returns a decoding of a model as it is at each call, on machines that make makes: each
// must have [Graph.Outputs] as outputs. Without make they are on the CPU.
func NewDecoding(m ModelParts, make func(*Graph) (Machine, error)) (*Decoding, error) {
	d := &Decoding{model: m, make: make, least: smallestWindow, initial: fewKept}
	if make == nil {
		d.least, d.initial = 1, m.Config.Seq // an op's memory grows
		d.make = func(g *Graph) (Machine, error) {
			r, err := runnerOnCPU(g, g.Outputs()...)
			return r.Machine, err
		}
	}
	return d, d.reserveStep(1)
}

// Close frees the machines.
func (d *Decoding) Close() error { return errors.Join(d.window.close(), d.step.close()) }

// close frees the machine, if there is one.
func (r *Runner) close() error {
	m := r.Machine
	*r = Runner{}
	if m == nil {
		return nil
	}
	return m.Close()
}

// Kept is how many tokens have keys and values that are kept.
func (d *Decoding) Kept() int { return len(d.tokens) }

// Forget drops the keys and values of the tokens before: the model may have changed.
func (d *Decoding) Forget() { d.tokens = nil }

// capacity is how many positions the step keeps.
func (d *Decoding) capacity() int {
	if d.step.Machine == nil {
		return 0
	}
	return d.step.blocks.Seq
}

// renew makes a runner one of another graph, once its machine is closed.
func (d *Decoding) renew(r *Runner, opt GraphOption) error {
	if err := r.close(); err != nil {
		return err
	}

	g, err := BuildGraph(d.model, ForLogits, 1, opt)
	if err != nil {
		return err
	}

	m, err := d.make(g)
	if err == nil {
		*r = Runner{g, m}
	}

	return err
}

// reserveStep makes the step one that keeps so many positions, of which it takes over what the one
// before it kept.
func (d *Decoding) reserveStep(positions int) error {
	if positions <= d.capacity() {
		return nil
	}
	before := d.step
	d.step = Runner{}
	err := d.renew(&d.step, withPosition(kvcache.Room(max(positions, d.initial), d.model.Config.Seq)))
	if err == nil && len(d.tokens) > 0 {
		err = d.keep(before.Machine, before.blocks.Cached, before.blocks.Cached)
	}
	return errors.Join(err, before.close())
}

// reserve makes the window one for so many tokens, and the step one for another.
func (d *Decoding) reserve(tokens int) error {
	seq := d.model.Config.Seq
	if tokens < seq {
		if err := d.reserveStep(tokens + 1); err != nil {
			return err
		}
	}

	rows := kvcache.Room(max(tokens, d.least), seq)
	if d.window.Machine != nil && (rows == d.window.blocks.Seq ||
		rows < d.window.blocks.Seq && d.least > 1) {
		return nil // a device has its memory already
	}

	return d.renew(&d.window, func(b *graphBuilder) { b.blocks.Seq, b.keeps = rows, true })
}

// Next returns the logits for what follows the tokens.
func (d *Decoding) Next(ctx context.Context, tokens []int) (any, error) {
	if d.make == nil || ctx == nil {
		return nil, errors.New("llm: the context is nil, or the decoder its zero value")
	}

	last := len(tokens) - 1
	if last > 0 && last < d.model.Config.Seq && slices.Equal(d.tokens, tokens[:last]) {
		if err := d.reserveStep(last + 1); err != nil {
			d.tokens = nil
			return nil, err
		}
		if err := d.step.letToken(tokens[last], last); err != nil {
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
	if err != nil || len(tokens) == d.model.Config.Seq { // the next token moves the window
		return logits, err
	}

	if err := d.keep(d.window.Machine, d.window.blocks.Keys, d.window.blocks.Values); err != nil {
		return nil, err
	}

	d.tokens = slices.Clone(tokens)
	return logits, nil
}

// letToken gives a graph its only token, and where that is.
func (g *Graph) letToken(token, position int) error {
	if err := gorgonia.Let(g.IDs, idTensor([]int{token})); err != nil {
		return err
	}
	return gorgonia.Let(g.Position, idTensor([]int{position}))
}

// keep has the step take over keys and values of another machine, as a keeper does.
func (d *Decoding) keep(from Machine, keys, values gorgonia.Nodes) error {
	k, onDevice := d.step.Machine.(keyKeeper)
	for i, n := range d.step.blocks.Cached {
		if onDevice {
			if err := k.Keep(n, from.(gorgonia.VM), keys[i], values[i]); err != nil {
				return err
			}
			continue
		}
		o := n.Op().(*kvcache.AttentionOp)
		if before, ok := keys[i].Op().(*kvcache.AttentionOp); ok {
			o.Take(before)
			continue
		}
		key, err := from.Value(keys[i])
		if err != nil {
			return err
		}
		value, err := from.Value(values[i])
		if err != nil {
			return err
		}
		o.Fill(key.Data(), value.Data())
	}

	return nil
}

// WithWindow makes a graph one of sequences of so many positions, in the place of Config.Seq.
func WithWindow(positions int) GraphOption { return func(b *graphBuilder) { b.blocks.Seq = positions } }

// withPosition makes a graph one of a single token, which keeps the keys and values of at most so
// many positions.
func withPosition(positions int) GraphOption {
	return func(b *graphBuilder) { b.blocks.Seq, b.cached = positions, true }
}
