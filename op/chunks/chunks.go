// Package chunks applies a different Kasmina layer to each row of a matrix, so that texts with different chunk seeds can
// share a pass over a model. Package lowrank does the same for low-rank adapters.
package chunks

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/kasmina"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/seed"
	"github.com/kasmina-go/kasmina/op/lowrank"
)

// A Layer is a frozen Kasmina layer. It divides the features into equal chunks.
type Layer struct {
	Chunks int
	Seeds  []Seed // in the order of their chunks, at most one for each
}

// A Seed replaces its chunk x by x + Alpha·(t(x) − x), where t is the transform of its kind.
type Seed struct {
	Chunk   int
	Kind    blueprints.Kind
	Alpha   float64
	Scale   float64
	Weights any // []float32 or []float64, as many as the kind uses
}

// Width returns the width of slots, which is enough for the weights of each of the layer's seeds.
func (l *Layer) Width(features int) int {
	width := features / max(1, l.Chunks)
	for _, s := range l.Seeds {
		switch w := s.Weights.(type) {
		case []float32:
			width = max(width, len(w))
		case []float64:
			width = max(width, len(w))
		}
	}
	return width
}

// ApplyOp is the op that [Apply] applies.
type ApplyOp struct {
	opbase.Base
	layers    []*Layer
	selection *lowrank.Selection
	prepared  []any // a *prepared[T] for each layer; nil until its first use
}

// prepared is a layer with the weights of its seeds in slots.
type prepared[T cpu.Float] struct {
	layer           kasmina.Layer[T]
	weights, scales []T
}

// Apply applies to each row of x [rows, features] the layer selected for it. Rows without a selected layer, and rows
// with a nil layer, stay the same.
//
// The layers must not change afterwards. The op has no gradient, and runs only on CPUs.
func Apply(x *gorgonia.Node, layers []*Layer, selection *lowrank.Selection) (*gorgonia.Node, error) {
	if x == nil || selection == nil {
		return nil, errors.New("chunks.Apply: the input or the selection is nil")
	}
	dt := x.Dtype()
	if x.Dims() != 2 || dt != tensor.Float32 && dt != tensor.Float64 {
		return nil, fmt.Errorf("chunks.Apply: x is a %v of shape %v, want a matrix of floats", dt, x.Shape())
	}
	for i, l := range layers {
		if l == nil {
			continue
		}
		if err := l.Check(x.Shape()[1], dt); err != nil {
			return nil, fmt.Errorf("chunks.Apply: layer %d: %w", i, err)
		}
	}

	o := &ApplyOp{layers: slices.Clone(layers), selection: selection, prepared: make([]any, len(layers))}

	// The address in the description distinguishes ops with the same input.
	opbase.Init(&o.Base, o, "ApplyChunks", fmt.Sprintf("%p", o), gorgonia.Nodes{x}, dt, x.Shape(),
		apply[float32], apply[float64])
	return gorgonia.ApplyOp(o, x)
}

// Check returns an error unless the layer fits the given number of features, with weights of the given type.
func (l *Layer) Check(features int, dt tensor.Dtype) error {
	if l.Chunks < 1 || features%l.Chunks != 0 {
		return fmt.Errorf("%d chunks of %d features, want equal chunks", l.Chunks, features)
	}

	c, width, before := features/l.Chunks, l.Width(features), -1
	for _, s := range l.Seeds {
		n := -1
		switch w := s.Weights.(type) {
		case []float32:
			if dt == tensor.Float32 {
				n = len(w)
			}
		case []float64:
			if dt == tensor.Float64 {
				n = len(w)
			}
		}
		b, err := blueprints.Lookup(s.Kind)
		switch {
		case err != nil:
			return err
		case b.Site != blueprints.Chunk || blueprints.IsGraph(s.Kind):
			return fmt.Errorf("the kind %v has no arithmetic that changes chunks", s.Kind)
		case s.Chunk <= before || s.Chunk >= l.Chunks:
			return fmt.Errorf("a seed at chunk %d after one at %d, of %d chunks", s.Chunk, before, l.Chunks)
		case !(math.Abs(s.Alpha) <= 1) || s.Scale-s.Scale != 0:
			return fmt.Errorf("the seed at chunk %d has α %v and scale %v", s.Chunk, s.Alpha, s.Scale)
		}
		size, err := blueprints.Size(s.Kind, c, width)
		if err != nil {
			return err
		}
		if n != size {
			return fmt.Errorf("the seed at chunk %d has %d weights of %v, want %d for a %v", s.Chunk, n, dt, size, s.Kind)
		}
		before = s.Chunk
	}
	return nil
}

func apply[T cpu.Float](o *ApplyOp, y []T, args opbase.Args) error {
	x := opbase.Slice[T](args, 0)
	rows, features := o.InputShape(0)[0], o.InputShape(0)[1]
	copy(y, x)

	// Compute consecutive rows with the same layer together.
	selected := o.selection.Adapters()
	for from := 0; from < min(rows, len(selected)); {
		k, to := selected[from], from+1
		for to < min(rows, len(selected)) && selected[to] == k {
			to++
		}
		switch {
		case k >= len(o.layers):
			return fmt.Errorf("row %d has layer %d of %d", from, k, len(o.layers))
		case k >= 0 && o.layers[k] != nil:
			p, ok := o.prepared[k].(*prepared[T])
			if !ok {
				var err error
				if p, err = prepare[T](o.layers[k], features); err != nil {
					return err
				}
				o.prepared[k] = p
			}
			p.layer.Rows = to - from
			p.layer.Forward(y[from*features:to*features], x[from*features:to*features], p.weights, p.scales)
		}
		from = to
	}
	return nil
}

// prepare copies the weights of each seed into a separate slot.
func prepare[T cpu.Float](l *Layer, features int) (*prepared[T], error) {
	width := l.Width(features)
	p := &prepared[T]{layer: kasmina.Layer[T]{Seeds: l.Chunks, Chunk: features / l.Chunks, Slots: len(l.Seeds) + 1,
		Width: width, Eps: 1e-8, Measure: make([]bool, l.Chunks)},
		weights: make([]T, (len(l.Seeds)+1)*width), scales: make([]T, len(l.Seeds)+1)}
	for i, s := range l.Seeds {
		copy(p.weights[(i+1)*width:], s.Weights.([]T))
		p.scales[i+1] = T(s.Scale)
		err := p.layer.Activate(s.Chunk, seed.Seed{Kind: s.Kind, Slot: uint16(i + 1), Blend: true, Alpha: float32(s.Alpha)})
		if err != nil {
			return nil, err
		}
	}
	return p, nil
}

// DiffWRT reports that the op is not differentiable.
func (o *ApplyOp) DiffWRT(inputs int) []bool { return make([]bool, max(inputs, 0)) }

// SymDiff returns an error, because the op has no gradient.
func (o *ApplyOp) SymDiff(gorgonia.Nodes, *gorgonia.Node, *gorgonia.Node) (gorgonia.Nodes, error) {
	return nil, errors.New("chunks.Apply has no gradient: train the seeds of one model")
}
