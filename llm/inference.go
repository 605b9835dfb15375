package llm

import (
	"context"
	"errors"
	"slices"

	"github.com/kasmina-go/kasmina/llm/data"
)

// Inference is the part of an engine that needs no gradients. It builds each of a model's graphs on
// first use. Only one goroutine may use it at a time, and not while the model changes.
type Inference struct {
	Model *Model
	// Make creates a machine that computes a graph with the model's parameters and keeps Graph.Outputs;
	// nil selects a machine on the CPU.
	Make func(*Graph) (Machine, error)

	outline  *ModelParts    // replaces Model if the values are on the machines
	owner    func() error   // frees the values once the machines are closed
	shape    uint64         // state of the model's blocks when the graphs were built
	attached []attachedSeed // chunk seeds that the graphs compute
	losses   map[int]Runner // by batch size
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
		i.losses, i.scores, i.decoding = nil, nil, nil
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

	sequences := len(b.Inputs) / m.Config.Seq
	r, ok := i.losses[sequences]
	if !ok {
		if r, err = i.runner(m, ForLoss, sequences); err != nil {
			return 0, err
		}
		if i.losses == nil {
			i.losses = map[int]Runner{}
		}
		i.losses[sequences] = r
	}

	return r.RunContext(ctx, b)
}

// Decoder implements [Engine].
func (i *Inference) Decoder() (func(ctx context.Context, tokens []int) (any, error), error) {
	m, err := i.parts()
	if err != nil {
		return nil, err
	}

	if i.decoding == nil {
		if i.decoding, err = NewDecoding(m, i.Make); err != nil {
			return nil, err
		}
	}

	i.decoding.Forget()
	return i.decoding.Next, nil
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
	for _, r := range i.losses {
		err = errors.Join(err, r.Machine.Close())
	}
	for _, r := range i.scores {
		err = errors.Join(err, r.Machine.Close())
	}
	if i.decoding != nil {
		err = errors.Join(err, i.decoding.Close())
	}
	return err
}
