package lower

import (
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/decode"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// A graph that decodes one token consists of many short calls. The memory is idle from the last load of a call to
// the first load of the next one. These passes remove calls, and let the remaining ones load weights while they
// wait for each other.

// Decoding selects the kernels and passes.
type Decoding struct {
	Rows    bool // products, gates and norms of a few rows have kernels of their own
	Grouped bool // attention to pages uses the tensor cores
	Packed  bool // products read weights in float8 and NF4 as they are stored
	Norms   bool // products of one row normalize it themselves
	Early   bool // a launch may start before the preceding one has ended
}

// decoding applies the passes to a program that attends to cached keys and values.
func (c *compiler) decoding() {
	d := c.o.Decoding
	if !slices.ContainsFunc(c.Calls, attendsToCache) {
		return
	}

	if d.Rows {
		c.rowKernels()
	}
	if d.Packed {
		c.packProducts()
	}
	if d.Norms {
		c.foldNorms()
	}

	// A call that does not overlap with its predecessor waits for everything that came before the program.
	first := slices.IndexFunc(c.Calls, func(call *program.Call) bool { return overlapOf(call) == nil })
	if first < 0 {
		return
	}

	if d.Early {
		for _, call := range c.Calls[first+1:] {
			if early := overlapOf(call); early != nil {
				*early = true
			}
		}
	}
}

// attendsToCache reports whether a call is an attention to cached keys and values.
func attendsToCache(call *program.Call) bool {
	switch call.Params.(type) {
	case *decode.Attention, *decode.Paged:
		return true
	}
	return false
}

// foldNorms makes products normalize their row themselves where possible. Other norms of one row get a kernel that
// overlaps with other launches.
func (c *compiler) foldNorms() {
	var calls []*program.Call
	for i, call := range c.Calls {
		if c.foldNorm(call, c.Calls[i+1:]) {
			continue
		}
		if one := c.normOfRows(call, 1); one != nil {
			one.Op, one.Node, one.Layer = call.Op, call.Node, call.Layer
			call = one
		}
		calls = append(calls, call)
	}
	c.Calls = calls
}

// foldNorm makes the products that read the result of a norm normalize their row themselves, and reports whether the
// norm's call has become superfluous. rest are the calls after it.
func (c *compiler) foldNorm(call *program.Call, rest []*program.Call) bool {
	n, ok := call.Params.(*norm.RMSNorm)
	if !ok || n.Rows != 1 || call.Operand(&n.Residual) != nil || call.Operand(&n.Y8) != nil {
		return false
	}

	x, y, w := call.Operand(&n.X).Array, call.Operand(&n.Y).Array, call.Operand(&n.W).Array
	hidden := []*program.Array{y}
	if rstd := call.Operand(&n.Rstd); rstd != nil {
		hidden = append(hidden, rstd.Array)
	}
	isHidden := func(b *program.Buffer) bool {
		return slices.ContainsFunc(hidden, func(h *program.Array) bool { return h.Buffer == b })
	}
	for node := range c.lasting {
		if a := c.Values[node]; a != nil && isHidden(a.Buffer) {
			return false
		}
	}

	// Find the products. Nothing may overwrite x before them.
	type reader struct {
		call    *program.Call
		x       *program.Arg
		norm    *decode.Norm
		overlap *decode.Overlap
	}
	var readers []reader
	overwritten := false
	for _, later := range rest {
		if slices.ContainsFunc(later.Args, func(a program.Arg) bool { return isHidden(a.Buffer) }) {
			r := reader{call: later}
			depth := 0
			switch l := later.Params.(type) {
			case *decode.Product:
				r.x, r.norm, r.overlap, depth = later.Operand(&l.X), &l.Norm, &l.Overlap, l.D
			case *decode.Gated:
				r.x, r.norm, r.overlap, depth = later.Operand(&l.X), &l.Norm, &l.Overlap, l.D
			case *decode.PackedProduct:
				p := *l
				p.X, p.Norm.W = x.StandIn(), w.StandIn()
				if p.Streams(c.o.Device) {
					r.x, r.norm, r.overlap, depth = later.Operand(&l.X), &l.Norm, &l.Overlap, l.D
				}
			}
			touching := 0
			for _, a := range later.Args {
				if isHidden(a.Buffer) {
					touching++
				}
			}
			if r.x == nil || touching != 1 || r.x.Buffer != y.Buffer || r.x.At != y.At || depth != n.D || overwritten {
				return false
			}
			readers = append(readers, r)
		}
		overwritten = overwritten || slices.ContainsFunc(later.Args, func(a program.Arg) bool {
			return a.Buffer == x.Buffer && a.Role != program.Read
		})
	}
	if len(readers) == 0 {
		return false
	}

	for _, r := range readers {
		r.x.Array = x
		r.norm.Eps = n.Eps
		r.overlap.Steady = r.overlap.Steady && w.Resident // the launch may load the norm's weights early too
		r.call.Args = append(r.call.Args, program.Reads(&r.norm.W, w))
	}
	c.drop(hidden...)
	return true
}

// drop removes the buffers of unused arrays.
func (c *compiler) drop(arrays ...*program.Array) {
	c.Buffers = slices.DeleteFunc(c.Buffers, func(b *program.Buffer) bool {
		return slices.ContainsFunc(arrays, func(a *program.Array) bool { return a.Buffer == b })
	})
}

// overlapOf returns the field of a call's launch that lets the next launch start early, or nil if the call waits for the
// preceding one to end.
func overlapOf(call *program.Call) (early *bool) {
	switch l := call.Params.(type) {
	case *decode.Product:
		return &l.Early
	case *decode.Gated:
		return &l.Early
	case *decode.RowsProduct:
		return &l.Early
	case *decode.PackedProduct:
		return &l.Early
	case *decode.Attention:
		return &l.Early
	case *decode.Paged:
		return &l.Early
	case *decode.NormRows:
		return &l.Early
	}
	return nil
}
