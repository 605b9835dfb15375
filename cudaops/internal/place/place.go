// Package place assigns the transient buffers of a program to offsets in a shared arena. Buffers that are
// never in use at the same time may share memory. The package looks only at the buffers that each call
// uses, and depends on neither the graph nor the device.
package place

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/plan"
)

// Arena packs all buffers that are not resident into one arena. A buffer occupies its place from the
// first call that uses it through the last; lasting arrays stay in place until the end of the run. The
// result of a call may replace an operand that no later call uses (see [program.InPlace]).
func Arena(p *program.Program, lasting []*program.Array) {
	for i, c := range p.Calls {
		for _, a := range c.Args {
			extendLifetime(a.Array, i)
		}
	}

	for _, a := range lasting {
		extendLifetime(a, len(p.Calls))
	}

	places := map[*program.Buffer]*plan.Interval{}
	for _, b := range p.Buffers {
		if !b.Resident && b.First >= 0 {
			place := b.Interval
			places[b] = &place
		}
	}

	for i, c := range p.Calls {
		if from, to := c.InPlace.From, c.InPlace.To; from != nil && canReplace(c, i) {
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

// canReplace reports whether the result of call i should overwrite an operand. The operand must fill a
// buffer in the arena that no other operand or later call uses.
func canReplace(c *program.Call, i int) bool {
	from, to := c.InPlace.From, c.InPlace.To
	readers := 0
	for _, a := range c.Args {
		if a.Buffer == from.Buffer {
			readers++
		}
	}
	return readers == 1 && !from.Resident && from.Last == i && to.First == i &&
		from.Stride == 0 && from.Bytes == to.Bytes && from.Extent() == to.Extent()
}

// extendLifetime extends the lifetime of an array's memory to include the given call.
func extendLifetime(a *program.Array, call int) {
	for _, part := range a.Parts {
		extendLifetime(part, call)
	}
	if a.Buffer == nil || a.Resident {
		return
	}
	if a.First < 0 {
		a.First = call
	}
	a.Last = max(a.Last, call)
}
