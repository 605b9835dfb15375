package cpuops

import (
	"fmt"
	"time"

	"github.com/kasmina-go/kasmina/internal/optime"
)

// OpTime is what the nodes of one op took in a run.
type OpTime = optime.OpTime

// Table is the times of ops for people: a line each, with their shares of the whole.
func Table(times []OpTime) string { return optime.Table(times) }

// WithMonitor makes the machine time its ops while it runs, in one run of every so many, which
// computes the same bits. The first run, which meets new memory, is not timed. A sample reads the
// clock before and behind each op, which takes about a ten-millionth of a second. [Machine.Monitor]
// returns the times.
func WithMonitor(every int) Option {
	return func(c *config) error {
		if every < 2 {
			return fmt.Errorf("WithMonitor: every %d runs, want at least 2", every)
		}
		c.monitor = every
		return nil
	}
}

// monitor times one run in every so many.
type monitor struct {
	every   int
	runs    int // since the last sample
	samples int
	latest  []time.Duration // of each step, in the sample under way
	total   []time.Duration // in all samples
}

func newMonitor(every, steps int) *monitor {
	return &monitor{every: every, latest: make([]time.Duration, steps),
		total: make([]time.Duration, steps)}
}

// due reports whether the run that begins is to be timed.
func (o *monitor) due() bool {
	if o == nil {
		return false
	}
	o.runs++
	return o.runs >= o.every
}

// take takes a sample in, which counts as a whole or not at all.
func (o *monitor) take() {
	for i, d := range o.latest {
		o.total[i] += d
	}
	o.samples, o.runs = o.samples+1, 0
}

// Monitor returns what the ops of a run have taken so far on average, the longest first, with the
// variants in which they are computed. It is empty before the first sample, and without [WithMonitor].
func (m *Machine) Monitor() []OpTime {
	o := m.monitor
	if o == nil || o.samples == 0 || m.closed {
		return nil
	}

	var times []OpTime
	for i := range m.program.steps {
		s := &m.program.steps[i]
		if s.idle() {
			continue
		}
		variant := s.variant
		if variant == "" {
			variant = s.only()
		}
		times = append(times, OpTime{Op: s.name(), Tasks: 1,
			Time: o.total[i] / time.Duration(o.samples), Bytes: float64(s.bytes()),
			FLOPs: s.flops(), Variants: []string{variant}})
	}

	return optime.Gather(times)
}
