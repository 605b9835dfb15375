package cpu

import "sync/atomic"

// Stop lets callers interrupt a kernel, whose results are then undefined. A nil *Stop never
// interrupts one. Its methods may be called from any goroutine.
type Stop struct{ asked atomic.Bool }

// Ask asks the kernels using s to return early.
func (s *Stop) Ask() { s.asked.Store(true) }

// Asked reports whether Ask has been called.
func (s *Stop) Asked() bool { return s != nil && s.asked.Load() }
