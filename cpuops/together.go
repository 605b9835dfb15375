package cpuops

import (
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/op"
)

// product is a product with a compact matrix.
type product struct {
	out *value
	w   *gemm.Compact
}

// mostTogether is the maximum number of products that gemm.CompactLinear computes.
const mostTogether = 3

// together merges products of the same x with compact weights of the same type into the first product, such
// as the queries, keys and values of attention. For a few rows, a product takes microseconds, and merging
// makes the cores wait for each other only once.
func (c *compiler) together() {
	type key struct {
		x *value
		t gemm.CompactType
	}
	firsts := map[key]int{} // index of the step that computes the products
	for i := range c.steps {
		s := &c.steps[i]
		p, ok := compactProduct(s)
		if !ok {
			continue
		}

		k := key{s.in[0], p.w.Type}
		at, ok := firsts[k]
		if !ok || len(c.steps[at].also) == mostTogether-1 {
			firsts[k] = i
			continue
		}
		first := &c.steps[at]
		first.also = append(first.also, p)
		first.run = linearTogether
		p.out.room.First = at
		*s = step{node: s.node, run: func(*step) error { return nil }}
	}
}

// compactProduct returns the product that a step computes, if it is one with a compact matrix.
func compactProduct(s *step) (product, bool) {
	if s.out == nil || s.out.room == nil || s.fused {
		return product{}, false
	}
	if _, ok := s.node.Op().(*op.LinearOp); !ok {
		return product{}, false
	}
	w, ok := s.in[1].flat.(*gemm.Compact)
	return product{s.out, w}, ok
}

// linearTogether computes the products of a step.
func linearTogether(s *step) error {
	var all [mostTogether]gemm.CompactProduct
	all[0] = gemm.CompactProduct{Y: s.out.flat.([]float32), W: s.args.CompactWeights(1)}
	for i, p := range s.also {
		all[1+i] = gemm.CompactProduct{Y: p.out.flat.([]float32), W: p.w}
	}
	gemm.CompactLinear(s.stop, s.args[0].([]float32), s.in[0].shape[0], all[:1+len(s.also)]...)
	return nil
}
