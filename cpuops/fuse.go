package cpuops

import (
	"github.com/kasmina-go/kasmina/internal/cpu/array"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/op"
)

// fuse merges a matrix product and the sum that is its only reader into a single step, y = x·wᵀ + d,
// which saves one pass over y. The merged step is placed where the sum was, since d may be computed
// after the product. It cannot overwrite an operand as other sums do, because the product is written
// to y before d is added.
func (c *compiler) fuse() {
	variants := []string{fusedVariant, separateVariant}
	variant := c.variant(linearAddOp, variants...)
	if variant == separateVariant {
		return
	}

	readers := map[*value]int{}
	read := func(v *value) {
		for ; v != nil; v = v.from {
			readers[v]++
		}
	}
	for _, v := range c.kept {
		read(v)
	}

	products := map[*value]int{} // indices of steps by their results
	for i, s := range c.steps {
		for _, v := range s.in {
			read(v)
		}
		if _, ok := s.node.Op().(*op.LinearOp); ok && s.out != nil {
			products[s.out] = i
		}
	}

	for i := range c.steps {
		s := &c.steps[i]
		if f, ok := sumOf(s); !ok || f != array.Add || s.variant == gorgoniaVariant {
			continue
		}
		for k, v := range s.in {
			at, ok := products[v]
			if !ok || readers[v] != 1 {
				continue
			}
			product := &c.steps[at]
			x, w, d := product.in[0], product.in[1], s.in[1-k]
			*s = step{node: s.node, out: s.out, in: []*value{d, x, w}, args: make([]any, 3),
				run: linearAdd, variant: variant, variants: variants,
				fused: true}
			c.read(s.in, i)
			v.room = nil
			*product = step{node: product.node, run: func(*step) error { return nil }}
			break
		}
	}
}

// sumOf returns the arithmetic of a step that combines two tensors of the result's shape.
func sumOf(s *step) (array.Op, bool) {
	if s.out == nil || len(s.in) != 2 {
		return 0, false
	}
	for _, v := range s.in {
		if len(v.shape) == 0 {
			return 0, false
		}
	}
	return arithmetic(s)
}

// linearAdd computes y = x·wᵀ + d.
func linearAdd(s *step) error {
	rows, in, out := s.in[1].shape[0], s.in[1].shape[1], s.in[2].shape[0]
	switch y := s.out.flat.(type) {
	case []float32:
		if w := s.args.CompactWeights(2); w != nil {
			w.Linear(s.stop, y, s.args[1].([]float32), rows)
			array.Arithmetic(array.Add, y, y, s.args[0].([]float32))
			return nil
		}
		gemm.LinearAdd(s.stop, y, s.args[0].([]float32), s.args[1].([]float32),
			s.args[2].([]float32), rows, in, out)
	case []float64:
		gemm.LinearAdd(s.stop, y, s.args[0].([]float64), s.args[1].([]float64),
			s.args[2].([]float64), rows, in, out)
	}
	return nil
}
