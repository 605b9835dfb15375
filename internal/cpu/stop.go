package cpu

import "sync/atomic"

// Stop asks a kernel that takes one to end early: what it writes is worth nothing then. A nil *Stop
// never does. A Stop may be asked for from any goroutine.
type Stop struct{ asked atomic.Bool }

// Ask asks the kernels that have s to end.
func (s *Stop) Ask() { s.asked.Store(true) }

// Asked reports whether Ask has been called.
func (s *Stop) Asked() bool { return s != nil && s.asked.Load() }
