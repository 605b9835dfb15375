package llm

import (
	"context"
	"errors"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/op/kvcache"
)

// Decoding computes logits for a sequence that grows by one token at a time. It caches the keys and
// values of earlier tokens, so that each further token takes a pass over a single row.
//
// Without a matching cache, it takes a pass over a window of all tokens. This happens at the start
// and after a token has left the window, since all other tokens have then moved to other positions.
// Time and memory grow with the actual number of tokens, so Config.Seq may be much larger.
//
// Only one goroutine may use a Decoding at a time.
type Decoding struct {
	model        ModelParts
	newMachine   func(*Graph) (Machine, error)
	least        int    // minimum number of rows of a window
	initial      int    // initial capacity of the cache in positions
	window, step Runner // without machines until first used
	tokens       []int  // tokens with cached keys and values
	draws        bool   // whether the step's machine draws tokens
	ahead        *drawAhead
}

// keyKeeper is a machine that caches keys and values on a device. Keep copies the keys and values of the
// first positions from another machine to the cache of the attention node cached. The nodes keys and
// values are either outputs of the other machine or both its cached attention node.
type keyKeeper interface {
	Keep(cached *gorgonia.Node, from gorgonia.VM, keys, values *gorgonia.Node) error
}

const (
	// smallestWindow is the number of positions that a GPU computes in the same time as one.
	smallestWindow = 128
	// fewKept is the initial capacity of a machine's cache in positions. A sequence that outgrows it
	// moves to a machine with twice the capacity.
	fewKept = 1024
)

// NewDecoding returns a decoding that uses the model's current state at each call. The function
// newMachine returns the machine for a graph, which must compute the graph's [Graph.Outputs]. If
// newMachine is nil, the machines run on the CPU.
func NewDecoding(m ModelParts, newMachine func(*Graph) (Machine, error)) (*Decoding, error) {
	d := newDecoding(m, newMachine, newMachine == nil)
	return d, d.reserveStep(1)
}

// newDecoding returns a decoding without machines.
func newDecoding(m ModelParts, newMachine func(*Graph) (Machine, error), onCPU bool) *Decoding {
	d := &Decoding{model: m, newMachine: newMachine, least: smallestWindow, initial: fewKept}
	if onCPU {
		d.least, d.initial = 1, m.Config.Seq // the cache on a CPU grows by itself
	}
	if newMachine == nil {
		d.newMachine = func(g *Graph) (Machine, error) {
			r, err := runnerOnCPU(g, g.Outputs()...)
			return r.Machine, err
		}
	}
	return d
}

// Close frees the machines.
func (d *Decoding) Close() error { return errors.Join(d.window.close(), d.step.close()) }

// close frees the runner's machine, if it has one.
func (r *Runner) close() error {
	m := r.Machine
	*r = Runner{}
	if m == nil {
		return nil
	}
	return m.Close()
}

// Kept returns the number of tokens with cached keys and values.
func (d *Decoding) Kept() int { return len(d.tokens) }

// Forget drops the cached keys and values. It must be called when the model may have changed.
func (d *Decoding) Forget() { d.tokens, d.ahead = nil, nil }

// capacity returns the number of positions that the step's cache can hold.
func (d *Decoding) capacity() int {
	if d.step.Machine == nil {
		return 0
	}
	return d.step.blocks.Seq
}

// replaceRunner closes a runner's machine and replaces it with one for a new graph.
func (d *Decoding) replaceRunner(r *Runner, opt GraphOption) error {
	if err := r.close(); err != nil {
		return err
	}

	g, err := BuildGraph(d.model, ForLogits, 1, opt)
	if err != nil {
		return err
	}

	m, err := d.newMachine(g)
	if err == nil {
		*r = Runner{g, m}
	}

	return err
}

// reserveStep ensures that the step can cache the given number of positions. A new step takes over the
// cache of the old one.
func (d *Decoding) reserveStep(positions int) error {
	if positions <= d.capacity() {
		return nil
	}
	before := d.step
	d.step = Runner{}
	room := kvcache.Room(max(positions, d.initial), d.model.Config.Seq)
	err := d.replaceRunner(&d.step, func(b *graphBuilder) { b.blocks.Seq, b.cached, b.draws = room, true, d.draws })
	if err == nil && len(d.tokens) > 0 {
		err = d.keep(before.Machine, before.blocks.Cached, before.blocks.Cached)
	}
	return errors.Join(err, before.close())
}

// reserve ensures that the window holds the given number of tokens, and that the step has room for one
// more.
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
		return nil // a device has already allocated the memory
	}

	return d.replaceRunner(&d.window, func(b *graphBuilder) { b.blocks.Seq, b.keeps = rows, true })
}

// Next returns the logits for the token that follows the given tokens. The next call may overwrite them.
func (d *Decoding) Next(ctx context.Context, tokens []int) (any, error) {
	d.settle(tokens)
	last := len(tokens) - 1
	if last > 0 && last < d.model.Config.Seq && slices.Equal(d.tokens, tokens[:last]) {
		if err := d.reserveStep(last + 1); err != nil {
			d.tokens = nil
			return nil, err
		}
		if err := d.step.letToken(tokens[last], last); err != nil {
			return nil, err
		}
		logits, err := d.step.logits(ctx)
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

// letToken sets a cached graph's single token and its position.
func (g *Graph) letToken(token, position int) error {
	if err := gorgonia.Let(g.IDs, idTensor([]int{token})); err != nil {
		return err
	}
	return gorgonia.Let(g.Position, idTensor([]int{position}))
}

// keep copies keys and values from another machine to the step's cache.
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

// WithWindow makes a graph process sequences of the given number of positions instead of Config.Seq.
func WithWindow(positions int) GraphOption { return func(b *graphBuilder) { b.blocks.Seq = positions } }
