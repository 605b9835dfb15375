// Package place gives the buffers of a program their places in one arena, where those that no two
// calls need at once share memory. It knows which call touches which buffer, but no graph and no
// device.
package place

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/plan"
)

// Arena packs the buffers that are not resident into one arena, each for the calls from the first
// that touches it to the last. Those of the kept arrays last until the end of the run.
func Arena(p *program.Program, kept []*program.Array) {
	for _, b := range p.Buffers {
		b.First, b.Last, b.Offset = -1, -1, 0
	}
	for i, c := range p.Calls {
		for _, a := range c.Args {
			touch(a.Array, i)
		}
	}
	for _, a := range kept {
		touch(a, len(p.Calls))
	}
	var all []*plan.Interval
	for _, b := range p.Buffers {
		if !b.Resident && b.First >= 0 {
			all = append(all, &b.Interval)
		}
	}
	p.Arena = plan.Pack(all, program.Alignment)
}

// touch makes an array's memory last over a call.
func touch(a *program.Array, call int) {
	if a == nil {
		return
	}
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
