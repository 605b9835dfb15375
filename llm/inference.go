package llm

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/op"
)

// Inference is the part of an engine that needs no gradients. It builds each of a model's graphs on
// first use. Only one goroutine may use it at a time, and not while the model changes.
type Inference struct {
	Model *Model
	// Make creates a machine that computes a graph with the model's parameters and keeps Graph.Outputs;
	// nil selects a machine on the CPU.
	Make func(*Graph) (Machine, error)
	// DrawsOnDevice makes the machines of graphs with [Graph.Draws] draw tokens. They must have a method Draw, as
	// cudaops.Machine has.
	DrawsOnDevice bool
	// Adapters are adapters next to the model on a device. Only batchers use them; see [Batcher.Adapted].
	Adapters *AdapterSet
	// Preference makes Loss return the loss of preference pairs.
	Preference *op.Preference

	compact  *CompactModel  // the model of the outline, if that is on the CPU
	outline  *ModelParts    // replaces Model if the values are on the machines
	owner    func() error   // frees the values once the machines are closed
	shape    uint64         // state of the model's blocks when the graphs were built
	attached []attachedSeed // chunk seeds that the graphs compute
	losses   map[int]Runner // by batch size
	logProbs map[int]Runner // by batch size
	scores   map[scoreShape]Runner
	decoding *Decoding
}

// InferenceOf returns an inference for a model whose values are known only to the machines created by
// newMachine. Close closes the machines and then calls owner to free everything else.
func InferenceOf(c Config, newMachine func(*Graph) (Machine, error),
	owner func() error) *Inference {
	m := Outline(c)
	return &Inference{Make: newMachine, outline: &m, owner: owner}
}

var errNoModel = errors.New("llm: an Inference needs a Model from NewModel or LoadModel")

// parts returns the parts to build graphs from. It closes graphs that were built for earlier blocks of
// the model.
func (i *Inference) parts() (m ModelParts, err error) {
	switch {
	case i == nil:
		return m, errNoModel
	case i.outline != nil:
		return *i.outline, nil
	case i.Model == nil || len(i.Model.Params) == 0:
		return m, errNoModel
	}

	attached := attachedTo(i.Model.Kasmina)
	if i.shape != shapeOf(i.Model) || !slices.Equal(i.attached, attached) {
		err = i.closeGraphs()
		i.losses, i.logProbs, i.scores, i.decoding = nil, nil, nil, nil
		i.shape, i.attached = shapeOf(i.Model), attached
	}

	return i.Model.Parts(), err
}

// runner returns a runner for a graph of the given kind.
func (i *Inference) runner(m ModelParts, kind GraphKind, sequences int,
	opts ...GraphOption) (Runner, error) {
	g, err := BuildGraph(m, kind, sequences, opts...)
	if err != nil {
		return Runner{}, err
	}

	if i.Make == nil {
		return runnerOnCPU(g)
	}

	machine, err := i.Make(g)
	if err != nil {
		return Runner{}, err
	}

	return Runner{Graph: g, Machine: machine}, nil
}

// Loss returns the mean loss of a batch in nats per token.
func (i *Inference) Loss(b data.Batch) (float64, error) {
	return i.LossContext(context.Background(), b)
}

// LossContext returns the mean loss of a batch in nats per token, or context.Cause(ctx) if ctx is done.
// On the CPU it checks ctx during the batch.
func (i *Inference) LossContext(ctx context.Context, b data.Batch) (float64, error) {
	m, err := i.parts()
	if err != nil {
		return 0, err
	}

	var opts []GraphOption
	if i.Preference != nil {
		opts = append(opts, WithPreference(*i.Preference))
	}
	r, err := i.lossRunner(&i.losses, m, b, opts...)
	if err != nil {
		return 0, err
	}

	return r.RunContext(ctx, b)
}

// lossRunner returns the runner for batches of the size of b from a cache, or adds it.
func (i *Inference) lossRunner(cache *map[int]Runner, m ModelParts, b data.Batch,
	opts ...GraphOption) (Runner, error) {
	sequences := len(b.Inputs) / m.Config.Seq
	if r, ok := (*cache)[sequences]; ok {
		return r, nil
	}

	r, err := i.runner(m, ForLoss, sequences, opts...)
	if err != nil {
		return Runner{}, err
	}
	if *cache == nil {
		*cache = map[int]Runner{}
	}
	(*cache)[sequences] = r
	return r, nil
}

// LogProbs returns the log-probabilities of the targets of a batch in nats, and 0 for tokens without
// a target. It returns context.Cause(ctx) if ctx is done; on the CPU it checks ctx during the batch.
func (i *Inference) LogProbs(ctx context.Context, b data.Batch) ([]float64, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}

	m, err := i.parts()
	if err != nil {
		return nil, err
	}

	r, err := i.lossRunner(&i.logProbs, m, b, WithLogProbs())
	if err != nil {
		return nil, err
	}
	if err := r.Let(b); err != nil {
		return nil, err
	}

	values, err := r.compute(ctx, r.Graph.LogProbs)
	if err != nil {
		return nil, err
	}

	all := make([]float64, len(b.Inputs))
	switch x := values.(type) {
	case []float32:
		for k, v := range x {
			all[k] = float64(v)
		}
	case []float64:
		copy(all, x)
	default:
		return nil, fmt.Errorf("the log-probabilities are a %T", values)
	}

	return all, nil
}

// TakePreferences returns the figures of all preference pairs whose loss has been computed since the last
// call.
func (i *Inference) TakePreferences() (f op.PreferenceFigures) {
	for _, sequences := range slices.Sorted(maps.Keys(i.losses)) {
		f = f.Plus(i.losses[sequences].TakePreferences())
	}
	return f
}

// Decoder implements [Engine].
func (i *Inference) Decoder() (func(ctx context.Context, tokens []int) (any, error), error) {
	m, err := i.parts()
	if err != nil {
		return nil, err
	}

	if i.decoding == nil {
		decoding := newDecoding(m, i.Make, i.OnCPU())
		decoding.draws = i.DrawsOnDevice
		if err := decoding.reserveStep(1); err != nil {
			return nil, err
		}
		i.decoding = decoding
	}

	i.decoding.Forget()
	return i.decoding.Next, nil
}

// Drawer returns a function that draws the token that follows a text, or nil if the host draws all tokens from the
// logits of Decoder.
func (i *Inference) Drawer() (DrawFunc, error) {
	if i == nil || !i.DrawsOnDevice {
		return nil, nil
	}
	if _, err := i.Decoder(); err != nil {
		return nil, err
	}
	return i.decoding.Draw, nil
}

// OnCPU reports whether the inference computes on the CPU.
func (i *Inference) OnCPU() bool { return i.Make == nil || i.compact != nil }

// NewBatcher returns a batcher for the inference's model. On a device, the inference must be from
// [InferenceOf], and the batcher owns it and closes it.
func (i *Inference) NewBatcher(o BatcherOptions) (*Batcher, error) {
	switch {
	case i == nil:
		return nil, errNoModel
	case i.compact != nil:
		return NewCompactBatcher(i.compact, o)
	case !i.OnCPU():
		return newDeviceBatcher(i, o)
	}
	return NewBatcher(i.Model, o)
}

// Kept returns the number of tokens with cached keys and values.
func (i *Inference) Kept() int {
	if i.decoding == nil {
		return 0
	}
	return i.decoding.Kept()
}

// Close frees the machines.
func (i *Inference) Close() error {
	err := i.closeGraphs()
	if i.owner != nil {
		err = errors.Join(err, i.owner())
	}
	return err
}

func (i *Inference) closeGraphs() error {
	var err error
	for _, runners := range []map[int]Runner{i.losses, i.logProbs} {
		for _, r := range runners {
			err = errors.Join(err, r.Machine.Close())
		}
	}
	for _, r := range i.scores {
		err = errors.Join(err, r.Machine.Close())
	}
	if i.decoding != nil {
		err = errors.Join(err, i.decoding.Close())
	}
	return err
}
