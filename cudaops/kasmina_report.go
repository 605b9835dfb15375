package cudaops

import (
	"errors"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
)

// kasminaReports is what a run measures in all Kasmina layers. It lies together, so that one copy brings it back: it takes 8 µs of a
// step, as one for each layer does.
type kasminaReports struct {
	m       *Machine
	layers  []*kasminaLayer
	seeds   int          // of all layers
	memory  *array       // for each array of a report in turn what the layers have of it
	host    [2][]byte    // pinned, for a run and the one before it
	arrived [2]gpu.Event // when the host has them
	opened  bool
	runs    int
	flight  int // of the run under way, among the two
}

// Where the arrays of a report begin, in words for each seed: counts of non-finite x and g, of clipped rows, and of what a
// replay counts, which nobody reads; figures; histograms.
const (
	kasminaBadX = iota
	kasminaBadG
	kasminaClipped
	kasminaIgnored
	kasminaHealth
	kasminaGradient = kasminaHealth + kernels.KasminaForwardFigures
	kasminaBins     = kasminaGradient + kernels.KasminaBackwardFigures
	kasminaWords    = kasminaBins + kernels.KasminaBins
)

// kasminaRegions is where begins what all runs have of a report, those that measure, and those with histograms.
var kasminaRegions = [...]int{0, kasminaHealth, kasminaBins, kasminaWords}

// reportsOf returns the machine's reports, which attend runs ahead of the layers.
func (c *compiler) reportsOf() *kasminaReports {
	for _, a := range c.m.attendants {
		if r, ok := a.(*kasminaReports); ok {
			return r
		}
	}
	r := &kasminaReports{m: c.m, memory: c.newResident(float32s, 0)}
	c.m.attendants = append(c.m.attendants, r)
	return r
}

// add makes room for a layer's.
func (r *kasminaReports) add(l *kasminaLayer) {
	l.reports, l.first = r, r.seeds
	r.layers, r.seeds = append(r.layers, l), r.seeds+l.seeds()
	r.memory.shape = []int{kasminaWords, r.seeds}
	r.memory.Bytes = r.memory.extent()
}

// place is where an array of the layer's report is, or a row of one, in words.
func (l *kasminaLayer) place(word int) int {
	i := 0
	for word >= kasminaRegions[i+1] {
		i++
	}
	from, to := kasminaRegions[i], kasminaRegions[i+1]
	return from*l.reports.seeds + (to-from)*l.first + (word-from)*l.seeds()
}

// before takes what the machine has not allocated. After an error it goes on with what is lacking.
func (r *kasminaReports) before() (err error) {
	r.flight = r.runs % 2
	if r.opened {
		return nil
	}
	ctx := r.m.device.ctx
	for i := range r.host {
		if err == nil && r.host[i] == nil {
			r.host[i], err = ctx.AllocHost(r.memory.extent())
		}
		if err == nil && r.arrived[i] == 0 {
			r.arrived[i], err = ctx.NewEvent(false)
		}
	}
	if err == nil {
		err = ctx.Memset32(r.memory.ptr(), 0, r.memory.len(), r.m.stream)
	}
	r.opened = err == nil
	return err
}

// after copies the report of a run to where the layers expect it.
func (r *kasminaReports) after() error {
	ctx, i, words := r.m.device.ctx, r.flight, kasminaHealth
	for _, l := range r.layers {
		if l.mode.telemetry {
			words = max(words, kasminaBins)
		}
		if l.mode.histogram {
			words = kasminaWords
		}
	}
	r.runs++
	return joined(ctx.CopyToHost(r.host[i][:4*words*r.seeds], r.memory.ptr(), r.m.stream), ctx.Record(r.arrived[i], r.m.stream))
}

func (r *kasminaReports) appendMode(b []byte) []byte { return b }
func (r *kasminaReports) settle() error              { return nil }

func (r *kasminaReports) close() error {
	ctx := r.m.device.ctx
	var errs []error
	for i := range r.host {
		if r.host[i] != nil {
			errs = append(errs, ctx.FreeHost(r.host[i]))
		}
		if r.arrived[i] != 0 {
			errs = append(errs, ctx.DestroyEvent(r.arrived[i]))
		}
	}
	return errors.Join(errs...)
}
