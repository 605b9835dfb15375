package state

import (
	"sync"
	"sync/atomic"
)

// changeLock is the lock of a lattice. Lock counts how often it is called, so a method that may change what forward
// passes compute need not count its changes itself. Methods that only record measurements use lockToRecord instead.
type changeLock struct {
	sync.RWMutex
	changes atomic.Uint64
}

// Lock acquires the lock for a change and counts the change.
func (l *changeLock) Lock() {
	l.RWMutex.Lock()
	l.changes.Add(1)
}

// lockToRecord acquires the lock for recording measurements, which do not count as a change.
func (l *changeLock) lockToRecord() { l.RWMutex.Lock() }

// Revision returns a number that grows with every change of a stage, an α, a slot or a setting. Passes
// that begin at the same revision therefore see the same seeds, apart from α noise ([WithAlphaNoise]).
// Recording measurements does not change the revision.
func (l *Lattice) Revision() uint64 { return l.mu.changes.Load() }
