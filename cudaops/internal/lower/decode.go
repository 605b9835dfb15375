package lower

import (
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
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
	Ahead   int  // bytes of later weights that a launch fetches into the cache; 0 by default
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

	later := c.Calls[first+1:]
	if d.Early {
		for _, call := range later {
			if o := overlapOf(call); o != nil {
				*o.early = true
			}
		}
	}
	if d.Ahead > 0 {
		fetchAhead(later, d.Ahead)
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
		call *program.Call
		x    *program.Arg
		norm *decode.Norm
	}
	var readers []reader
	overwritten := false
	for _, later := range rest {
		if slices.ContainsFunc(later.Args, func(a program.Arg) bool { return isHidden(a.Buffer) }) {
			r := reader{call: later}
			depth := 0
			switch l := later.Params.(type) {
			case *decode.Product:
				r.x, r.norm, depth = later.Operand(&l.X), &l.Norm, l.D
			case *decode.Gated:
				r.x, r.norm, depth = later.Operand(&l.X), &l.Norm, l.D
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
			return a.Buffer == x.Buffer && a.Role != program.Read && a.Role != program.Hint
		})
	}
	if len(readers) == 0 {
		return false
	}

	for _, r := range readers {
		r.x.Array = x
		r.norm.Eps = n.Eps
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

// overlap points to the fields of a launch that describe its overlap with other launches.
type overlap struct {
	early   *bool
	ahead   *decode.Ahead // nil if the launch fetches nothing
	weights []*program.Array
}

// operands returns the arrays bound to fields of a call.
func operands(call *program.Call, fields ...*gpu.Ptr) (all []*program.Array) {
	for _, f := range fields {
		if a := call.Operand(f); a != nil {
			all = append(all, a.Array)
		}
	}
	return all
}

// overlapOf returns the overlap of a call, or nil if the call waits for the preceding one to end.
func overlapOf(call *program.Call) *overlap {
	switch l := call.Params.(type) {
	case *decode.Product:
		return &overlap{&l.Early, &l.Ahead, operands(call, &l.W)}
	case *decode.Gated:
		return &overlap{&l.Early, &l.Ahead, operands(call, &l.W)}
	case *decode.RowsProduct:
		return &overlap{&l.Early, &l.Ahead, operands(call, &l.W)}
	case *decode.PackedProduct:
		return &overlap{&l.Early, &l.Ahead, operands(call, &l.Parts[0].Codes, &l.Parts[1].Codes, &l.Parts[2].Codes)}
	case *decode.Attention:
		return &overlap{&l.Early, &l.Ahead, nil}
	case *decode.Paged:
		return &overlap{&l.Early, &l.Ahead, nil}
	case *decode.NormRows:
		return &overlap{&l.Early, nil, nil}
	}
	return nil
}

// aheadUnit is the unit of sizes that are fetched ahead.
const aheadUnit = 128

// fetchAhead makes each call fetch the next weights into the cache, as many bytes as given, unless an earlier call
// has fetched them. A call without weights leaves the memory idle for longer and fetches twice as much.
func fetchAhead(calls []*program.Call, bytes int) {
	type piece struct {
		*program.Array
		start int // in the sequence of all weights
	}
	var weights []piece
	total := 0
	ends := make([]int, len(calls))
	for i, call := range calls {
		if o := overlapOf(call); o != nil {
			for _, w := range o.weights {
				if w.Resident {
					weights = append(weights, piece{w, total})
					total += w.Extent()
				}
			}
		}
		ends[i] = total
	}

	fetched := 0
	for i, call := range calls {
		o := overlapOf(call)
		if o == nil || o.ahead == nil {
			continue
		}
		until := ends[i] + bytes
		if o.weights == nil {
			until += bytes
		}

		at := max(fetched, ends[i])
		for n := 0; n < len(o.ahead.From) && at < min(until, total); n++ {
			k := slices.IndexFunc(weights, func(p piece) bool { return at < p.start+p.Extent() })
			w := weights[k]
			from := (at - w.start) / aheadUnit * aheadUnit
			at = min(until, w.start+w.Extent())
			if size := (at - w.start - from) / aheadUnit * aheadUnit; size > 0 && w.At%program.VectorBytes == 0 {
				o.ahead.Bytes[n] = size
				call.Args = append(call.Args, program.Hints(&o.ahead.From[n], &program.Array{Buffer: w.Buffer,
					At: w.At + from, Type: gpu.Uint8, Shape: []int{size}}))
			}
		}
		fetched = max(fetched, at)
	}
}
