package kasmina

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
)

// reports is what a run measures in all Kasmina layers. It lies together, so that one copy brings
// it back: it takes 8 µs of a step, as one for each layer does.
type reports struct {
	run.Idle
	m       *Machine
	layers  []*layer
	seeds   int            // of all layers
	memory  *program.Array // for each array of a report in turn what the layers have of it
	host    [2][]byte      // pinned, for a run and the one before it
	arrived [2]gpu.Event   // when the host has them
	next    int            // of the run under way or to come, among the two
}

// newReports takes memory for the reports of a program.
func newReports(m *Machine, a *program.Array) (r *reports, err error) {
	r = &reports{m: m, memory: a, seeds: a.Shape[1]}
	for i := range r.host {
		if r.host[i], err = m.Memory.AllocHost(a.Extent()); err != nil {
			return nil, err
		}
		if r.arrived[i], err = m.Memory.NewEvent(false); err != nil {
			return nil, err
		}
	}
	return r, m.Ctx.Memset8(a.Ptr(), 0, a.Extent(), m.Stream)
}

// After copies the report of a run to where the layers expect it.
func (r *reports) After() error {
	ctx, i, words := r.m.Ctx, r.next, program.KasminaHealth
	for _, l := range r.layers {
		if l.mode.telemetry {
			words = max(words, program.KasminaBins)
		}
		if l.mode.histogram {
			words = program.KasminaWords
		}
	}
	r.next = 1 - r.next
	return run.Joined(ctx.CopyToHost(r.host[i][:4*words*r.seeds], r.memory.Ptr(), r.m.Stream),
		ctx.Record(r.arrived[i], r.m.Stream))
}
