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

// capture records the work of its streams in the order in which it was issued, which is one that events allow.
type capture struct {
	origin  *stream
	ops     []op
	before  map[*stream]map[int]bool // of each stream: the ops that come before whatever it does next
	invalid bool
}

// event points to the mark of its last recording.
type event struct {
	timing bool
	mark   *mark
}

// mark is a point in a stream's work, or in a capture.
type mark struct {
	stream  *stream
	passed  bool
	at      time.Duration
	capture *capture
	before  map[int]bool
}

// issue traces, counts and enqueues work, or records it.
func (c *Context) issue(o Op, work gpu.Stats, do op) error {
	s, err := c.stream(o.Call, o.Stream)
	if err != nil {
		return err
	}
	o.Captured = s.capture != nil
	c.trace = append(c.trace, o)
	c.ledger.Add(o.Stream, work)
	s.push(func() error {
		c.clock += time.Microsecond
		return do()
	})
	return nil
}

func (s *stream) push(do op) {
	if k := s.capture; k != nil {
		k.before[s][len(k.ops)] = true
		k.ops = append(k.ops, do)
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

func (c *Context) drainAll(call string) error {
	for _, s := range c.streams {
		if err := c.drain(call, s); err != nil {
			return err
		}
	}
	return nil
}

func (c *Context) fault(call string) error {
	if c.lost != nil {
		return c.lostError(call)
	}
	return nil
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
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.begin("cuStreamCreate"); err != nil {
		return 0, err
	}
	s := gpu.Stream(c.handleFor())
	c.streams[s] = &stream{c: c}
	return s, nil
}

// asked is the common part of the calls about one stream; those that would wait spoil a capture.
func (c *Context) asked(call string, s gpu.Stream) (*stream, error) {
	if err := c.begin(call); err != nil {
		return nil, err
	}
	st, err := c.stream(call, s)
	if err == nil && st.capture != nil {
		st.capture.invalid = true
		return nil, gpu.NewError(call, gpu.CaptureUnsupported, "", "the stream is being captured")
	}
	return st, err
}

// DestroyStream runs what is left and forgets the stream.
func (c *Context) DestroyStream(s gpu.Stream) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	st, err := c.asked("cuStreamDestroy", s)
	if err != nil {
		return err
	}
	if s == 0 {
		return gpu.NewError("cuStreamDestroy", gpu.InvalidHandle, "", "the default stream")
	}
	delete(c.streams, s)
	return c.drain("cuStreamDestroy", st)
}

// SyncStream runs a stream's work.
func (c *Context) SyncStream(s gpu.Stream) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	st, err := c.asked("cuStreamSynchronize", s)
	if err != nil {
		return err
	}
	return c.drain("cuStreamSynchronize", st)
}

// StreamDone runs one piece of work at each question, so that polling ends and both answers occur.
func (c *Context) StreamDone(s gpu.Stream) (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	st, err := c.asked("cuStreamQuery", s)
	if err != nil {
		return false, err
	}
	done := len(st.queue) == 0
	st.step()
	return done, c.fault("cuStreamQuery")
}

// Synchronize runs everything.
func (c *Context) Synchronize() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.begin("cuCtxSynchronize"); err != nil {
		return err
	}
	return c.drainAll("cuCtxSynchronize")
}

// NewEvent makes an event.
func (c *Context) NewEvent(timing bool) (gpu.Event, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.begin("cuEventCreate"); err != nil {
		return 0, err
	}
	e := gpu.Event(c.handleFor())
	c.events[e] = &event{timing: timing}
	return e, nil
}

func (c *Context) event(call string, e gpu.Event) (*event, error) {
	if err := c.begin(call); err != nil {
		return nil, err
	}
	if ev := c.events[e]; ev != nil {
		return ev, nil
	}
	return nil, gpu.NewError(call, gpu.InvalidHandle, "", "no such event")
}

// DestroyEvent forgets an event.
func (c *Context) DestroyEvent(e gpu.Event) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := c.event("cuEventDestroy", e)
	delete(c.events, e)
	return err
}

// Record marks a stream's present end.
func (c *Context) Record(e gpu.Event, s gpu.Stream) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	ev, err := c.event("cuEventRecord", e)
	if err != nil {
		return err
	}
	st, err := c.stream("cuEventRecord", s)
	if err != nil {
		return err
	}
	m := &mark{stream: st}
	ev.mark = m
	c.ledger.Recorded(e, s)
	if k := st.capture; k != nil {
		m.capture, m.before = k, maps.Clone(k.before[st])
		return nil
	}
	st.push(func() error {
		m.passed, m.at = true, c.clock
		return nil
	})
	return nil
}

// captured is an event, and a stream that is being captured.
func (c *Context) captured(call string, e gpu.Event, s gpu.Stream) (*event, *stream, error) {
	ev, err := c.event(call, e)
	if err != nil {
		return nil, nil, err
	}
	st, err := c.stream(call, s)
	if err == nil && st.capture == nil {
		err = gpu.NewError(call, gpu.InvalidValue, "", "the stream is not being captured")
	}
	return ev, st, err
}

// Mark records the event anew whenever the graph that is being captured is launched.
func (c *Context) Mark(e gpu.Event, s gpu.Stream) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	ev, st, err := c.captured("cuEventRecordWithFlags", e, s)
	if err != nil {
		return err
	}
	st.push(func() error {
		ev.mark = &mark{stream: st, passed: true, at: c.clock}
		return nil
	})
	return nil
}

// Wait holds a stream back until a mark has passed, and takes it into the mark's capture.
func (c *Context) Wait(s gpu.Stream, e gpu.Event) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	const call = "cuStreamWaitEvent"
	ev, err := c.event(call, e)
	if err != nil {
		return err
	}
	st, err := c.stream(call, s)
	if err != nil || ev.mark == nil {
		return err
	}
	m := ev.mark
	if m.capture == nil {
		if st.capture != nil {
			st.capture.invalid = true
			return gpu.NewError(call, gpu.CaptureIsolation, "", "the event was recorded outside the capture")
		}
		st.push(func() error { c.pass(m); return nil })
		return nil
	}
	if st.capture == nil {
		st.capture = m.capture
		st.capture.before[st] = map[int]bool{}
	}
	maps.Copy(st.capture.before[st], m.before)
	c.ledger.Waited(s, e)
	return nil
}

// marked is the mark of an event that may be waited for; nil if it was never recorded.
func (c *Context) marked(call string, e gpu.Event) (*mark, error) {
	ev, err := c.event(call, e)
	if err != nil {
		return nil, err
	}
	if ev.mark != nil && ev.mark.capture != nil {
		return nil, gpu.NewError(call, gpu.CapturedEvent, "", "the event was last recorded inside a capture")
	}
	return ev.mark, nil
}

// SyncEvent runs work up to the event's mark.
func (c *Context) SyncEvent(e gpu.Event) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	m, err := c.marked("cuEventSynchronize", e)
	if err != nil || m == nil {
		return err
	}
	c.pass(m)
	return c.fault("cuEventSynchronize")
}

// EventDone runs one piece of work at each question.
func (c *Context) EventDone(e gpu.Event) (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m, err := c.marked("cuEventQuery", e)
	if err != nil || m == nil {
		return err == nil, err
	}
	done := m.passed
	if !done {
		m.stream.step()
	}
	return done, c.fault("cuEventQuery")
}

// Elapsed is the number of operations that ran between two marks, in microseconds.
func (c *Context) Elapsed(start, end gpu.Event) (time.Duration, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	const call = "cuEventElapsedTime"
	var at [2]time.Duration
	for i, e := range []gpu.Event{start, end} {
		m, err := c.marked(call, e)
		if err != nil {
			return 0, err
		}
		if m == nil || !c.events[e].timing {
			return 0, gpu.NewError(call, gpu.InvalidHandle, "", "an event not recorded, or made without timing")
		}
		if !m.passed {
			return 0, gpu.NewError(call, gpu.NotReady, "", "")
		}
		at[i] = m.at
	}
	return at[1] - at[0], nil
}

// BeginCapture starts recording.
func (c *Context) BeginCapture(s gpu.Stream) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	const call = "cuStreamBeginCapture"
	if err := c.begin(call); err != nil {
		return err
	}
	st, err := c.stream(call, s)
	if err != nil {
		return err
	}
	if s == 0 || st.capture != nil {
		return gpu.NewError(call, gpu.CaptureUnsupported, "", "the default stream, or one being captured already")
	}
	st.capture = &capture{origin: st, before: map[*stream]map[int]bool{st: {}}}
	c.ledger.BeginCapture(s)
	return nil
}

// EndCapture ends recording; work of other streams that does not come before the end is an error.
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
		return nil, gpu.NewError(call, gpu.CaptureUnmatched, "", "no capture was begun on the stream")
	}
	work, _ := c.ledger.EndCapture(s)
	for member := range k.before {
		member.capture = nil
	}
	if err := c.begin(call); err != nil {
		return nil, err
	}
	switch {
	case k.invalid:
		return nil, gpu.NewError(call, gpu.CaptureInvalidated, "", "a call during the capture was not allowed in it")
	case len(k.before[st]) != len(k.ops):
		return nil, gpu.NewError(call, gpu.CaptureUnjoined, "", "a stream was not joined back by an event")
	}
	if err := c.begin("cuGraphInstantiateWithFlags"); err != nil {
		return nil, err
	}
	work.GraphLaunches++
	g := &gpu.Graph{Handle: c.handleFor(), Nodes: len(k.ops), Work: work}
	c.graphs[g.Handle] = k
	return g, nil
}

// LaunchGraph enqueues all that was recorded.
func (c *Context) LaunchGraph(g *gpu.Graph, s gpu.Stream) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	const call = "cuGraphLaunch"
	if err := c.begin(call); err != nil {
		return err
	}
	k, ok := c.graphs[g.Handle]
	if !ok {
		return gpu.NewError(call, gpu.InvalidHandle, "", "no such graph")
	}
	return c.issue(Op{Call: call, Stream: s}, g.Work, func() error {
		for _, do := range k.ops {
			if err := do(); err != nil {
				return err
			}
		}
		return nil
	})
}

// DestroyGraph forgets a graph. Launches already enqueued still run.
func (c *Context) DestroyGraph(g *gpu.Graph) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.begin("cuGraphExecDestroy"); err != nil {
		return err
	}
	if _, ok := c.graphs[g.Handle]; !ok {
		return gpu.NewError("cuGraphExecDestroy", gpu.InvalidHandle, "", "no such graph")
	}
	delete(c.graphs, g.Handle)
	return nil
}
