package llm

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/internal/kvcache"
)

// Machine computes a graph, as cpuops.Machine and cudaops.Machine do.
type Machine interface {
	RunAll() error
	Value(*gorgonia.Node) (gorgonia.Value, error)
	Close() error
}

// Runner is a model's graph on a machine.
type Runner struct {
	*Graph
	Machine Machine
}

var errNoRunner = errors.New("llm: a Runner needs a Graph and a Machine")

// Run computes a graph with a loss on a batch, and returns the loss.
func (r Runner) Run(b data.Batch) (float64, error) {
	if r.Graph == nil || r.Machine == nil {
		return 0, errNoRunner
	}
	if err := r.Let(b); err != nil {
		return 0, err
	}
	data, err := r.compute(context.Background(), r.Loss)
	if err != nil {
		return 0, err
	}
	switch x := data.(type) {
	case float32:
		return float64(x), nil
	case float64:
		return x, nil
	}
	return 0, fmt.Errorf("the loss is a %T", data)
}

// Next computes a graph for logits, and returns those for the token that follows the given ones: a
// []float32 or a []float64. On a cpuops.Machine it ends with the context.
func (r Runner) Next(ctx context.Context, tokens []int) (any, error) {
	if r.Graph == nil || r.Machine == nil {
		return nil, errNoRunner
	}
	if err := r.LetTokens(tokens); err != nil {
		return nil, err
	}
	return r.compute(ctx, r.Logits)
}

func (r Runner) compute(ctx context.Context, n *gorgonia.Node) (any, error) {
	run := r.Machine.RunAll
	if m, ok := r.Machine.(*cpuops.Machine); ok {
		run = func() error { return m.Run(ctx) }
	}
	if err := run(); err != nil {
		return nil, err
	}
	v, err := r.Machine.Value(n)
	if err != nil {
		return nil, err
	}
	return v.Data(), nil
}

// Inference is the part of an engine that has no gradients: graphs of a model, each built when it
// is first needed. It is for one goroutine at a time, and not while the model changes.
type Inference struct {
	Model *Model
	// what computes a graph with the model's parameters; nil for a machine on the CPU
	Make func(*Graph) (Machine, error)

	shape     uint64         // of the model that what follows is for
	losses    map[int]Runner // by batch size
	generator *Runner
	decoding  *decoding // in the place of a generator on the CPU
}

var errNoModel = errors.New("llm: an Inference needs a Model, which NewModel and LoadModel make")

// follow drops what is for other blocks than the model has now.
func (i *Inference) follow() error {
	if i.shape == i.Model.shape {
		return nil
	}
	err := i.Close()
	i.losses, i.generator, i.decoding, i.shape = nil, nil, nil, i.Model.shape
	return err
}

func (i *Inference) runner(kind GraphKind, sequences int) (Runner, error) {
	g, err := i.Model.Graph(kind, sequences)
	if err != nil {
		return Runner{}, err
	}
	if i.Make == nil {
		return onCPU(g)
	}
	m, err := i.Make(g)
	if err != nil {
		return Runner{}, err
	}
	return Runner{g, m}, nil
}

// onCPU returns a graph on a machine that keeps the outputs, and what no other node needs.
func onCPU(g *Graph, outputs ...*gorgonia.Node) (Runner, error) {
	m, err := cpuops.NewMachine(g.G, cpuops.WithOutputs(outputs...))
	if err != nil {
		return Runner{}, err
	}
	return Runner{g, m}, nil
}

// Loss is that of [Engine].
func (i *Inference) Loss(b data.Batch) (float64, error) {
	if i == nil || i.Model == nil || len(i.Model.Params) == 0 {
		return 0, errNoModel
	}
	if err := i.follow(); err != nil {
		return 0, err
	}
	sequences := len(b.Inputs) / i.Model.Config.Seq
	r, ok := i.losses[sequences]
	if !ok {
		var err error
		if r, err = i.runner(ForLoss, sequences); err != nil {
			return 0, err
		}
		if i.losses == nil {
			i.losses = map[int]Runner{}
		}
		i.losses[sequences] = r
	}
	return r.Run(b)
}

// Decoder is that of [Engine].
func (i *Inference) Decoder() (func(ctx context.Context, tokens []int) (any, error), error) {
	if i == nil || i.Model == nil || len(i.Model.Params) == 0 {
		return nil, errNoModel
	}
	if err := i.follow(); err != nil {
		return nil, err
	}
	if i.Make == nil {
		if i.decoding == nil {
			var err error
			if i.decoding, err = newDecoding(i.Model); err != nil {
				return nil, err
			}
		}
		i.decoding.tokens = nil
		return i.decoding.next, nil
	}
	if i.generator == nil {
		r, err := i.runner(ForLogits, 1)
		if err != nil {
			return nil, err
		}
		i.generator = &r
	}
	return i.generator.Next, nil
}

// Close frees the machines.
func (i *Inference) Close() error {
	var err error
	for _, r := range i.losses {
		err = errors.Join(err, r.Machine.Close())
	}
	if i.generator != nil {
		err = errors.Join(err, i.generator.Machine.Close())
	}
	if i.decoding != nil {
		err = errors.Join(err, i.decoding.close())
	}
	return err
}

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
	step, err := m.Graph(ForLogits, 1, func(b *graphBuilder) { b.blocks.Cache = d.cache })
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
	g, err := d.model.Graph(ForLogits, 1, func(b *graphBuilder) { b.blocks.Seq = rows })
	if err != nil {
		return err
	}
	w, err := onCPU(g, slices.Concat(g.blocks.Keys, g.blocks.Values)...)
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
	if err := d.cache.Fill(d.window.Machine.Value, d.window.blocks.Keys,
		d.window.blocks.Values); err != nil {
		return nil, err
	}
	d.tokens = slices.Clone(tokens)
	return logits, nil
}

func newCache(c Config) *kvcache.Cache {
	return kvcache.New(kvcache.Config{Layers: c.Layers, Heads: c.Heads, KVHeads: c.KVHeads,
		HeadDim: c.HeadDim, Seq: c.Seq, Scale: c.AttentionScale})
}
