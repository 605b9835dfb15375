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
	owned   run.Memory // pinned memory and events, also of the layers
	layers  []*layer
	seeds   int            // of all layers
	memory  *program.Array // for each array of a report in turn what the layers have of it
	host    [2][]byte      // pinned, for a run and the one before it
	arrived [2]gpu.Event   // when the host has them
	opened  bool
	runs    int
	flight  int // of the run under way, among the two
}

// Before takes what the machine has not allocated. After an error it goes on with what is lacking.
func (r *reports) Before() (err error) {
	r.flight = r.runs % 2
	if r.opened {
		return nil
	}
	ctx := r.m.Ctx
	for i := range r.host {
		if err == nil && r.host[i] == nil {
			r.host[i], err = r.owned.AllocHost(r.memory.Extent())
		}
		if err == nil && r.arrived[i] == 0 {
			r.arrived[i], err = r.owned.NewEvent(false)
		}
	}
	if err == nil {
		err = ctx.Memset8(r.memory.Ptr(), 0, r.memory.Extent(), r.m.Stream)
	}
	r.opened = err == nil
	return err
}

// After copies the report of a run to where the layers expect it.
func (r *reports) After() error {
	ctx, i, words := r.m.Ctx, r.flight, program.KasminaHealth
	for _, l := range r.layers {
		if l.mode.telemetry {
			words = max(words, program.KasminaBins)
		}
		if l.mode.histogram {
			words = program.KasminaWords
		}
	}
	r.runs++
	return run.Joined(ctx.CopyToHost(r.host[i][:4*words*r.seeds], r.memory.Ptr(), r.m.Stream),
		ctx.Record(r.arrived[i], r.m.Stream))
}

// Close gives back memory.
func (r *reports) Close() error { return r.owned.Close() }
