// Package schedule orders the calls of a program: small launches that add up parts are put off, and
// made as one, and the last products of gradients are put off to the end. It knows calls and what they read and write, but no graph and no device.
package schedule

import (
	"reflect"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// partsMemory is how many bytes of parts, of one kind, may be kept while other calls run.
const partsMemory = 64 << 20

// Joinable is the Params of a call that can do the work of others of its type too. It is the small
// launch that adds up what a pass over many rows has left in parts.
type Joinable interface {
	// Join returns one launch for both.
	Join(other any) (joined any, ok bool)
}

// waiting are joinable calls of one type that are made as one.
type waiting struct {
	call  program.Call
	bytes int // of memory that is kept for it
	count int
}

// JoinSums puts calls that can be joined off, and makes them as one. It does so when another call
// touches one of their results, when they keep too much memory, and at the program's end at the
// latest. Nothing else waits for them.
func JoinSums(p *program.Program) {
	j := joiner{kinds: map[reflect.Type]*waiting{}}
	for _, c := range p.Calls {
		if _, ok := c.Params.(Joinable); ok {
			j.wait(c)
			continue
		}
		j.flush(func(w *waiting) bool { return w.resultsIn(c) })
		j.calls = append(j.calls, c)
	}
	j.flush(func(*waiting) bool { return true })
	p.Calls = j.calls
}

// PutOff moves the last n products to the end that no other call needs. While they multiply, what was
// made before them can be on its way to other GPUs: of a model that is the gradient of its table of
// embeddings, the largest and last.
func PutOff(p *program.Program, n int) {
	for i := len(p.Calls) - 1; i >= 0 && n > 0; i-- {
		c, rest := p.Calls[i], p.Calls[i+1:]
		_, product := c.Params.(program.Matmul)
		if product && !slices.ContainsFunc(rest, func(d *program.Call) bool { return bound(c, d) }) {
			p.Calls = append(slices.Delete(p.Calls, i, i+1), c)
			n--
		}
	}
}

// bound reports whether two calls must stay in their order: one writes what the other touches.
func bound(c, d *program.Call) bool {
	writes := func(c, d *program.Call) bool {
		return slices.ContainsFunc(c.Args, func(a program.Arg) bool {
			return a.Role != program.Read && (a.Buffer == nil || d.Touches(a.Buffer))
		})
	}
	return writes(c, d) || writes(d, c)
}

// joiner makes a new order.
type joiner struct {
	calls []*program.Call
	kinds map[reflect.Type]*waiting
	order []reflect.Type // of kinds, as they came
}

// wait puts a call off.
func (j *joiner) wait(c *program.Call) {
	kind := reflect.TypeOf(c.Params)
	w := j.kinds[kind]
	if w == nil {
		w = &waiting{}
		j.kinds[kind], j.order = w, append(j.order, kind)
	}
	if w.count == 0 {
		w.call = *c
		w.call.Args = slices.Clone(c.Args)
	} else {
		w.call.Params, _ = w.call.Params.(Joinable).Join(c.Params)
		w.call.Args = append(w.call.Args, c.Args...)
		w.call.Layer = ""
	}
	w.count++
	for _, a := range c.Args {
		if a.Role == program.Read && !a.Resident {
			w.bytes += a.Extent()
		}
	}
	if w.bytes > partsMemory {
		j.flush(func(other *waiting) bool { return other == w })
	}
}

// resultsIn reports whether a call touches what the waiting ones write.
func (w *waiting) resultsIn(c *program.Call) bool {
	return slices.ContainsFunc(w.call.Args, func(a program.Arg) bool {
		return a.Role == program.Write && c.Touches(a.Buffer)
	})
}

// flush makes some kinds of waiting calls.
func (j *joiner) flush(which func(*waiting) bool) {
	for _, kind := range j.order {
		if w := j.kinds[kind]; w.count > 0 && which(w) {
			call, at := w.call, len(j.calls)
			for at > 0 && !bound(&call, j.calls[at-1]) { // as soon as all parts are there
				at--
			}
			j.calls = slices.Insert(j.calls, at, &call)
			*w = waiting{}
		}
	}
}
