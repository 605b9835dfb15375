// Package site registers blueprints that are built as graphs, so that every machine can compile them.
// They grow on a chunk, at a weight or in the residual stream. Some come from package blueprints, and
// programs can add more:
//
//	kind, err := site.Register(blueprints.Blueprint{Name: "Shift", Site: blueprints.Stream,
//		Parameters: parameters}, build)
//
// Call Register early, in every program that reads a checkpoint with such seeds.
package site

import (
	"fmt"
	"slices"
	"sync"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/guard"
	"github.com/kasmina-go/kasmina/op/graft"
)

// Build adds the computation of a blueprint of the given size to a graph. params are the blueprint's
// parameters, in the order of blueprints.Blueprint.Parameters.
//
// On a chunk, x is the chunk [rows, C] and size is C. params are the arrays that blueprints.Parts lists
// for the weights of the seed's slot, and the result is t(x), with the shape of x. The slot's scale isn't
// used, and neither the stability modes nor the clipping of a Kasmina layer apply to the graph.
//
// In the stream, x is the normalized stream [rows, D], and the result is added to the stream. At a
// weight, x is the weight [out, in], and the result is added to the weight. In both cases the result
// has the shape of x. It should initially be 0 or nearly 0, because otherwise grafting would make the
// model worse at first.
//
// A Build function may be called by several goroutines concurrently.
type Build func(x *gorgonia.Node, params gorgonia.Nodes, size int) (*gorgonia.Node, error)

var (
	mu     sync.RWMutex
	builds = map[blueprints.Kind]Build{}
)

// Register registers a blueprint together with its graph and returns its kind. It returns the errors of
// blueprints.Register.
func Register(b blueprints.Blueprint, build Build) (blueprints.Kind, error) {
	if build == nil || b.Site == blueprints.Depth {
		return 0, fmt.Errorf("site.Register: %w %q: it grows at a %v, and its graph is nil: %t; "+
			"want a graph on a chunk, at a weight or in the stream", blueprints.ErrInvalid, b.Name,
			b.Site, build == nil)
	}

	b.Graph = b.Site == blueprints.Chunk
	mu.Lock()
	defer mu.Unlock()
	k, err := blueprints.Register(b)
	if err == nil {
		builds[k] = build
	}

	return k, err
}

// Apply adds the computation of a registered kind to the graph of x. The result has the shape of x.
func Apply(k blueprints.Kind, x *gorgonia.Node, params gorgonia.Nodes,
	size int) (y *gorgonia.Node, err error) {
	mu.RLock()
	build := builds[k]
	mu.RUnlock()
	if build == nil {
		return nil, fmt.Errorf("%w: %v has no graph: register it by site.Register",
			blueprints.ErrInvalid, k)
	}

	err = guard.Call(blueprints.ErrPanic, fmt.Sprintf("the graph of blueprint %q", k),
		func() (err error) {
			y, err = build(x, params, size)
			return err
		})
	switch {
	case err != nil:
		return nil, err
	case y == nil:
		return nil, fmt.Errorf("%w %q: its graph is nil", blueprints.ErrInvalid, k)
	case !slices.Equal(y.Shape(), x.Shape()) || y.Dtype() != x.Dtype():
		return nil, fmt.Errorf("%w %q: its graph gives %v of shape %v, want %v of shape %v",
			blueprints.ErrInvalid, k, y.Dtype(), y.Shape(), x.Dtype(), x.Shape())
	}

	return y, nil
}

// Weight returns the weight w plus the blueprint's contribution. Only LoRA uses scale.
func Weight(k blueprints.Kind, w *gorgonia.Node, params gorgonia.Nodes, size int, scale float64,
	r graft.Row) (*gorgonia.Node, error) {
	if k == blueprints.LoRA {
		if len(params) != 2 {
			return nil, fmt.Errorf("a LoRA has %d parameters, want 2", len(params))
		}
		return graft.LowRank(w, params[0], params[1], r, scale)
	}

	x, err := graft.Isolate(w, r, graft.Inward)
	if err != nil {
		return nil, err
	}

	if params, err = Own(params, r); err != nil {
		return nil, err
	}

	t, err := Apply(k, x, params, size)
	if err != nil {
		return nil, err
	}

	return graft.Blend(w, t, r)
}

// Own returns the parameters of a blueprint with gradients that are zero unless the seed learns.
func Own(params gorgonia.Nodes, r graft.Row) (own gorgonia.Nodes, err error) {
	own = make(gorgonia.Nodes, len(params))
	for i, p := range params {
		if own[i], err = graft.Isolate(p, r, graft.Learning); err != nil {
			return nil, err
		}
	}
	return own, nil
}
