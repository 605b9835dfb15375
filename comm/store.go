package comm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kasmina-go/kasmina/comm/internal/channel"
)

// A store runs in the process of rank 0. It gathers values and notifies all ranks when one fails.
type store struct {
	place    Place
	deadline time.Duration
	maxBytes int64 // maximum bytes of a gathering; MaxGather except in tests
	listener *channel.Listener
	port     int

	mu        sync.Mutex
	seats     []seat // by rank
	gathering map[string]*gathering
	failure   *RankError
	closed    bool
	joining   *time.Timer   // limits the wait for ranks to join
	progress  time.Time     // last time any rank was known to make progress or to be busy
	once      sync.Once     // closes empty
	empty     chan struct{} // closed when every joined rank has left
	done      chan struct{} // closed by close
}

// A seat is the store's record of a rank.
type seat struct {
	member
	wire  *wire // nil before the rank joins
	left  bool
	pulse pulse // the latest received
}

// present reports whether the rank has joined and has not left.
func (s *seat) present() bool { return s.wire != nil && !s.left }

// A gathering collects the values that ranks contribute under a key.
type gathering struct {
	values [][]byte
	given  []bool
	bytes  int64
	err    string // reason the gathering failed, or empty
}

// openStore listens on the first free port of the window. The run fails if not all ranks join in
// the given time.
func openStore(ctx context.Context, p Place, id *channel.Identity,
	joining, deadline time.Duration) (*store, error) {
	listener, err := p.listen(ctx, id)
	if err != nil {
		return nil, err
	}

	return newStore(p, listener, portOf(listener.Addrs()[0]), joining, deadline), nil
}

// newStore returns the store of a run whose ranks connect to the listener at the given port.
func newStore(p Place, listener *channel.Listener, port int, joining, deadline time.Duration) *store {
	s := &store{place: p, deadline: deadline, maxBytes: MaxGather, listener: listener, port: port,
		seats: make([]seat, p.Size), gathering: map[string]*gathering{}, empty: make(chan struct{}),
		done: make(chan struct{})}
	for r := range s.seats {
		s.seats[r].Rank, s.seats[r].pulse.Step = r, -1
	}

	s.joining = time.AfterFunc(joining, func() { s.expireJoining(joining) })
	go s.accept()
	if deadline > 0 {
		go watchdog(deadline, s.done, s.inspect)
	}

	return s
}

func (s *store) accept() {
	for {
		conn, err := s.listener.Accept()
		if err != nil {
			return // closed
		}
		go s.serve(conn)
	}
}

// serve admits a process and handles its messages until it leaves.
func (s *store) serve(conn net.Conn) {
	w := newWire(conn)
	defer w.Close()
	m, ok := s.admit(w)
	if !ok {
		w.flush(farewell) // deliver the reason
		return
	}

	for {
		asked, err := w.receive(maxHead, MaxGather)
		if err != nil {
			s.lost(m)
			return
		}
		switch asked.Kind {
		case give:
			s.gather(m, asked)
		case beat:
			s.heard(m, asked.Pulse)
		case fail:
			s.fail(&RankError{member: m, Reason: asked.Text}, false)
		case leave:
			s.left(m)
			return
		}
	}
}

// admit reads the identity of an authenticated process and assigns its seat.
func (s *store) admit(w *wire) (member, bool) {
	if w.conn.SetReadDeadline(time.Now().Add(channel.HandshakeTimeout)) != nil {
		return member{}, false
	}

	m, err := w.receive(maxGreeting, 0)
	if err != nil || m.Kind != join {
		return member{}, false
	}

	k, why := s.judge(m)

	// Holding the lock ensures that this rank is also notified of a concurrent failure.
	s.mu.Lock()
	defer s.mu.Unlock()
	if k == welcome && s.seats[m.Member.Rank].wire != nil {
		k, why = invalid, fmt.Sprintf("%v has this rank already", s.seats[m.Member.Rank].member)
	}

	if k == welcome && w.conn.SetReadDeadline(time.Time{}) != nil {
		return member{}, false
	}

	w.post(message{Kind: k, Text: why, Member: self(0), Deadline: s.deadline})
	if k != welcome {
		return member{}, false
	}

	s.seats[m.Member.Rank].member, s.seats[m.Member.Rank].wire = m.Member, w
	if s.failure != nil {
		s.notify(&s.seats[m.Member.Rank])
	}

	return m.Member, true
}

// judge decides whether a process may join the run, and returns a reason if it may not.
func (s *store) judge(m message) (kind, string) {
	switch {
	case m.Run != s.place.Run:
		return refused, fmt.Sprintf("this is run %q, not %q", s.place.Run, m.Run)
	case m.Port != s.port:
		// A program that relays connections could cut them at any time.
		return refused, fmt.Sprintf("another program listens there and relays connections to rank 0 at "+
			"port %d", s.port)
	case m.Size != s.place.Size || m.Member.Rank < 0 || m.Member.Rank >= s.place.Size:
		return invalid, fmt.Sprintf("rank %d of %d came to a run of %d ranks", m.Member.Rank,
			m.Size, s.place.Size)
	}

	return welcome, ""
}

// gather adds a rank's value to a gathering. When the last value arrives, the store sends all values
// to all ranks.
//
// If the gathering fails, waiting ranks receive the error at once, and the remaining ones when they
// contribute.
func (s *store) gather(m member, asked message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.gathering[asked.Key]
	if g == nil {
		g = &gathering{values: make([][]byte, s.place.Size), given: make([]bool, s.place.Size)}
		s.gathering[asked.Key] = g
	}

	g.given[m.Rank] = true
	if len(asked.Values) > 0 {
		g.values[m.Rank] = asked.Values[0]
	}

	g.bytes += asked.Bytes + int64(len(g.values[m.Rank]))
	refused := g.err != ""
	if g.bytes > s.maxBytes && !refused {
		g.err = fmt.Sprintf("the values of %d ranks have %d bytes together, want at most %d",
			count(g.given), g.bytes, s.maxBytes)
	}

	gone := slices.IndexFunc(s.seats, func(x seat) bool { return x.left && !g.given[x.Rank] })
	if gone >= 0 && g.err == "" && s.failure == nil {
		g.err = fmt.Sprintf("%v has left", s.seats[gone].member)
	}

	switch {
	case refused:
		s.seats[m.Rank].wire.post(message{Kind: all, Key: asked.Key, Text: g.err})
	case g.err != "":
		s.refuse(asked.Key, g)
	case !slices.Contains(g.given, false):
		for r := range s.seats {
			s.seats[r].wire.post(message{Kind: all, Key: asked.Key, Values: g.values})
		}
	}

	if slices.Contains(g.given, false) {
		return
	}

	delete(s.gathering, asked.Key)
	if asked.Key == joinKey {
		// All ranks have joined, so no further connection is expected.
		s.joining.Stop()
		s.listener.Close()
	}
}

// refuse sends the error of a gathering to all ranks waiting for it. The caller holds the lock.
func (s *store) refuse(key string, g *gathering) {
	clear(g.values)
	for r, given := range g.given {
		if given && s.seats[r].present() {
			s.seats[r].wire.post(message{Kind: all, Key: key, Text: g.err})
		}
	}
}

func count(all []bool) (n int) {
	for _, b := range all {
		if b {
			n++
		}
	}
	return n
}

// heard records a rank's pulse.
func (s *store) heard(m member, p *pulse) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p == nil {
		return
	}

	s.seats[m.Rank].pulse = *p
	now := time.Now()
	switch {
	case p.Busy != "":
		s.progress = now
	case p.Step >= 0 && p.Waited == 0 && s.progress.Before(now.Add(-p.Still)):
		s.progress = now.Add(-p.Still)
	}
}

// inspect checks all ranks for signs of life and progress, and sends a sign of life to each.
func (s *store) inspect(frozen bool) {
	s.mu.Lock()
	for r := range s.seats {
		if seat := &s.seats[r]; seat.present() {
			seat.wire.post(message{Kind: beat})
			if frozen {
				seat.wire.hear()
			}
		}
	}

	e := s.verdict()
	s.mu.Unlock()
	if e == nil {
		return
	}

	s.fail(e, true)
}

// verdict returns the failure of a frozen, hung or deadlocked rank, or nil. The caller holds the
// lock.
func (s *store) verdict() *RankError {
	var silent, still, waits *seat
	waiting := true
	for r := range s.seats {
		seat := &s.seats[r]
		if !seat.present() {
			waiting = waiting && seat.left
			continue
		}
		if silent == nil || seat.wire.silence() > silent.wire.silence() {
			silent = seat
		}
		if still == nil || seat.pulse.Still > still.pulse.Still {
			still = seat
		}
		if waits == nil || seat.pulse.Waited > waits.pulse.Waited {
			waits = seat
		}
		waiting = waiting && seat.pulse.Waited > standstill*s.deadline
	}

	switch {
	case s.failure != nil || silent == nil:
		return nil
	case silent.wire.silence() > s.deadline:
		doing := ""
		if silent.pulse.Busy != "" {
			doing = " while " + silent.pulse.Busy
		}
		return &RankError{member: silent.member, Reason: fmt.Sprintf(
			"hangs: no message for %v%s. %s", s.deadline, doing, s.steps())}
	// A rank without progress may be waiting on its GPU for another rank, without being able to report
	// it. It is blamed only if no rank makes progress.
	case still.pulse.Still > s.deadline && time.Since(s.progress) > s.deadline:
		return &RankError{member: still.member, Reason: fmt.Sprintf(
			"hangs: no progress for %v. %s", s.deadline, s.steps())}
	case waiting:
		return &RankError{member: waits.member, Reason: fmt.Sprintf(
			"hangs: all ranks have been waiting for each other for %v. %s",
			waits.pulse.Waited.Round(time.Millisecond), s.steps())}
	}

	return nil
}

// steps lists the last steps reported by the ranks. The caller holds the lock.
func (s *store) steps() string {
	var all []string
	for _, seat := range s.seats {
		all = append(all, strconv.FormatInt(seat.pulse.Step, 10))
	}
	return "Last steps reported, by rank: " + strings.Join(all, ", ")
}

func (s *store) expireJoining(after time.Duration) {
	missing := s.missing()
	if len(missing) == 0 {
		return
	}
	s.fail(&RankError{member: missing[0], Reason: fmt.Sprintf(
		"did not join within %v. Missing of %d: %v. Check their output, and whether they can reach %s at %v",
		after, s.place.Size, missing, s.place.MasterAddr, s.listener.Addrs())}, false)
}

// missing returns the ranks that have not joined.
func (s *store) missing() (missing []member) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.gathering[joinKey]
	for r, seat := range s.seats {
		if seat.wire == nil || g != nil && !g.given[r] {
			missing = append(missing, seat.member)
		}
	}
	return missing
}

// lost handles a connection that ended unexpectedly.
func (s *store) lost(m member) {
	s.fail(&RankError{member: m, Reason: "died: its connection ended unexpectedly"}, true)
}

// fail notifies all ranks of the first failure. Rank 0 is notified last, because its process may
// exit in response. If gone is true, the store does not wait for the failed rank to leave.
func (s *store) fail(e *RankError, gone bool) {
	s.mu.Lock()
	if gone {
		defer func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.depart(e.Rank)
		}()
	}

	if s.failure != nil || s.closed {
		s.mu.Unlock()
		return
	}

	s.failure = e
	s.joining.Stop()
	var sent []<-chan struct{}
	for r := len(s.seats) - 1; r > 0; r-- {
		if s.seats[r].present() {
			sent = append(sent, s.notify(&s.seats[r]))
		}
	}

	s.mu.Unlock()

	patience := time.After(farewell)
wait:
	for _, c := range sent {
		select {
		case <-c:
		case <-patience:
			break wait
		}
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	if s.seats[0].present() {
		s.notify(&s.seats[0])
	}
}

// notify sends the failure to a rank.
func (s *store) notify(to *seat) <-chan struct{} {
	return to.wire.post(message{Kind: failed, Member: s.failure.member, Text: s.failure.Reason})
}

// left handles the departure of a rank, which fails the gatherings that lack its value.
func (s *store) left(m member) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.depart(m.Rank)
	for key, g := range s.gathering {
		if !g.given[m.Rank] && g.err == "" {
			g.err = fmt.Sprintf("%v has left", m)
			s.refuse(key, g)
		}
	}
}

// depart marks a rank as gone. The caller holds the lock.
func (s *store) depart(rank int) {
	s.seats[rank].left = true
	if !slices.ContainsFunc(s.seats, func(seat seat) bool { return seat.present() }) {
		s.once.Do(func() { close(s.empty) })
	}
}

// close waits up to patience for the ranks to leave, then closes all connections.
func (s *store) close(patience time.Duration) error {
	s.mu.Lock()
	if !s.closed {
		close(s.done)
	}

	s.closed = true
	s.joining.Stop()
	s.mu.Unlock()

	select {
	case <-s.empty:
	case <-time.After(patience):
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, seat := range s.seats {
		if seat.wire != nil {
			_ = seat.wire.Close() // the peer may have closed it
		}
	}

	return errors.Join(append(errs, s.listener.Close())...)
}

func (s *store) member(rank int) member {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seats[rank].member
}
