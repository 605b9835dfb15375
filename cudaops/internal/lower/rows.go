package lower

import (
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/decode"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// rowProducts replaces the products of a graph that continues several texts by decode.RowsProduct, where that supports
// them.
func (c *compiler) rowProducts() {
	if !slices.ContainsFunc(c.Calls, func(call *program.Call) bool {
		_, paged := call.Params.(*decode.Paged)
		return paged
	}) {
		return
	}

	for i, call := range c.Calls {
		if one := c.fewRows(call, i > 0); one != nil {
			one.Op, one.Node, one.Layer, one.FLOPs = call.Op, call.Node, call.Layer, call.FLOPs
			c.Calls[i] = one
		}
	}
}

// fewRows returns a call that computes a product with decode.RowsProduct, or nil. follows reports whether another
// call precedes it.
func (c *compiler) fewRows(call *program.Call, follows bool) *program.Call {
	m, ok := call.Params.(*program.Matmul)
	if !ok {
		return nil
	}
	s := m.Spec
	if s.TransA || !s.TransB || s.Batch > 1 || m.Alpha != 1 || m.Beta != 0 && m.Beta != 1 || s.A != s.B || s.A != s.D {
		return nil
	}

	x, w, y := call.Operand(&m.A).Array, call.Operand(&m.B).Array, call.Operand(&m.D).Array
	a := decode.RowsProduct{X: gpu.Ptr(x.At), W: gpu.Ptr(w.At), Rows: s.M, Columns: s.N, D: s.K, Type: s.D,
		Steady: w.Resident && follows}
	if !a.Supports() {
		return nil
	}

	result, added := program.Writes(&a.Y, y), call.Operand(&m.C)
	var add *program.Array
	switch {
	case m.Beta == 0:
	case added != nil:
		add = added.Array
	default:
		result, add = program.Updates(&a.Y, y), y
	}

	key := fmt.Sprint("rows ", a.Counters())
	if c.counters[key] == nil { // zero before and after every launch, so that products can share it
		c.counters[key] = c.NewConstant(make([]float32, a.Counters()))
	}
	return program.NewCall(&a, result, program.Reads(&a.X, x), program.Reads(&a.W, w), program.Reads(&a.C, add),
		program.Uses(&a.Parts, c.Workspace(a.PartsBytes(c.o.Device))), program.Updates(&a.Arrived, c.counters[key]))
}
