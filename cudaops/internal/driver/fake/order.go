package fake

import (
	"cmp"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// op is a unit of work on a stream.
type op func() error

// stream is a queue of work that has not run yet.
type stream struct {
	c        *Context
	queue    []op
	capture  *capture
	recorded int // number of operations recorded in the capture
	awaited  int // number of these operations that the capture's origin waits for
}

// capture records the work of a stream and of the streams that have joined it. At each launch of the
// graph, every piece is called to obtain the operation to run.
type capture struct {
	origin  *stream
	pieces  []func() op
	invalid bool
}

// event refers to its last recording.
type event struct {
	timing bool
	mark   *mark
}

// mark is a position in a stream's work or in a capture.
type mark struct {
	stream   *stream
	passed   bool
	at       time.Duration
	captured *capture // capture that contains the mark; nil if none
	index    int      // number of the stream's operations captured before the mark
}

// issue traces work and then enqueues or captures it.
func (c *Context) issue(s gpu.Stream, o Op, do op) {
	c.Trace = append(c.Trace, o)
	c.streams[s].push(func() error {
		c.clock += time.Microsecond
		return do()
	})
}

func (s *stream) push(do op) {
	if s.capture != nil {
		s.record(func() op { return do })
		return
	}
	s.queue = append(s.queue, do)
}

func (s *stream) record(piece func() op) {
	s.capture.pieces = append(s.capture.pieces, piece)
	s.recorded++
}

// step runs the next operation. A fault destroys the context and discards all pending work.
func (s *stream) step() {
	if len(s.queue) == 0 {
		return
	}

	do := s.queue[0]
	s.queue = s.queue[1:]
	err := do()
	if err == nil || s.c.lost != nil {
		return
	}

	s.c.lost = err
	for _, other := range s.c.streams {
		other.queue = nil
	}
}

func (c *Context) drain(s *stream) error {
	for len(s.queue) > 0 {
		s.step()
	}
	return c.lost
}

// pass runs a mark's stream up to the mark. m may be nil.
func (c *Context) pass(m *mark) {
	for m != nil && !m.passed && len(m.stream.queue) > 0 {
		m.stream.step()
	}
}

// NewStream returns a stream. The fake ignores priorities.
func (c *Context) NewStream(bool) (gpu.Stream, error) {
	return register(c, "cuStreamCreate", c.streams, &stream{c: c})
}

// wait runs a stream's work. During a capture this is an error, and invalidates the capture.
func (c *Context) wait(st *stream) error {
	if st.capture != nil {
		st.capture.invalid = true
		return refused(gpu.CaptureUnsupported, "the stream is being captured")
	}
	return c.drain(st)
}

// DestroyStream runs the remaining work and removes the stream, which must not be the default stream.
func (c *Context) DestroyStream(s gpu.Stream) error {
	return withObject(c, "cuStreamDestroy", c.streams, s, func(st *stream) error {
		if s == 0 {
			return refused(gpu.InvalidHandle, "the default stream")
		}
		delete(c.streams, s)
		return c.wait(st)
	})
}

// SyncStream runs a stream's work.
func (c *Context) SyncStream(s gpu.Stream) error {
	return withObject(c, "cuStreamSynchronize", c.streams, s, c.wait)
}

func (c *Context) NewEvent(timing bool) (gpu.Event, error) {
	return register(c, "cuEventCreate", c.events, &event{timing: timing})
}

func (c *Context) DestroyEvent(e gpu.Event) error {
	return remove(c, "cuEventDestroy", c.events, e)
}

// withEventAndStream performs a call that takes an event and a stream.
func (c *Context) withEventAndStream(call string, e gpu.Event, s gpu.Stream,
	do func(*event, *stream) error) error {
	return withObject(c, call, c.events, e, func(ev *event) error {
		st, err := lookup(c.streams, s)
		if err != nil {
			return err
		}
		return do(ev, st)
	})
}

// atLaunch is like withEventAndStream, but records a piece that runs at each launch of the captured
// graph.
func (c *Context) atLaunch(call string, e gpu.Event, s gpu.Stream,
	piece func(*event, *stream) op) error {
	return c.withEventAndStream(call, e, s, func(ev *event, st *stream) error {
		st.record(func() op { return piece(ev, st) })
		return nil
	})
}

// Record marks the current end of a stream's work.
func (c *Context) Record(e gpu.Event, s gpu.Stream) error {
	return c.withEventAndStream("cuEventRecord", e, s, func(ev *event, st *stream) error {
		m := &mark{stream: st, captured: st.capture, index: st.recorded}
		ev.mark = m
		if st.capture == nil {
			st.push(func() error {
				m.passed, m.at = true, c.clock
				return nil
			})
		}
		return nil
	})
}

// Mark records the event again at each launch of the captured graph.
func (c *Context) Mark(e gpu.Event, s gpu.Stream) error {
	return c.atLaunch("cuEventRecordWithFlags", e, s, func(ev *event, st *stream) op {
		return func() error {
			ev.mark = &mark{stream: st, passed: true, at: c.clock}
			return nil
		}
	})
}

// Await waits for an event at each launch of the captured graph.
func (c *Context) Await(s gpu.Stream, e gpu.Event) error {
	return c.atLaunch("cuStreamWaitEvent", e, s, func(ev *event, _ *stream) op {
		m := ev.mark
		return func() error {
			if m != nil && m.captured == nil {
				c.pass(m)
			}
			return nil
		}
	})
}

// withMark performs a call that takes the mark of an event, or nil if the event was never recorded. It is
// an error if the mark is part of a capture.
func (c *Context) withMark(call string, e gpu.Event, do func(*mark) error) error {
	return withObject(c, call, c.events, e, func(ev *event) error {
		if ev.mark != nil && ev.mark.captured != nil {
			return refused(gpu.CapturedEvent, "the event was last recorded inside a capture")
		}
		return do(ev.mark)
	})
}

// SyncEvent runs work up to the event's mark.
func (c *Context) SyncEvent(e gpu.Event) error {
	return c.withMark("cuEventSynchronize", e, func(m *mark) error {
		c.pass(m)
		return c.lost
	})
}

// WaitEvent makes a stream wait for an event or, if the event was recorded in a capture, makes the stream
// join the capture.
func (c *Context) WaitEvent(s gpu.Stream, e gpu.Event) error {
	return c.withEventAndStream("cuStreamWaitEvent", e, s, func(ev *event, st *stream) error {
		m := ev.mark
		switch {
		case m == nil:
		case m.captured == nil && st.capture != nil:
			st.capture.invalid = true
			return refused(gpu.CaptureIsolation, "a capture cannot wait for an event recorded outside of it")
		case m.captured == nil:
			st.push(func() error {
				c.pass(m)
				return nil
			})
		case m.stream.capture != m.captured || st.capture != nil && st.capture != m.captured ||
			st.capture == nil && s == 0:
			return refused(gpu.CapturedEvent, "the event was last recorded inside another capture")
		case st.capture == nil:
			st.capture, st.recorded, st.awaited = m.captured, 0, 0
		case st == m.captured.origin:
			m.stream.awaited = m.index
		}
		return nil
	})
}

// EventDone runs one operation per call, so that polling terminates and both results occur.
func (c *Context) EventDone(e gpu.Event) (done bool, err error) {
	err = c.withMark("cuEventQuery", e, func(m *mark) error {
		if done = m == nil || m.passed; !done {
			m.stream.step()
		}
		return c.lost
	})
	return done, err
}

// Elapsed returns the simulated time between two events: a microsecond per operation, except for
// configured durations.
func (c *Context) Elapsed(start, end gpu.Event) (time.Duration, error) {
	at := func(e gpu.Event) (at time.Duration, err error) {
		err = c.withMark("cuEventElapsedTime", e, func(m *mark) error {
			switch {
			case m == nil || !c.events[e].timing:
				return refused(gpu.InvalidHandle, "the event was not recorded, or was created without timing")
			case !m.passed:
				return refused(gpu.NotReady, "")
			}
			at = m.at
			return nil
		})
		return at, err
	}

	from, err := at(start)
	to, endErr := at(end)
	return to - from, cmp.Or(err, endErr)
}

func (c *Context) BeginCapture(s gpu.Stream) error {
	return withObject(c, "cuStreamBeginCapture", c.streams, s, func(st *stream) error {
		if s == 0 || st.capture != nil {
			return refused(gpu.CaptureUnsupported, "the default stream, or one being captured already")
		}
		st.capture = &capture{origin: st}
		return nil
	})
}

// EndCapture ends a capture, even if it has failed.
func (c *Context) EndCapture(s gpu.Stream) (gpu.Graph, error) {
	k, err := c.uncapture(s)
	if err := c.locked("cuStreamEndCapture", func() error { return err }); err != nil {
		return 0, err
	}
	return register(c, "cuGraphInstantiateWithFlags", c.graphs, k)
}

// uncapture ends the capture of a stream, and returns it unless it is invalid.
func (c *Context) uncapture(s gpu.Stream) (*capture, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	st := c.streams[s]
	if st == nil || st.capture == nil || st.capture.origin != st {
		return nil, refused(gpu.CaptureUnmatched, "no capture was started on the stream")
	}

	k, unjoined := st.capture, false
	for _, joined := range c.streams {
		if joined.capture == k {
			unjoined = unjoined || joined != st && joined.recorded != joined.awaited
			joined.capture = nil
		}
	}

	switch {
	case k.invalid:
		return nil, refused(gpu.CaptureInvalidated, "a call was not allowed in the capture")
	case unjoined:
		return nil, refused(gpu.CaptureUnjoined, "a stream that has joined the capture has work "+
			"that the captured stream did not wait for")
	}

	return k, nil
}

// LaunchGraph enqueues the recorded work.
func (c *Context) LaunchGraph(g gpu.Graph, s gpu.Stream) error {
	const call = "cuGraphLaunch"
	return withObject(c, call, c.graphs, g, func(k *capture) error {
		if _, err := lookup(c.streams, s); err != nil {
			return err
		}
		var ops []op
		for _, piece := range k.pieces {
			ops = append(ops, piece())
		}
		c.issue(s, Op{Call: call}, func() error {
			for _, do := range ops {
				if err := do(); err != nil {
					return err
				}
			}
			return nil
		})
		return nil
	})
}

// DestroyGraph removes a graph. Launches that are already enqueued still run.
func (c *Context) DestroyGraph(g gpu.Graph) error {
	if g == 0 {
		return nil
	}
	return remove(c, "cuGraphExecDestroy", c.graphs, g)
}
