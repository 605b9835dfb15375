package comm

import (
	"crypto/hmac"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// store runs at rank 0. It gathers values, and tells all ranks when one of them cannot go on.
type store struct {
	place    Place
	deadline time.Duration
	listener net.Listener

	mu        sync.Mutex
	seats     []seat // by rank
	gathering map[string]*gathering
	failure   *RankError
	closed    bool
	once      sync.Once
	empty     chan struct{} // closed when every rank that joined has left
	timer     *time.Timer   // ends the wait for ranks to join, then for their reports
}

// seat is what the store knows of a rank.
type seat struct {
	member
	wire *wire // nil before it joins
	left bool
	step int64     // of its last report, −1 before the first
	at   time.Time // when that came
}

type gathering struct {
	values [][]byte
	given  []bool
}

// openStore listens at the first free port of the place.
func openStore(p Place, joining, deadline time.Duration) (*store, error) {
	var listener net.Listener
	var failures []error
	for _, port := range p.ports() {
		l, err := net.Listen("tcp", net.JoinHostPort(listenHost(p.MasterAddr), strconv.Itoa(port)))
		if err == nil {
			listener = l
			break
		}
		failures = append(failures, err)
	}
	if listener == nil {
		return nil, fmt.Errorf("rank 0 found no free port; set MASTER_PORT to another: %w",
			errors.Join(failures...))
	}
	s := &store{place: p, deadline: deadline, listener: listener, seats: make([]seat, p.Size),
		gathering: map[string]*gathering{}, empty: make(chan struct{})}
	for r := range s.seats {
		s.seats[r].Rank, s.seats[r].step = r, -1
	}
	s.timer = time.AfterFunc(joining, func() { s.expireJoining(joining) })
	go s.accept()
	return s, nil
}

// listenHost keeps a run of one host from being reached from others. Elsewhere MasterAddr may be a
// name that only the others see, so that rank 0 listens everywhere.
func listenHost(master string) string {
	if ip := net.ParseIP(master); master == "localhost" || ip != nil && ip.IsLoopback() {
		return master
	}
	return ""
}

func (s *store) accept() {
	for {
		conn, err := s.listener.Accept()
		if err != nil {
			return // closed
		}
		go s.serve(&wire{Conn: conn})
	}
}

// serve lets a process join, and then does what it asks.
func (s *store) serve(w *wire) {
	defer w.Close()
	m, ok := s.admit(w)
	if !ok {
		return
	}
	for {
		asked, err := w.receive(maxMessage)
		if err != nil {
			s.lost(m)
			return
		}
		switch asked.Kind {
		case give:
			s.gather(m, asked)
		case report:
			s.reported(m, asked.Step)
		case fail:
			s.fail(&RankError{member: m, Reason: asked.Text})
		case leave:
			s.left(m)
			return
		}
	}
}

// handshakeTimeout is how long a stranger may hold a connection.
const handshakeTimeout = 20 * time.Second

// admit asks who comes, and gives it its seat.
func (s *store) admit(w *wire) (member, bool) {
	nonce := newNonce()
	if w.SetReadDeadline(time.Now().Add(handshakeTimeout)) != nil ||
		w.send(message{Kind: hello, Nonce: nonce}) != nil {
		return member{}, false
	}
	m, err := w.receive(maxGreeting)
	if err != nil || m.Kind != join {
		return member{}, false
	}
	k, why := s.judge(m, nonce)
	if k == welcome {
		// Under the lock, so that a failure is told to this rank too.
		s.mu.Lock()
		defer s.mu.Unlock()
		if seat := &s.seats[m.Member.Rank]; seat.wire != nil {
			k, why = invalid, fmt.Sprintf("%v has this rank already", seat.member)
		}
	}
	answer := message{Kind: k, Text: why, Proof: proof(s.place.secret(), m.Nonce, "store", m)}
	if w.send(answer) != nil || k != welcome || w.SetReadDeadline(time.Time{}) != nil {
		return member{}, false
	}
	s.seats[m.Member.Rank].member, s.seats[m.Member.Rank].wire = m.Member, w
	if s.failure != nil {
		s.tell(&s.seats[m.Member.Rank])
	}
	return m.Member, true
}

// judge says whether a process belongs to this run, and why not.
func (s *store) judge(m message, nonce []byte) (kind, string) {
	if m.Run != s.place.Run {
		return refused, fmt.Sprintf("this is run %q", s.place.Run)
	}
	if !hmac.Equal(m.Proof, proof(s.place.secret(), nonce, "rank", m)) {
		return refused, fmt.Sprintf("it has another %s", SecretVariable)
	}
	if m.Size != s.place.Size || m.Member.Rank < 0 || m.Member.Rank >= s.place.Size {
		return invalid, fmt.Sprintf("rank %d of %d came to a run of %d ranks",
			m.Member.Rank, m.Size,
			s.place.Size)
	}
	return welcome, ""
}

// gather takes a rank's part; the last one sends all parts to all ranks.
func (s *store) gather(m member, asked message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.gathering[asked.Key]
	if g == nil {
		g = &gathering{make([][]byte, s.place.Size), make([]bool, s.place.Size)}
		s.gathering[asked.Key] = g
	}
	g.values[m.Rank], g.given[m.Rank] = asked.Value, true
	if slices.Contains(g.given, false) {
		return
	}
	delete(s.gathering, asked.Key)
	if asked.Key == joinKey {
		s.timer.Stop() // everybody is here
	}
	for r := range s.seats {
		// A rank that does not take it is found lost by its own connection.
		_ = s.seats[r].wire.send(message{Kind: all, Key: asked.Key, Values: g.values})
	}
}

// reported notes a rank's step, and sets the timer to the rank that is silent for longest.
func (s *store) reported(m member, step int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seats[m.Rank].step, s.seats[m.Rank].at = step, time.Now()
	s.watchReports()
}

// watchReports waits for the next report that is due. The caller holds the lock.
func (s *store) watchReports() {
	if s.deadline <= 0 || s.failure != nil {
		return
	}
	s.timer.Stop()
	if r := s.silent(); r >= 0 {
		s.timer = time.AfterFunc(time.Until(s.seats[r].at.Add(s.deadline)), s.expireReport)
	}
}

// silent is the rank whose last report is the oldest, or −1.
func (s *store) silent() int {
	oldest := -1
	for r, seat := range s.seats {
		if seat.step >= 0 && !seat.left && (oldest < 0 || seat.at.Before(s.seats[oldest].at)) {
			oldest = r
		}
	}
	return oldest
}

func (s *store) expireReport() {
	s.mu.Lock()
	r := s.silent()
	if r < 0 || time.Since(s.seats[r].at) < s.deadline {
		s.watchReports() // a report came meanwhile
		s.mu.Unlock()
		return
	}
	var others []string
	for _, seat := range s.seats {
		others = append(others, strconv.FormatInt(seat.step, 10))
	}
	e := &RankError{member: s.seats[r].member, Reason: fmt.Sprintf(
		"hangs: no report for %v. Last steps reported, by rank: %s",
		s.deadline, strings.Join(others,
			", "))}
	s.mu.Unlock()
	s.fail(e)
	s.left(e.member) // nobody waits for it to hear of this
}

func (s *store) expireJoining(after time.Duration) {
	missing := s.missing()
	if len(missing) == 0 {
		return
	}
	s.fail(&RankError{member: missing[0], Reason: fmt.Sprintf(
		"did not join within %v. Missing of %d: %v. Look at their output, and whether they reach %s at %v",
		after, s.place.Size, missing, s.place.MasterAddr, s.listener.Addr())})
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

// lost is a connection that ended without a word.
func (s *store) lost(m member) {
	s.left(m)
	s.fail(&RankError{member: m, Reason: "died: its connection ended without a word"})
}

// fail tells all ranks of the first failure, and rank 0 last: its process may end once it knows.
func (s *store) fail(e *RankError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failure != nil || s.closed {
		return
	}
	s.failure = e
	s.timer.Stop()
	for r := len(s.seats) - 1; r >= 0; r-- {
		if s.seats[r].wire != nil && !s.seats[r].left {
			s.tell(&s.seats[r])
		}
	}
}

// tell tells one rank of the failure. A rank that does not take it is gone or will see the end of
// the connection.
func (s *store) tell(to *seat) {
	_ = to.wire.send(message{Kind: failed, Member: s.failure.member, Text: s.failure.Reason})
}

// left notes that nothing more comes from a rank.
func (s *store) left(m member) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seats[m.Rank].left = true
	s.watchReports()
	if !slices.ContainsFunc(s.seats, func(seat seat) bool {
		return seat.wire != nil && !seat.left
	}) {
		s.once.Do(func() { close(s.empty) })
	}
}

// close lets the ranks read what they were told, and ends every connection. Those that a rank has
// not left by then are cut.
func (s *store) close(patience time.Duration) error {
	s.mu.Lock()
	s.closed = true
	s.timer.Stop()
	s.mu.Unlock()
	select {
	case <-s.empty:
	case <-time.After(patience):
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, seat := range s.seats {
		if seat.wire != nil {
			_ = seat.wire.Close() // the other end may have closed it
		}
	}
	return s.listener.Close()
}

func (s *store) member(rank int) member {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seats[rank].member
}
