package cpu

import "sync/atomic"

// Stop lets callers end a kernel early; its results are then undefined. A nil *Stop never ends one.
// Its methods may be called from any goroutine.
type Stop struct{ asked atomic.Bool }

// Ask requests the kernels with s to end.
func (s *Stop) Ask() { s.asked.Store(true) }

// Asked reports whether Ask has been called.
func (s *Stop) Asked() bool { return s != nil && s.asked.Load() }
