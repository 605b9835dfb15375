package llm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/llm/internal/block"
)

// An AdapterSet contains adapters in a form that lets a device apply a different one to each row of a batch with
// ordinary matrix products. The matrices of all adapters of a layer are stacked into one matrix, and each row is
// multiplied by 0 in the parts that belong to other adapters. Package llm/gpu loads a set next to a model.
type AdapterSet struct {
	n      int
	layers []stackedLayer // sorted by name
	seeds  []stackedBlock // sorted by block
	values map[string]setParam
}

// A stackedLayer identifies a layer with stacked adapters.
type stackedLayer struct {
	target  string
	factors bool // whether one of the adapters is a DoRA, so that the layer has factors
}

type setParam struct {
	shape  []int
	values []float32
}

// Endings of the names of a set's parameters, after the name of their layer.
const (
	endingSetA       = ".adapters_A"
	endingSetB       = ".adapters_B"
	endingSetShares  = ".adapters_shares"
	endingSetFactors = ".adapters_factors"
)

// The stacked rank of a layer is rounded up to a multiple of setMultiple, because devices compute
// such products faster.
const setMultiple = 8

// NewAdapterSet returns a set of adapters for a model without adapters, in float32. For adapters with magnitudes
// (DoRA), it reads the weights that they adapt. As in [BatcherOptions.Adapters], the adapters must not change the
// embedding or the output layer.
func NewAdapterSet(ctx context.Context, c Config, adapters []*Adapter, w WeightReader) (*AdapterSet, error) {
	if ctx == nil || w == nil || len(adapters) == 0 {
		return nil, errors.New("llm: NewAdapterSet: the context or the reader is nil, or there are no adapters")
	}

	parts := Outline(c)
	all, err := selectableOf(parts, adapters, func(a *Adapter, target string) (any, error) {
		return readNorms(ctx, c, a, target, w)
	})
	if err != nil {
		return nil, fmt.Errorf("llm: NewAdapterSet: %w", err)
	}

	shapes := c.layerShapes()
	s := &AdapterSet{n: len(adapters), values: map[string]setParam{}}
	if err := s.stackSeeds(c, all); err != nil {
		return nil, fmt.Errorf("llm: NewAdapterSet: %w", err)
	}
	for _, target := range slices.Sorted(maps.Keys(all.layers)) {
		out, in := shapes[target][0], shapes[target][1]
		ranks, l := 0, stackedLayer{target: target}
		for _, a := range all.layers[target] {
			if a != nil {
				ranks += a.Rank
				l.factors = l.factors || a.Factors != nil
			}
		}
		ranks = (ranks + setMultiple - 1) / setMultiple * setMultiple

		a, b := make([]float32, ranks*in), make([]float32, out*ranks)
		shares, factors := make([]float32, (s.n+1)*ranks), make([]float32, (s.n+1)*out)
		for i := range factors {
			factors[i] = 1
		}
		from := 0
		for k, one := range all.layers[target] {
			if one == nil {
				continue
			}
			copy(a[from*in:], one.A.([]float32))
			for row := range out {
				copy(b[row*ranks+from:], one.B.([]float32)[row*one.Rank:][:one.Rank])
			}
			for i := range one.Rank {
				shares[k*ranks+from+i] = float32(one.Scale)
			}
			if one.Factors != nil {
				copy(factors[k*out:], one.Factors.([]float32))
			}
			from += one.Rank
		}

		s.layers = append(s.layers, l)
		s.values[target+endingSetA] = setParam{[]int{ranks, in}, a}
		s.values[target+endingSetB] = setParam{[]int{out, ranks}, b}
		s.values[target+endingSetShares] = setParam{[]int{s.n + 1, ranks}, shares}
		if l.factors {
			s.values[target+endingSetFactors] = setParam{[]int{s.n + 1, out}, factors}
		}
	}
	return s, nil
}

// readNorms returns the norm of each row of a target's adapted weight, ‖w + s·b·a‖.
func readNorms(ctx context.Context, c Config, a *Adapter, target string, w WeightReader) (any, error) {
	shape := c.layerShapes()[target]
	weight := make([]float32, 0, shape[0]*shape[1])
	var part []float32
	err := w.Read(ctx, target+".weight", func(raw []byte, dtype string) (err error) {
		if part, err = widenPart(part, raw, dtype); err == nil {
			weight = append(weight, part...)
		}
		return err
	})
	if err == nil && len(weight) != shape[0]*shape[1] {
		err = fmt.Errorf("%s.weight has %d elements, want %d", target, len(weight), shape[0]*shape[1])
	}
	if err != nil {
		return nil, err
	}

	norms := newParamValue(tensor.Float32, a.Param(target+block.EndingMagnitude).Shape(), nil)
	writeRowNorms(norms, tensor.New(tensor.WithShape(shape...), tensor.WithBacking(weight)),
		a.Param(target+block.EndingA), a.Param(target+block.EndingB), a.LoRA.ScaleOf(target))
	return norms.Data(), nil
}

// Len returns the number of adapters. A nil set has none.
func (s *AdapterSet) Len() int {
	if s == nil {
		return 0
	}
	return s.n
}

// Read passes a parameter of the set to put, like [WeightReader]. It reports whether the set has the parameter.
func (s *AdapterSet) Read(name string, put func(part []byte, dtype string) error) (ok bool, err error) {
	if s == nil {
		return false, nil
	}
	p, ok := s.values[name]
	if !ok {
		return false, nil
	}
	raw, err := binary.Append(nil, binary.LittleEndian, p.values)
	if err != nil {
		return true, err
	}
	return true, put(raw, "float32")
}

// WithAdapterSet makes a graph for logits apply to each row the adapter that the input [Graph.Adapters] names. A nil
// set changes nothing.
func WithAdapterSet(s *AdapterSet) GraphOption {
	return func(b *graphBuilder) { b.set = s }
}

// addSet adds the parameters and the input of the set of adapters.
func (b *graphBuilder) addSet(rows int) {
	if b.set == nil {
		return
	}

	b.out.Adapters = gorgonia.NewTensor(b.g, tensor.Int, 1, gorgonia.WithShape(rows), gorgonia.WithName("adapters"))
	b.stacked = map[string]block.Stacked{}
	node := func(name string) *gorgonia.Node {
		shape := b.set.values[name].shape
		n := gorgonia.NewTensor(b.g, tensor.Float32, len(shape), gorgonia.WithShape(shape...), gorgonia.WithName(name))
		b.out.Params = append(b.out.Params, n)
		return n
	}
	for _, l := range b.set.layers {
		s := block.Stacked{A: node(l.target + endingSetA), B: node(l.target + endingSetB),
			Shares: node(l.target + endingSetShares)}
		if l.factors {
			s.Factors = node(l.target + endingSetFactors)
		}
		b.stacked[l.target] = s
	}
	b.addSetSeeds(node)
}

// stackedIn returns the adapters of a block's layers by their names within the block.
func (b *graphBuilder) stackedIn(prefix string) (all map[string]block.Stacked) {
	for target, s := range b.stacked {
		if len(target) > len(prefix) && target[:len(prefix)] == prefix {
			if all == nil {
				all = map[string]block.Stacked{}
			}
			all[target[len(prefix):]] = s
		}
	}
	return all
}
