package llm

import (
	"context"
	"errors"
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/llm/data"
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
// is first needed.
type Inference struct {
	Model *Model
	// what computes a graph with the model's parameters; nil for a machine on the CPU
	Make func(*Graph) (Machine, error)

	losses    map[int]Runner // by batch size
	generator *Runner
	decoding  *decoding // in the place of a generator on the CPU
}

var errNoModel = errors.New("llm: an Inference needs a Model, which NewModel and LoadModel make")

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
