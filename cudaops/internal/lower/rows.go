package lower

import (
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/decode"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/silu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// rowKernels replaces products, gates and norms of a graph that continues several texts by the kernels of package
// decode, where these support them.
func (c *compiler) rowKernels() {
	var calls []*program.Call
	for i := 0; i < len(c.Calls); i++ {
		call := c.Calls[i]
		one := c.normOfRows(call, 2)
		if one == nil {
			one = c.gatedRows(i)
			if one != nil {
				i++ // the gate
			}
		}
		if one == nil {
			one = c.fewRows(call, i > 0)
		}
		if one == nil {
			one = call
		}
		one.Op, one.Node, one.Layer, one.FLOPs = call.Op, call.Node, call.Layer, call.FLOPs
		calls = append(calls, one)
	}
	c.Calls = calls
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
	a := decode.RowsProduct{X: gpu.Ptr(x.At), W: gpu.Ptr(w.At), Rows: s.M, Columns: s.N, D: s.K, Type: s.D}
	a.Steady = w.Resident && follows
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
	return program.NewCall(&a, result, program.Reads(&a.X, x), program.Reads(&a.W, w), program.Reads(&a.C, add))
}

// gatedRows returns a call that computes the product with the given index together with the gate that follows it, or
// nil. Nothing else may need the product.
func (c *compiler) gatedRows(i int) *program.Call {
	if i+1 >= len(c.Calls) {
		return nil
	}
	m, ok := c.Calls[i].Params.(*program.Matmul)
	gate, gates := c.Calls[i+1].Params.(*silu.Mul)
	if !ok || !gates || m.Beta != 0 || c.Calls[i+1].Operand(&gate.H8) != nil {
		return nil
	}

	ab, h := c.Calls[i].Operand(&m.D).Array, c.Calls[i+1].Operand(&gate.H)
	if in := c.Calls[i+1].Operand(&gate.AB); h == nil || in.Buffer != ab.Buffer || in.At != ab.At ||
		gate.Rows != m.Spec.M || 2*gate.F != m.Spec.N || c.neededBesides(ab, c.Calls[i], c.Calls[i+1]) {
		return nil
	}

	one := c.fewRows(c.Calls[i], i > 0)
	if one == nil {
		return nil
	}
	a := *one.Params.(*decode.RowsProduct)
	a.Columns, a.Gate = gate.F, decode.GateSiLU
	if gate.GELU {
		a.Gate = decode.GateGELU
	}
	x, w := c.Calls[i].Operand(&m.A).Array, c.Calls[i].Operand(&m.B).Array
	c.drop(ab)
	return program.NewCall(&a, program.Writes(&a.Y, h.Array), program.Reads(&a.X, x), program.Reads(&a.W, w))
}

// normOfRows returns a call that computes a norm with decode.NormRows, or nil. The norm must have at least the given
// number of rows.
func (c *compiler) normOfRows(call *program.Call, least int) *program.Call {
	n, ok := call.Params.(*norm.RMSNorm)
	if !ok || n.Rows < least || n.Rows > decode.MostRows || call.Operand(&n.Residual) != nil || call.Operand(&n.Y8) != nil {
		return nil
	}
	if rstd := call.Operand(&n.Rstd); rstd != nil {
		if c.neededBesides(rstd.Array, call) {
			return nil
		}
		c.drop(rstd.Array)
	}

	a := decode.NormRows{Rows: n.Rows, D: n.D, Eps: n.Eps, Type: n.Type}
	return program.NewCall(&a, program.Writes(&a.Y, call.Operand(&n.Y).Array),
		program.Reads(&a.X, call.Operand(&n.X).Array), program.Reads(&a.W, call.Operand(&n.W).Array))
}

// neededBesides reports whether anything other than the given calls uses the buffer of an array.
func (c *compiler) neededBesides(a *program.Array, calls ...*program.Call) bool {
	for n := range c.lasting {
		if v := c.Values[n]; v != nil && v.Buffer == a.Buffer {
			return true
		}
	}
	return slices.ContainsFunc(c.Calls, func(call *program.Call) bool {
		return !slices.Contains(calls, call) && call.Touches(a.Buffer)
	})
}
