package state

import "time"

// Timing is what was measured of the time that one run of a layer took, forward or backward. Who executes the layer may
// measure it as seldom as it likes.
type Timing struct {
	Kernel    time.Duration // of the layer's arithmetic alone
	Telemetry time.Duration // by how much telemetry and the lattice's bookkeeping prolong it
	Bytes     int64         // read and written by the arithmetic at least, if caches hold nothing
}

// LayerReport holds the figures of a layer as a whole.
type LayerReport struct {
	Timed     int           // runs of the layer, forward or backward, that were timed since the lattice was made or loaded
	Kernel    time.Duration // mean time of one of them
	Bandwidth float64       // bytes a second that they read and wrote on average
	Overhead  float64       // per cent by which telemetry and bookkeeping prolonged them
	Errors    int           // NaN and Inf seen by all seeds
	Clips     int           // rows of all seeds whose gradient was clipped
}

// timing sums up what was measured. It is not saved with the lattice.
type timing struct {
	runs  int
	total Timing
}

// RecordTiming takes in the timing of a run of the layer.
func (l *Lattice) RecordTiming(t Timing) {
	l.mu.Lock()
	defer l.mu.Unlock()
	sum := &l.timing.total
	sum.Kernel, sum.Telemetry, sum.Bytes = sum.Kernel+t.Kernel, sum.Telemetry+t.Telemetry, sum.Bytes+t.Bytes
	l.timing.runs++
}

func (t *timing) report() (r LayerReport) {
	if r.Timed = t.runs; r.Timed > 0 && t.total.Kernel > 0 {
		r.Kernel = t.total.Kernel / time.Duration(t.runs)
		r.Bandwidth = float64(t.total.Bytes) / t.total.Kernel.Seconds()
		r.Overhead = max(0, 100*t.total.Telemetry.Seconds()/t.total.Kernel.Seconds())
	}
	return r
}
