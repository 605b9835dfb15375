package comm

import (
	"slices"
	"strings"
	"sync"
	"time"
)

// A pulse is what a rank says of itself a few times within each deadline. It separates three
// things that look alike to those who wait for the rank: the process is gone or frozen, and no
// pulse comes; it hangs, and the pulse says that there is no progress; or it works on something
// that takes long, and the pulse says so.
type pulse struct {
	// Step is the last one that was reported, −1 before the first.
	Step int64
	// Still is how long the rank has made no progress; 0 while it waits, is busy or has not
	// reported its first step.
	Still time.Duration `json:",omitempty"`
	// Waited is how long the rank has been waiting for other ranks; 0 if it is not.
	Waited time.Duration `json:",omitempty"`
	// Busy says what the rank is busy with, outside of a step.
	Busy string `json:",omitempty"`
}

const (
	// beats is how many times within a deadline a rank says that it is alive.
	beats = 5

	// standstill is how many deadlines all ranks may wait for one another.
	standstill = 3
)

// activity is what a rank does, as its pulse tells. The zero value is a rank that has not reported
// a step.
type activity struct {
	mu      sync.Mutex
	step    int64 // last reported, plus 1
	moved   time.Time
	waits   int // calls that wait for other ranks
	waiting time.Time
	busy    []*string
}

// progress notes that the rank has come to a step.
func (a *activity) progress(step int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.step, a.moved = step+1, time.Now()
}

// wait notes that the rank waits for others until the function that it returns is called.
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

// begin notes that the rank is busy until the function that it returns is called.
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

// excuse notes that the process was frozen, and could make no progress.
func (a *activity) excuse() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.moved, a.waiting = time.Now(), time.Now()
}

// pulse returns what is to be said of the rank now.
func (a *activity) pulse() *pulse {
	a.mu.Lock()
	defer a.mu.Unlock()
	p := &pulse{Step: a.step - 1}
	switch {
	case a.waits > 0: // also where it is busy: then another rank holds it up
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

// watchdog calls look a few times within each deadline, until done is closed. frozen tells look that
// this process itself was frozen, so that it has heard nothing of the others through no fault of
// theirs.
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
