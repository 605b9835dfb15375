// Package infer computes a model without gradients: losses, logits, and text drawn from it.
package infer

import (
	"context"
	"errors"

	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/graph"
	"github.com/kasmina-go/kasmina/llm/model"
)

// Inference is the part of an engine that has no gradients: graphs of a model, each built when it
// is first needed. It is for one goroutine at a time, and not while the model changes.
type Inference struct {
	Model *model.Model
	// what computes a graph with the model's parameters; nil for a machine on the CPU
	Make func(*graph.Graph) (graph.Machine, error)

	shape     uint64               // of the model that what follows is for
	losses    map[int]graph.Runner // by batch size
	generator *graph.Runner
	decoding  *graph.Decoding // in the place of a generator on the CPU
}

var errNoModel = errors.New("llm: an Inference needs a Model, which NewModel and LoadModel make")

// follow drops what is for other blocks than the model has now.
func (i *Inference) follow() error {
	if i.shape == model.Shape(i.Model) {
		return nil
	}
	err := i.Close()
	i.losses, i.generator, i.decoding, i.shape = nil, nil, nil, model.Shape(i.Model)
	return err
}

func (i *Inference) runner(kind graph.Kind, sequences int) (graph.Runner, error) {
	g, err := i.Model.Graph(kind, sequences)
	if err != nil {
		return graph.Runner{}, err
	}
	if i.Make == nil {
		return graph.OnCPU(g)
	}
	m, err := i.Make(g)
	if err != nil {
		return graph.Runner{}, err
	}
	return graph.Runner{Graph: g, Machine: m}, nil
}

// Loss is that of an engine.
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
		if r, err = i.runner(graph.ForLoss, sequences); err != nil {
			return 0, err
		}
		if i.losses == nil {
			i.losses = map[int]graph.Runner{}
		}
		i.losses[sequences] = r
	}
	return r.Run(b)
}

// Decoder is that of an engine.
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
			if i.decoding, err = graph.NewDecoding(i.Model.Parts()); err != nil {
				return nil, err
			}
		}
		i.decoding.Forget()
		return i.decoding.Next, nil
	}
	if i.generator == nil {
		r, err := i.runner(graph.ForLogits, 1)
		if err != nil {
			return nil, err
		}
		i.generator = &r
	}
	return i.generator.Next, nil
}

// Kept is how many tokens a decoder on the CPU has keys and values of.
func (i *Inference) Kept() int {
	if i.decoding == nil {
		return 0
	}
	return i.decoding.Kept()
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
