package fake

import (
	"errors"
	"maps"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// op is work on a stream.
type op func() error

// stream holds the work that has not run yet.
type stream struct {
	c       *Context
	queue   []op
	capture *capture
}

// capture records the work of a stream, and of those that have joined it.
type capture struct {
	origin  *stream
	ops     []op
	given   map[*stream]int // pieces of work of those that have joined it
	awaited map[*stream]int // of those, how many the origin waits for
	invalid bool

	external []*event // that it waits for
	marks    []*mark  // theirs, when what runs now was launched
}

// event points to the mark of its last recording.
type event struct {
	timing bool
	mark   *mark
}

// mark is a point in a stream's work, or in a capture.
type mark struct {
	stream   *stream
	passed   bool
	at       time.Duration
	captured *capture // in which it is; nil for none
	behind   int      // how much of a joined stream's work was captured before it
}

// issue traces and enqueues work, or records it.
func (c *Context) issue(o Op, do op) error {
	s, err := c.stream(o.Call, o.Stream)
	if err != nil {
		return err
	}
	c.trace = append(c.trace, o)
	s.push(func() error {
		c.clock += time.Microsecond
		return do()
	})
	return nil
}

func (s *stream) push(do op) {
	if s.capture != nil {
		s.capture.ops = append(s.capture.ops, do)
		if s.capture.origin != s {
			s.capture.given[s]++
		}
		return
	}
	s.queue = append(s.queue, do)
}

// step runs the next piece of work. A fault loses the context and all work in it.
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
	if !errors.As(err, &s.c.lost) {
		s.c.lost = gpu.NewError("", gpu.LaunchFailed, "unspecified launch failure", err.Error())
	}
	for _, other := range s.c.streams {
		other.queue = nil
	}
}

func (c *Context) drain(call string, s *stream) error {
	for len(s.queue) > 0 {
		s.step()
	}
	return c.fault(call)
}

// pass runs a mark's stream up to the mark.
func (c *Context) pass(m *mark) {
	for !m.passed && len(m.stream.queue) > 0 {
		m.stream.step()
	}
}

func (c *Context) stream(call string, s gpu.Stream) (*stream, error) {
	if st := c.streams[s]; st != nil {
		return st, nil
	}
	return nil, gpu.NewError(call, gpu.InvalidHandle, "", "no such stream")
}

// NewStream makes a stream.
func (c *Context) NewStream() (gpu.Stream, error) {
	return asked(c, "cuStreamCreate", func() (gpu.Stream, error) {
		s := gpu.Stream(c.handleFor())
		c.streams[s] = &stream{c: c}
		return s, nil
	})
}

// NewUrgentStream makes a stream: the fake's have no priorities.
func (c *Context) NewUrgentStream() (gpu.Stream, error) { return c.NewStream() }

// wait runs a stream's work, which is not allowed in a capture and spoils it.
func (c *Context) wait(call string, s gpu.Stream) error {
	st, err := c.stream(call, s)
	if err != nil {
		return err
	}
	if st.capture != nil {
		st.capture.invalid = true
		return gpu.NewError(call, gpu.CaptureUnsupported, "", "the stream is being captured")
	}
	return c.drain(call, st)
}

// DestroyStream runs what is left and forgets the stream.
func (c *Context) DestroyStream(s gpu.Stream) error {
	const call = "cuStreamDestroy"
	return c.locked(call, func() error {
		if s == 0 {
			return gpu.NewError(call, gpu.InvalidHandle, "", "the default stream")
		}
		err := c.wait(call, s)
		delete(c.streams, s)
		return err
	})
}

// SyncStream runs a stream's work.
func (c *Context) SyncStream(s gpu.Stream) error {
	const call = "cuStreamSynchronize"
	return c.locked(call, func() error { return c.wait(call, s) })
}

// NewEvent makes an event.
func (c *Context) NewEvent(timing bool) (gpu.Event, error) {
	return asked(c, "cuEventCreate", func() (gpu.Event, error) {
		e := gpu.Event(c.handleFor())
		c.events[e] = &event{timing: timing}
		return e, nil
	})
}

// onEvent makes a call about an event.
func (c *Context) onEvent(call string, e gpu.Event, do func(*event) error) error {
	return c.locked(call, func() error {
		if c.events[e] == nil {
			return gpu.NewError(call, gpu.InvalidHandle, "", "no such event")
		}
		return do(c.events[e])
	})
}

// DestroyEvent forgets an event.
func (c *Context) DestroyEvent(e gpu.Event) error {
	return c.onEvent("cuEventDestroy", e, func(*event) error {
		delete(c.events, e)
		return nil
	})
}

// onBoth makes a call about an event and a stream.
func (c *Context) onBoth(call string, e gpu.Event, s gpu.Stream,
	do func(*event, *stream) error) error {
	return c.onEvent(call, e, func(ev *event) error {
		st, err := c.stream(call, s)
		if err != nil {
			return err
		}
		return do(ev, st)
	})
}

// atLaunch is onBoth for what each launch of the graph that is being captured is to do anew.
func (c *Context) atLaunch(call string, e gpu.Event, s gpu.Stream,
	do func(*event, *stream)) error {
	return c.onBoth(call, e, s, func(ev *event, st *stream) error {
		if st.capture == nil {
			return gpu.NewError(call, gpu.InvalidValue, "", "the stream is not being captured")
		}
		do(ev, st)
		return nil
	})
}

// Record marks a stream's present end.
func (c *Context) Record(e gpu.Event, s gpu.Stream) error {
	return c.onBoth("cuEventRecord", e, s, func(ev *event, st *stream) error {
		m := &mark{stream: st, captured: st.capture}
		ev.mark = m
		if m.captured != nil {
			m.behind = st.capture.given[st]
		} else {
			st.push(func() error {
				m.passed, m.at = true, c.clock
				return nil
			})
		}
		return nil
	})
}

// Mark records the event anew whenever the graph that is being captured is launched.
func (c *Context) Mark(e gpu.Event, s gpu.Stream) error {
	return c.atLaunch("cuEventRecordWithFlags", e, s, func(ev *event, st *stream) {
		st.push(func() error {
			ev.mark = &mark{stream: st, passed: true, at: c.clock}
			return nil
		})
	})
}

// onMark makes a call about the mark of an event that may be waited for; nil if it was never
// recorded.
func (c *Context) onMark(call string, e gpu.Event, do func(*mark) error) error {
	return c.onEvent(call, e, func(ev *event) error {
		if ev.mark != nil && ev.mark.captured != nil {
			return gpu.NewError(call, gpu.CapturedEvent, "",
				"the event was last recorded inside a capture")
		}
		return do(ev.mark)
	})
}

// SyncEvent runs work up to the event's mark.
func (c *Context) SyncEvent(e gpu.Event) error {
	const call = "cuEventSynchronize"
	return c.onMark(call, e, func(m *mark) error {
		if m == nil {
			return nil
		}
		c.pass(m)
		return c.fault(call)
	})
}

// WaitEvent has a stream's work wait for an event, or lets the stream join the capture that the
// event was recorded in.
func (c *Context) WaitEvent(s gpu.Stream, e gpu.Event) error {
	const call = "cuStreamWaitEvent"
	return c.onBoth(call, e, s, func(ev *event, st *stream) error {
		m := ev.mark
		switch {
		case m == nil:
		case m.captured == nil && st.capture != nil:
			st.capture.invalid = true
			return gpu.NewError(call, gpu.CaptureIsolation, "",
				"a capture cannot wait for what is outside of it")
		case m.captured == nil:
			st.push(func() error {
				c.pass(m)
				return nil
			})
		case m.stream.capture != m.captured || st.capture != nil && st.capture != m.captured ||
			st.capture == nil && s == 0:
			return gpu.NewError(call, gpu.CapturedEvent, "",
				"the event was last recorded inside another capture")
		case st.capture == nil:
			st.capture = m.captured
		case st == m.captured.origin && m.behind > 0:
			m.captured.awaited[m.stream] = m.behind
		}
		return nil
	})
}

// Await waits for an event at each launch of the graph that is being captured.
func (c *Context) Await(s gpu.Stream, e gpu.Event) error {
	return c.atLaunch("cuStreamWaitEvent", e, s, func(ev *event, st *stream) {
		k := st.capture
		n := len(k.external)
		k.external = append(k.external, ev)
		st.push(func() error {
			if m := k.marks[n]; m != nil && m.captured == nil {
				c.pass(m)
			}
			return nil
		})
	})
}

// EventDone runs one piece of work at each question, so that polling ends and both answers occur.
func (c *Context) EventDone(e gpu.Event) (done bool, err error) {
	const call = "cuEventQuery"
	err = c.onMark(call, e, func(m *mark) error {
		if done = m == nil || m.passed; !done {
			m.stream.step()
		}
		return c.fault(call)
	})
	return done, err
}

// Elapsed is the number of operations that ran between two marks, in microseconds.
func (c *Context) Elapsed(start, end gpu.Event) (time.Duration, error) {
	const call = "cuEventElapsedTime"
	var at [2]time.Duration
	for i, e := range []gpu.Event{start, end} {
		err := c.onMark(call, e, func(m *mark) error {
			if m == nil || !c.events[e].timing {
				return gpu.NewError(call, gpu.InvalidHandle, "",
					"an event not recorded, or made without timing")
			}
			if !m.passed {
				return gpu.NewError(call, gpu.NotReady, "", "")
			}
			at[i] = m.at
			return nil
		})
		if err != nil {
			return 0, err
		}
	}
	return at[1] - at[0], nil
}

// BeginCapture starts recording.
func (c *Context) BeginCapture(s gpu.Stream) error {
	const call = "cuStreamBeginCapture"
	return c.locked(call, func() error {
		st, err := c.stream(call, s)
		if err != nil {
			return err
		}
		if s == 0 || st.capture != nil {
			return gpu.NewError(call, gpu.CaptureUnsupported, "",
				"the default stream, or one being captured already")
		}
		st.capture = &capture{origin: st, given: map[*stream]int{},
			awaited: map[*stream]int{}}
		return nil
	})
}

// EndCapture ends recording, also where it fails.
func (c *Context) EndCapture(s gpu.Stream) (*gpu.Graph, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	const call = "cuStreamEndCapture"
	st, err := c.stream(call, s)
	if err != nil {
		return nil, err
	}
	k := st.capture
	if k == nil || k.origin != st {
		return nil, gpu.NewError(call, gpu.CaptureUnmatched, "",
			"no capture was begun on the stream")
	}
	for _, joined := range c.streams {
		if joined.capture == k {
			joined.capture = nil
		}
	}
	if err := c.begin(call); err != nil {
		return nil, err
	}
	if k.invalid {
		return nil, gpu.NewError(call, gpu.CaptureInvalidated, "",
			"a call during the capture was not allowed in it")
	}
	if !maps.Equal(k.given, k.awaited) {
		return nil, gpu.NewError(call, gpu.CaptureUnjoined, "",
			"a stream that has joined the capture has work that the captured one did not wait for")
	}
	if err := c.begin("cuGraphInstantiateWithFlags"); err != nil {
		return nil, err
	}
	g := &gpu.Graph{Handle: c.handleFor()}
	c.graphs[g.Handle] = k
	return g, nil
}

// onGraph makes a call about a graph.
func (c *Context) onGraph(call string, g *gpu.Graph, do func(*capture) error) error {
	return c.locked(call, func() error {
		if c.graphs[g.Handle] == nil {
			return gpu.NewError(call, gpu.InvalidHandle, "", "no such graph")
		}
		return do(c.graphs[g.Handle])
	})
}

// LaunchGraph enqueues all that was recorded.
func (c *Context) LaunchGraph(g *gpu.Graph, s gpu.Stream) error {
	const call = "cuGraphLaunch"
	return c.onGraph(call, g, func(k *capture) error {
		marks := make([]*mark, len(k.external))
		for i, ev := range k.external {
			marks[i] = ev.mark
		}
		return c.issue(Op{Call: call, Stream: s}, func() error {
			k.marks = marks
			for _, do := range k.ops {
				if err := do(); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

// DestroyGraph forgets a graph. Launches already enqueued still run.
func (c *Context) DestroyGraph(g *gpu.Graph) error {
	return c.onGraph("cuGraphExecDestroy", g, func(*capture) error {
		delete(c.graphs, g.Handle)
		return nil
	})
}
