// Package site has the blueprints that grow at a weight or in the residual stream as graphs, which
// every machine compiles. They are those of package blueprints, and a user's own.
//
//	kind, err := site.Register(blueprints.Blueprint{Name: "Shift", Site: blueprints.Stream,
//		Parameters: parameters}, build)
//
// Register early, in every program that reads a checkpoint with such seeds.
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

// Build adds what a blueprint of some size computes to a graph. params are its parameters, in the
// order of blueprints.Blueprint.Parameters.
//
// On a chunk x is the chunk [rows, C], of size C. params are the arrays that Parts names of the
// weights of the seed's slot, and the result is t(x), of x's shape. Its scale plays no part. Of the
// modes of stability and of clipping of a Kasmina layer a graph knows nothing.
//
// In the stream x is the normalised stream [rows, D], and the result what is added to the stream,
// of the same shape. At a weight x is the weight [out, in], and the result is added to that. What
// it adds at first should be 0, or nearly so: else the model gets worse as it is grafted.
//
// Several goroutines may call a Build at once.
type Build func(x *gorgonia.Node, params gorgonia.Nodes, size int) (*gorgonia.Node, error)

var (
	mu     sync.RWMutex
	builds = map[blueprints.Kind]Build{}
)

// Register adds a blueprint of a chunk, a weight or the stream with its graph, and returns its kind.
// Its errors are those of blueprints.Register.
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

// Apply adds what a registered kind computes of x, whose shape the result has.
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

// Weight adds a weight with what a blueprint adds to it. scale is that of a LoRA.
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

// Own is the parameters of a blueprint, whose gradients are those of a seed that learns or 0.
func Own(params gorgonia.Nodes, r graft.Row) (own gorgonia.Nodes, err error) {
	own = make(gorgonia.Nodes, len(params))
	for i, p := range params {
		if own[i], err = graft.Isolate(p, r, graft.Learning); err != nil {
			return nil, err
		}
	}
	return own, nil
}
