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

// A store runs at rank 0. It gathers values, and tells all ranks when one of them cannot go on.
type store struct {
	place    Place
	deadline time.Duration
	most     int64 // bytes of a gathering
	listener *channel.Listener
	port     int

	mu        sync.Mutex
	seats     []seat // by rank
	gathering map[string]*gathering
	failure   *RankError
	closed    bool
	joining   *time.Timer   // ends the wait for ranks to join
	progress  time.Time     // when a rank was last known to make some, or to be busy
	once      sync.Once     // closes empty
	empty     chan struct{} // closed when every rank that joined has left
	done      chan struct{} // closed with the store
}

// A seat is what the store knows of a rank.
type seat struct {
	member
	wire  *wire // nil before it joins
	left  bool
	pulse pulse // the last that came
}

// present reports whether the rank has joined and not left.
func (s *seat) present() bool { return s.wire != nil && !s.left }

// A gathering is the values that ranks have given under a key.
type gathering struct {
	values [][]byte
	given  []bool
	bytes  int64
	err    string // why there will be no answer
}

// openStore listens at the first free port of the place, and gives the ranks so long to join.
func openStore(ctx context.Context, p Place, id *channel.Identity,
	joining, deadline time.Duration) (*store, error) {
	listener, err := p.listen(ctx, id)
	if err != nil {
		return nil, err
	}

	s := &store{place: p, deadline: deadline, most: MaxGather, listener: listener,
		port: portOf(listener.Addrs()[0]), seats: make([]seat, p.Size),
		gathering: map[string]*gathering{}, empty: make(chan struct{}),
		done: make(chan struct{})}
	for r := range s.seats {
		s.seats[r].Rank, s.seats[r].pulse.Step = r, -1
	}
	s.joining = time.AfterFunc(joining, func() { s.expireJoining(joining) })
	go s.accept()
	if deadline > 0 {
		go watchdog(deadline, s.done, s.inspect)
	}
	return s, nil
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

// serve lets a process join, and then does what it asks.
func (s *store) serve(conn net.Conn) {
	w := newWire(conn)
	defer w.Close()
	m, ok := s.admit(w)
	if !ok {
		w.flush(time.Second) // it is to read why
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

// admit asks a process who it is, and gives it its seat. The process knows the secret already.
func (s *store) admit(w *wire) (member, bool) {
	if w.conn.SetReadDeadline(time.Now().Add(channel.HandshakeTimeout)) != nil {
		return member{}, false
	}
	m, err := w.receive(maxGreeting, 0)
	if err != nil || m.Kind != join {
		return member{}, false
	}
	k, why := s.judge(m)

	// Under the lock, so that a failure is told to this rank too.
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
		s.tell(&s.seats[m.Member.Rank])
	}
	return m.Member, true
}

// judge decides whether a process belongs to this run, and says why not.
func (s *store) judge(m message) (kind, string) {
	switch {
	case m.Run != s.place.Run:
		return refused, fmt.Sprintf("this is run %q, not %q", s.place.Run, m.Run)
	case m.Port != s.port:
		// Whoever passes connections on could cut them at any time.
		return refused, fmt.Sprintf("another program listens there and passes connections on to rank 0 "+
			"at port %d", s.port)
	case m.Size != s.place.Size || m.Member.Rank < 0 || m.Member.Rank >= s.place.Size:
		return invalid, fmt.Sprintf("rank %d of %d came to a run of %d ranks", m.Member.Rank,
			m.Size, s.place.Size)
	}
	return welcome, ""
}

// gather takes a rank's part. The last one sends all parts to all ranks. If there can be no answer,
// every rank that has given its part, or ever does, is told why at once.
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
	if g.bytes > s.most && !refused {
		g.err = fmt.Sprintf("the values of %d ranks have %d bytes together, want at most %d",
			count(g.given), g.bytes, s.most)
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
			// A rank that does not take it is found lost by its own connection.
			s.seats[r].wire.post(message{Kind: all, Key: asked.Key, Values: g.values})
		}
	}
	if slices.Contains(g.given, false) {
		return
	}
	delete(s.gathering, asked.Key)
	if asked.Key == joinKey {
		// Everybody is here, and nobody else has any business at the port.
		s.joining.Stop()
		s.listener.Close()
	}
}

// refuse tells all ranks that have given their parts that there will be no answer. The caller holds
// the lock.
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

// heard notes a rank's pulse.
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

// inspect looks for a rank that is gone, hangs or waits in vain, and says that rank 0 is alive.
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
	s.fail(e, true) // nobody waits for it to hear of this
}

// verdict returns the failure of the rank that does not go on, if there is one. The caller holds
// the lock.
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
			doing = " while it was " + silent.pulse.Busy
		}
		return &RankError{member: silent.member, Reason: fmt.Sprintf(
			"hangs: nothing came from it for %v%s. %s", s.deadline, doing, s.steps())}
	// A rank that stands still may be waiting for another, which makes progress, without saying so:
	// that is how work on a GPU waits.
	case still.pulse.Still > s.deadline && time.Since(s.progress) > s.deadline:
		return &RankError{member: still.member, Reason: fmt.Sprintf(
			"hangs: no report for %v. %s", s.deadline, s.steps())}
	case waiting:
		return &RankError{member: waits.member, Reason: fmt.Sprintf(
			"hangs: it has waited for the other ranks for %v, and they all wait too. %s",
			waits.pulse.Waited.Round(time.Millisecond), s.steps())}
	}
	return nil
}

// steps lists the steps that the ranks have reported. The caller holds the lock.
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
		"did not join within %v. Missing of %d: %v. Look at their output, and whether they reach %s at %v",
		after, s.place.Size, missing, s.place.MasterAddr, s.listener.Addrs())}, false)
}

// missing lists the ranks that have not joined.
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

// lost handles a connection that ended without a word.
func (s *store) lost(m member) {
	s.fail(&RankError{member: m, Reason: "died: its connection ended without a word"}, true)
}

// fail tells all ranks of the first failure, and rank 0 last: its process may end once it knows.
// Nobody waits any more for the rank that has failed if it is gone.
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
			sent = append(sent, s.tell(&s.seats[r]))
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
		s.tell(&s.seats[0])
	}
}

// tell tells one rank of the failure. A rank that does not take it is gone or will see the end of
// the connection.
func (s *store) tell(to *seat) <-chan struct{} {
	return to.wire.post(message{Kind: failed, Member: s.failure.member, Text: s.failure.Reason})
}

// left notes that a rank is done. It takes part in no gathering any more.
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

// depart notes that nothing more comes from a rank. The caller holds the lock.
func (s *store) depart(rank int) {
	s.seats[rank].left = true
	if !slices.ContainsFunc(s.seats, func(seat seat) bool { return seat.present() }) {
		s.once.Do(func() { close(s.empty) })
	}
}

// close lets the ranks read what they were told, and ends every connection. Those that a rank has
// not left by then are cut.
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
			_ = seat.wire.Close() // the other end may have closed it
		}
	}
	return errors.Join(append(errs, s.listener.Close())...)
}

func (s *store) member(rank int) member {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seats[rank].member
}
