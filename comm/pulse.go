package comm

import (
	"slices"
	"strings"
	"sync"
	"time"
)

// A pulse reports a rank's state to rank 0 several times per deadline. Pulses distinguish three cases
// that look alike to waiting ranks: a frozen process sends no pulse, a hung rank sends pulses without
// progress, and a rank doing long work sends pulses that say so.
type pulse struct {
	// Step is the last reported step, or −1 before the first report.
	Step int64
	// Still is the time since the rank last made progress. It is 0 while the rank waits or is busy,
	// and before its first step.
	Still time.Duration `json:",omitempty"`
	// Waited is the duration of the current wait for other ranks, or 0.
	Waited time.Duration `json:",omitempty"`
	// Busy describes long work outside a step, or is empty.
	Busy string `json:",omitempty"`
}

const (
	// beats is the number of pulses per deadline.
	beats = 5

	// standstill is the number of deadlines after which ranks that all wait for each other are
	// considered deadlocked.
	standstill = 3
)

// An activity tracks the state reported by a rank's pulses. The zero value is ready to use.
type activity struct {
	mu      sync.Mutex
	step    int64     // last reported step plus 1
	moved   time.Time // time of the last progress
	waits   int       // number of calls waiting for other ranks
	waiting time.Time // start of the current wait
	busy    []*string // descriptions of long work in progress
}

// progress records that the rank has reached a step.
func (a *activity) progress(step int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.step, a.moved = step+1, time.Now()
}

// wait records that the rank waits for other ranks until done is called.
func (a *activity) wait() (done func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.waits++; a.waits == 1 {
		a.waiting = time.Now()
	}

	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.waits--
		a.moved = time.Now()
	}
}

// begin records that the rank is busy until done is called.
func (a *activity) begin(what string) (done func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	own := &what
	a.busy = append(a.busy, own)
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if i := slices.Index(a.busy, own); i >= 0 {
			a.busy = slices.Delete(a.busy, i, i+1)
		}
		a.moved = time.Now()
	}
}

// excuse resets the clocks after the process was suspended.
func (a *activity) excuse() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.moved, a.waiting = time.Now(), time.Now()
}

// pulse returns the current state.
func (a *activity) pulse() *pulse {
	a.mu.Lock()
	defer a.mu.Unlock()
	p := &pulse{Step: a.step - 1}
	switch {
	case a.waits > 0: // takes precedence: long work that waits is held up by another rank
		p.Waited = max(1, time.Since(a.waiting))
	case len(a.busy) > 0:
		var all []string
		for _, what := range a.busy {
			all = append(all, *what)
		}
		p.Busy = strings.Join(all, ", ")
	case a.step > 0:
		p.Still = time.Since(a.moved)
	}

	return p
}

// watchdog calls look several times per deadline until done is closed. frozen reports whether this
// process itself was suspended since the last call; silence of the other processes then means
// nothing.
func watchdog(deadline time.Duration, done <-chan struct{}, look func(frozen bool)) {
	period := max(deadline/beats, time.Millisecond)
	tick := time.NewTicker(period)
	defer tick.Stop()
	for last := time.Now(); ; {
		select {
		case <-done:
			return
		case <-tick.C:
		}
		now := time.Now()
		look(now.Sub(last) > deadline/2)
		last = now
	}
}
