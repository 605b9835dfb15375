package cpuops

import (
	"fmt"
	"time"

	"github.com/kasmina-go/kasmina/optime"
)

// WithMonitor makes the machine time the ops of one run out of every given number of runs. Timing
// does not change a run's results. [Machine.Monitor] returns the times.
//
// The first run is not timed, because its memory is new. Timing reads the clock before and after each op,
// which takes about 0.1 µs.
func WithMonitor(every int) Option {
	return func(c *config) error {
		if every < 2 {
			return fmt.Errorf("WithMonitor: every %d runs, want at least 2", every)
		}
		c.monitor = every
		return nil
	}
}

// monitor times the ops of one run out of every "every" runs.
type monitor struct {
	every   int
	runs    int // since the last sample
	samples int
	latest  []time.Duration // duration of each step in the current sample
	total   []time.Duration // sum over all samples
}

func newMonitor(every, steps int) *monitor {
	return &monitor{every: every, latest: make([]time.Duration, steps),
		total: make([]time.Duration, steps)}
}

// due reports whether the run that is about to start should be timed.
func (o *monitor) due() bool {
	if o == nil {
		return false
	}
	o.runs++
	return o.runs >= o.every
}

// addSample adds the latest sample to the totals. Failed runs are not added.
func (o *monitor) addSample() {
	for i, d := range o.latest {
		o.total[i] += d
	}
	o.samples, o.runs = o.samples+1, 0
}

// Monitor returns the average time of each op in the runs timed so far, longest first, with the
// variants used. It returns nil before the first timed run and without [WithMonitor].
func (m *Machine) Monitor() []optime.OpTime {
	o := m.monitor
	if o == nil || o.samples == 0 || m.closed {
		return nil
	}

	var times []optime.OpTime
	for i := range m.program.steps {
		s := &m.program.steps[i]
		if s.idle() {
			continue
		}
		variant := s.variant
		if variant == "" {
			variant = s.soleVariant()
		}
		times = append(times, optime.OpTime{Op: s.name(), Tasks: 1,
			Time: o.total[i] / time.Duration(o.samples), Bytes: float64(s.bytes()),
			FLOPs: s.flops(), Variants: []string{variant}})
	}

	return optime.Gather(times)
}
