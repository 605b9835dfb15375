package llm

import (
	"context"
	"errors"

	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/graph"
)

// Inference is the part of an engine that has no gradients: graphs of a model, each built when it
// is first needed. It is for one goroutine at a time, and not while the model changes.
type Inference struct {
	Model *Model
	// what computes a graph with the model's parameters; nil for a machine on the CPU
	Make func(*Graph) (Machine, error)

	shape     uint64         // of the model that what follows is for
	losses    map[int]Runner // by batch size
	generator *Runner
	decoding  *graph.Decoding // in the place of a generator on the CPU
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
		return graph.OnCPU(g)
	}
	m, err := i.Make(g)
	if err != nil {
		return Runner{}, err
	}
	return Runner{Graph: g, Machine: m}, nil
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
			if i.decoding, err = graph.NewDecoding(i.Model.parts()); err != nil {
				return nil, err
			}
		}
		i.decoding.Forget()
		return i.decoding.Next, nil
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
		err = errors.Join(err, i.decoding.Close())
	}
	return err
}
