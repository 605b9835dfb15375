package lower

import (
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/decode"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// packProducts makes products of a decoding graph read frozen weights in float8 or NF4 as they are stored, instead of
// widened copies.
func (c *compiler) packProducts() {
	for i := 0; i < len(c.Calls); i++ {
		call := c.Calls[i]
		one, widened, weights := c.packedProduct(call)
		if one == nil {
			continue
		}
		one.Op, one.Node, one.Layer, one.FLOPs = call.Op, call.Node, call.Layer, call.FLOPs
		c.drop(weights)
		c.Calls[i] = one
		before := len(c.Calls)
		c.Calls = slices.DeleteFunc(c.Calls, func(w *program.Call) bool { return slices.Contains(widened, w) })
		i -= before - len(c.Calls)
	}
}

// packedProduct returns a call that computes a product without widening its weights, the calls that widen them, and the
// widened weights. It returns nil if that is not possible.
func (c *compiler) packedProduct(call *program.Call) (one *program.Call, widened []*program.Call,
	weights *program.Array) {
	a := &decode.PackedProduct{}
	var y, x, w, add *program.Arg
	switch l := call.Params.(type) {
	case *decode.Product:
		a.Rows, a.Columns, a.D, a.Type = 1, l.Columns, l.D, l.Type
		y, x, w, add = call.Operand(&l.Y), call.Operand(&l.X), call.Operand(&l.W), call.Operand(&l.C)
	case *decode.Gated:
		a.Rows, a.Columns, a.D, a.Type, a.Gate = 1, l.F, l.D, l.Type, decode.GateSiLU
		if l.GELU {
			a.Gate = decode.GateGELU
		}
		y, x, w = call.Operand(&l.H), call.Operand(&l.X), call.Operand(&l.W)
	case *decode.RowsProduct:
		a.Rows, a.Columns, a.D, a.Type, a.Gate = l.Rows, l.Columns, l.D, l.Type, l.Gate
		y, x, w, add = call.Operand(&l.Y), call.Operand(&l.X), call.Operand(&l.W), call.Operand(&l.C)
	default:
		return nil, nil, nil
	}

	a.X = x.StandIn()
	if !a.Supports() {
		return nil, nil, nil
	}

	// The weights must consist of widened matrices of one format, in order, and nothing else may need them.
	var args []program.Arg
	at := w.At
	for _, other := range c.Calls {
		if other == call || !other.Touches(w.Buffer) {
			continue
		}
		n := len(widened)
		if n == len(a.Parts) {
			return nil, nil, nil
		}
		p := &a.Parts[n]
		var to *program.Array
		switch l := other.Params.(type) {
		case *quantize.WidenFloat8:
			if a.NF4 {
				return nil, nil, nil
			}
			to = other.Operand(&l.Y).Array
			args = append(args, program.Reads(&p.Codes, other.Operand(&l.Codes).Array),
				program.Reads(&p.Scales, other.Operand(&l.Scales).Array))
		case *quantize.WidenNF4:
			to = other.Operand(&l.Y).Array
			p.Offset = l.Offset
			args = append(args, program.Reads(&p.Codes, other.Operand(&l.Codes).Array),
				program.Reads(&p.Nested, other.Operand(&l.Nested).Array),
				program.Reads(&p.Scales, other.Operand(&l.Scales).Array))
			if n == 0 {
				args = append(args, program.Reads(&a.Table, other.Operand(&l.Table).Array))
			}
			if n > 0 && !a.NF4 {
				return nil, nil, nil
			}
			a.NF4 = true
		default:
			return nil, nil, nil
		}
		if to.At != at || len(to.Shape) != 2 || to.Shape[1] != a.D {
			return nil, nil, nil
		}
		p.Rows = to.Shape[0]
		at += to.Extent()
		widened = append(widened, other)
	}
	for n := range c.lasting {
		if v := c.Values[n]; v != nil && v.Buffer == w.Buffer {
			return nil, nil, nil
		}
	}
	if len(widened) == 0 || at != w.At+w.Extent() ||
		a.Gate != decode.GateNone && (len(widened) != 2 || a.Parts[0].Rows != a.Columns) {
		return nil, nil, nil
	}

	a.Steady = slices.Index(c.Calls, widened[0]) > 0
	result := program.Writes(&a.Y, y.Array)
	result.Role = y.Role
	args = append(args, result, program.Reads(&a.X, x.Array))
	if add != nil {
		args = append(args, program.Reads(&a.C, add.Array))
	}
	return program.NewCall(a, args...), widened, w.Array
}
