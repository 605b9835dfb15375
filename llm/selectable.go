package llm

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/llm/internal/block"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/op/chunks"
	"github.com/kasmina-go/kasmina/op/lowrank"
)

// noAdapter is the index for texts that use the model without an adapter.
const noAdapter = -1

// selectable contains the adapters that a graph can select for each row. The element of an adapter that does not
// change a layer is nil.
type selectable struct {
	layers map[string][]*lowrank.Adapter // by the name of the linear layer
	seeds  map[int][]*chunks.Layer       // by the block before the seeds
}

// selectableOf prepares adapters for a model that has none itself. norms returns the norm of each row of
// an adapted weight, in the type of the model.
func selectableOf(m ModelParts, adapters []*Adapter, norms func(a *Adapter, target string) (any, error)) (*selectable,
	error) {
	if len(adapters) == 0 {
		return nil, nil
	}
	if !m.Config.Adapter.IsZero() {
		return nil, errors.New("the model has adapters already: give the model without them")
	}

	all := &selectable{map[string][]*lowrank.Adapter{}, map[int][]*chunks.Layer{}}
	for i, a := range adapters {
		if err := a.fits(m.Config, m.dtype()); err != nil {
			return nil, fmt.Errorf("adapter %d: %w", i, err)
		}

		if a.ChangesOuterLayers() {
			return nil, fmt.Errorf("adapter %d: it changes the embedding or the output layer, and texts can choose "+
				"only adapters of layers in the blocks: use it alone, or merge it into the model", i)
		}

		for _, target := range a.LoRA.Targets {
			one, err := a.lowRank(target, norms)
			if err != nil {
				return nil, fmt.Errorf("adapter %d: %w", i, err)
			}
			if all.layers[target] == nil {
				all.layers[target] = make([]*lowrank.Adapter, len(adapters))
			}
			all.layers[target][i] = one
		}

		for _, l := range a.Seeds {
			layer, err := l.layer()
			if err != nil {
				return nil, fmt.Errorf("adapter %d: %w", i, err)
			}
			if all.seeds[l.Block] == nil {
				all.seeds[l.Block] = make([]*chunks.Layer, len(adapters))
			}
			all.seeds[l.Block][i] = layer
		}
	}
	return all, nil
}

// lowRank returns the part of a that adapts one linear layer.
func (a *Adapter) lowRank(target string, norms func(a *Adapter, target string) (any, error)) (*lowrank.Adapter,
	error) {
	out := &lowrank.Adapter{Rank: a.LoRA.RankOf(target), Scale: a.LoRA.ScaleOf(target),
		A: a.Param(target + block.EndingA).Data(), B: a.Param(target + block.EndingB).Data()}
	if !a.LoRA.Magnitude {
		return out, nil
	}

	rows, err := norms(a, target)
	if err != nil {
		return nil, err
	}
	switch m := a.Param(target + block.EndingMagnitude).Data().(type) {
	case []float32:
		out.Factors = quotients(m, rows.([]float32))
	case []float64:
		out.Factors = quotients(m, rows.([]float64))
	}
	return out, nil
}

// quotients returns the elementwise quotient x / y.
func quotients[T float32 | float64](x, y []T) []T {
	z := make([]T, len(x))
	for i := range x {
		z[i] = x[i] / y[i]
	}
	return z
}

// norms returns the norm of each row of a target's adapted weight, ‖w + s·b·a‖.
func (m *Model) norms(a *Adapter, target string) (any, error) {
	norms := newParamValue(m.Dtype(), a.Param(target+block.EndingMagnitude).Shape(), nil)
	writeRowNorms(norms, m.weight(target+".weight"), a.Param(target+block.EndingA), a.Param(target+block.EndingB),
		a.LoRA.ScaleOf(target))
	return norms.Data(), nil
}

// norms returns the norm of each row of a target's adapted weight, ‖w + s·b·a‖.
func (m *CompactModel) norms(a *Adapter, target string) (any, error) {
	g := gorgonia.NewGraph()
	var w *gorgonia.Node
	for _, p := range m.parts.Params {
		if p.Name != target+".weight" {
			continue
		}
		if p.Value != nil {
			w = gorgonia.NodeFromAny(g, p.Value, gorgonia.WithName(p.Name))
			continue
		}
		shape := m.parts.Config.layerShapes()[target]
		w = gorgonia.NewTensor(g, tensor.Float32, len(shape), gorgonia.WithShape(shape...), gorgonia.WithName(p.Name))
	}
	if w == nil {
		return nil, fmt.Errorf("the model has no %s.weight", target)
	}

	node := func(name string) *gorgonia.Node {
		return gorgonia.NodeFromAny(g, a.Param(target+name), gorgonia.WithName(target+name))
	}
	n, err := op.RowNorms(w, node(block.EndingA), node(block.EndingB), a.LoRA.ScaleOf(target))
	if err != nil {
		return nil, err
	}

	machine, err := cpuops.NewMachine(g, cpuops.WithOutputs(n), cpuops.WithWeights(m.weights))
	if err != nil {
		return nil, err
	}
	defer machine.Close()
	if err := machine.RunAll(); err != nil {
		return nil, err
	}
	v, err := machine.Value(n)
	if err != nil {
		return nil, err
	}
	return slices.Clone(v.Data().([]float32)), nil
}

// of returns the adapters for the layers of a block, keyed by the layers' names within the block.
func (s *selectable) of(prefix string) map[string][]*lowrank.Adapter {
	if s == nil {
		return nil
	}
	var all map[string][]*lowrank.Adapter
	for target, adapters := range s.layers {
		if layer, ok := strings.CutPrefix(target, prefix); ok {
			if all == nil {
				all = map[string][]*lowrank.Adapter{}
			}
			all[layer] = adapters
		}
	}
	return all
}

// seedsAfter returns the seeds after a block, or nil.
func (s *selectable) seedsAfter(block int) []*chunks.Layer {
	if s == nil {
		return nil
	}
	return s.seeds[block]
}

// withAdapters makes a graph apply the selected adapter to each row.
func withAdapters(all *selectable, selection *lowrank.Selection) GraphOption {
	return func(b *graphBuilder) { b.adapters, b.selection = all, selection }
}
