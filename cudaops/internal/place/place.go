// Package place gives the buffers of a program their places in one arena, where those that no two
// calls need at once share memory. It knows which call touches which buffer, but no graph and no
// device.
package place

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/plan"
)

// Arena packs the buffers that are not resident into one arena, each for the calls from the first
// that touches it to the last. Those of lasting arrays stay until the end of the run. A result may
// take the place of what its call is the last to read.
func Arena(p *program.Program, lasting []*program.Array) {
	for i, c := range p.Calls {
		for _, a := range c.Args {
			touch(a.Array, i)
		}
	}

	for _, a := range lasting {
		touch(a, len(p.Calls))
	}

	places := map[*program.Buffer]*plan.Interval{}
	for _, b := range p.Buffers {
		if !b.Resident && b.First >= 0 {
			place := b.Interval
			places[b] = &place
		}
	}

	for i, c := range p.Calls {
		if from, to := c.Over.From, c.Over.To; from != nil && replaces(c, i) {
			places[from.Buffer].Last = to.Last
			places[to.Buffer] = places[from.Buffer]
		}
	}

	var all []*plan.Interval
	seen := map[*plan.Interval]bool{}
	for _, b := range p.Buffers {
		if place := places[b]; place != nil && !seen[place] {
			all, seen[place] = append(all, place), true
		}
	}

	p.Arena = plan.Pack(all, program.Alignment)
	for b, place := range places {
		b.Offset = place.Offset
	}
}

// replaces reports whether the result of a call, the i-th, is to lie over what it reads. That must
// be all of a buffer in the arena, which nothing else needs from then on.
func replaces(c *program.Call, i int) bool {
	from, to := c.Over.From, c.Over.To
	readers := 0
	for _, a := range c.Args {
		if a.Buffer == from.Buffer {
			readers++
		}
	}
	return readers == 1 && !from.Resident && from.Last == i && to.First == i &&
		from.Stride == 0 && from.Bytes == to.Bytes && from.Extent() == to.Extent()
}

// touch makes an array's memory last over a call.
func touch(a *program.Array, call int) {
	for _, part := range a.Parts {
		touch(part, call)
	}
	if a.Buffer == nil || a.Resident {
		return
	}
	if a.First < 0 {
		a.First = call
	}
	a.Last = max(a.Last, call)
}
