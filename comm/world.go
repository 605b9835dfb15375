package comm

import (
	"context"
	"crypto/hmac"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"time"
)

// RankError says that a rank cannot go on, and why. Every rank gets the same one.
type RankError struct {
	member
	Reason string
}

func (e *RankError) Error() string { return fmt.Sprintf("%v %s", e.member, e.Reason) }

// ErrClosed is the error of a [World] that was closed.
var ErrClosed = errors.New("comm: closed")

// Options are settings of a run's processes.
type Options struct {
	// Timeout is how long the ranks wait for each other when they join and when they close; 10
	// minutes where it is 0.
	Timeout time.Duration
	// Deadline is how long a rank may be silent after it has reported a step; where it is 0, for
	// ever. Rank 0's counts.
	Deadline time.Duration
	// Facts must be the same at all ranks, or none may join: the program's version, options, data.
	Facts []Fact
}

// Fact is something on which all ranks must agree.
type Fact struct{ Name, Value string }

// World is the processes of a run, seen from one of them. All methods may be called from any
// goroutine.
type World struct {
	place   Place
	options Options
	wire    *wire
	store   *store // at rank 0

	mu      sync.Mutex
	waiting map[string]chan [][]byte
	turns   map[string]int
	cause   error
	done    chan struct{} // closed when there is a cause
}

const joinKey = "join#0"

// errZero is the error of a World that nobody has made.
var errZero = errors.New("comm: the World is nil or its zero value, want one that Join returns")

// over is closed: nobody waits for a World that nobody has made.
var over = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// made reports whether the World is one of Join's.
func (w *World) made() bool { return w != nil && w.done != nil }

// Join meets the other ranks and returns when all are there. Rank 0 must be reachable at the
// place's address. The error says which ranks are missing, or in which fact a rank differs.
func Join(ctx context.Context, p Place, o Options) (*World, error) {
	if ctx == nil {
		return nil, errors.New("comm: Join: the context is nil, want one such as " +
			"context.Background()")
	}
	if err := p.Check(); err != nil {
		return nil, fmt.Errorf("comm: %w", err)
	}
	if o.Timeout <= 0 {
		o.Timeout = 10 * time.Minute
	}
	w := &World{place: p, options: o, waiting: map[string]chan [][]byte{}, turns: map[string]int{},
		done: make(chan struct{})}
	if p.Size == 1 {
		return w, nil
	}
	if err := w.meet(ctx); err != nil {
		w.abandon()
		return nil, fmt.Errorf("comm: rank %d of %d: %w", p.Rank, p.Size, err)
	}
	return w, nil
}

// meet connects to the store and waits for the others.
func (w *World) meet(ctx context.Context) (err error) {
	p := w.place
	if p.Rank == 0 {
		if w.store, err = openStore(p, w.options.Timeout, w.options.Deadline); err != nil {
			return err
		}
	}
	// The store says who is missing, so it is given time to.
	joining, cancel := context.WithTimeout(ctx, w.options.Timeout+writeTimeout)
	defer cancel()
	if w.wire, err = connect(joining, p, w.options.Timeout); err != nil {
		return err
	}
	go w.listen()
	facts, err := json.Marshal(w.options.Facts)
	if err != nil {
		return err
	}
	values, err := w.Gather(joining, "join", facts)
	if err == nil {
		err = w.compare(values)
	}
	return err
}

// compare says which rank differs from rank 0 in what.
func (w *World) compare(values [][]byte) error {
	all := make([][]Fact, len(values))
	for r, value := range values {
		if err := json.Unmarshal(value, &all[r]); err != nil {
			return fmt.Errorf("facts of rank %d: %w", r, err)
		}
	}
	zero := all[0]
	for r, facts := range all {
		for i := range max(len(facts), len(zero)) {
			switch {
			case i >= len(facts) || i >= len(zero) || facts[i].Name != zero[i].Name:
				return fmt.Errorf("ranks 0 and %d agree on different things, %v and %v: start "+
					"the same program everywhere", r, zero, facts)
			case facts[i].Value != zero[i].Value:
				return fmt.Errorf("%s differs: %q at rank 0, %q at rank %d", facts[i].Name,
					zero[i].Value, facts[i].Value, r)
			}
		}
	}
	return nil
}

// connect tries the ports of rank 0 until one of them answers for this run.
func connect(ctx context.Context, p Place, timeout time.Duration) (*wire, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	refusals := make([]error, PortWindow)
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		for i, port := range p.ports() {
			w, final, err := greet(ctx, p, port)
			if err == nil || final {
				return w, err
			}
			if ctx.Err() == nil {
				refusals[i] = err
			}
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("rank 0 was not found at %s, ports %d to %d, within %v: is it "+
				"running, and is MASTER_ADDR its host? %w", p.MasterAddr, p.ports()[0],
				p.ports()[PortWindow-1], timeout,
				errors.Join(append(refusals, context.Cause(ctx))...))
		case <-time.After(pause):
		}
	}
}

// greet joins at one port. An error is final where it is this run's rank 0 that refuses.
func greet(ctx context.Context, p Place, port int) (w *wire, final bool, err error) {
	dialer := net.Dialer{KeepAliveConfig: keepAlive, Timeout: handshakeTimeout}
	conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(p.MasterAddr, strconv.Itoa(port)))
	if err != nil {
		return nil, false, err
	}
	w = &wire{Conn: conn}
	defer func() {
		if err != nil {
			w.Close()
			w, err = nil, fmt.Errorf("port %d: %w", port, err)
		}
	}()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	if err := w.SetReadDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return w, false, err
	}
	asked, err := w.receive(maxGreeting)
	if err != nil {
		return w, false, err
	}
	host, _ := os.Hostname() // only a name for people
	m := message{Kind: join, Member: member{p.Rank, host, os.Getpid()}, Size: p.Size, Run: p.Run,
		Nonce: newNonce()}
	m.Proof = proof(p.secret(), asked.Nonce, "rank", m)
	if err := w.send(m); err != nil {
		return w, false, err
	}
	answer, err := w.receive(maxGreeting)
	if err != nil {
		return w, false, err
	}
	known := hmac.Equal(answer.Proof, proof(p.secret(), m.Nonce, "store", m))
	switch {
	case answer.Kind == refused || !known:
		return w, false, fmt.Errorf("refused: %s", answer.Text)
	case answer.Kind != welcome:
		return w, true, fmt.Errorf("refused: %s", answer.Text)
	}
	return w, false, w.SetReadDeadline(time.Time{})
}

// Rank is this process's, from 0.
func (w *World) Rank() int { return w.Place().Rank }

// Size is the number of ranks.
func (w *World) Size() int { return w.Place().Size }

// Deadline is how long a rank may be silent, 0 for ever.
func (w *World) Deadline() time.Duration {
	if !w.made() {
		return 0
	}
	return w.options.Deadline
}

// Place is where this process stands.
func (w *World) Place() Place {
	if !w.made() {
		return Place{}
	}
	return w.place
}

// Done is closed when a rank cannot go on, this one included.
func (w *World) Done() <-chan struct{} {
	if !w.made() {
		return over
	}
	return w.done
}

// Err says why the run cannot go on; nil while it can. It is a *[RankError] for another rank, the
// error given to Fail for this one, [ErrClosed] after Close.
func (w *World) Err() error {
	if !w.made() {
		return errZero
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.cause
}

// Gather hands a value to all ranks and returns those of all, by rank. Every rank must call it with
// the same key; a key may be used again. It is for small things, such as NCCL's id and addresses.
func (w *World) Gather(ctx context.Context, key string, value []byte) ([][]byte, error) {
	switch {
	case !w.made():
		return nil, errZero
	case ctx == nil:
		return nil, errors.New("comm: Gather: the context is nil")
	case w.place.Size == 1:
		return [][]byte{value}, w.Err()
	}
	w.mu.Lock()
	if w.cause != nil {
		defer w.mu.Unlock()
		return nil, w.cause
	}
	turn := fmt.Sprintf("%s#%d", key, w.turns[key])
	w.turns[key]++
	answer := make(chan [][]byte, 1)
	w.waiting[turn] = answer
	w.mu.Unlock()
	if err := w.send(message{Kind: give, Key: turn, Value: value}); err != nil {
		return nil, err
	}
	select {
	case values := <-answer:
		return values, nil
	case <-w.done:
		select {
		case values := <-answer: // it came before the failure
			return values, nil
		default:
			return nil, w.Err()
		}
	case <-ctx.Done():
		return nil, fmt.Errorf("gathering %q: %w", key, context.Cause(ctx))
	}
}

// Barrier returns when every rank has called it with the same key.
func (w *World) Barrier(ctx context.Context, key string) error {
	_, err := w.Gather(ctx, "barrier "+key, nil)
	return err
}

// Report says that this rank has come to a step, from 0. From the first report on it must report
// again within the deadline, or all ranks fail with a *[RankError] that names it.
func (w *World) Report(step int) error {
	if err := w.Err(); err != nil || w.place.Size == 1 {
		return err
	}
	return w.send(message{Kind: report, Step: int64(step)})
}

// send says something to the store. Where the connection is broken, why is what was last heard on
// it: perhaps that another rank failed.
func (w *World) send(m message) error {
	err := w.wire.send(m)
	var broken *net.OpError
	if !errors.As(err, &broken) {
		return err
	}
	if broken.Timeout() {
		w.wire.Close()
	}
	<-w.done
	return w.Err()
}

// Fail tells the other ranks that this one cannot go on. They end with a *[RankError] that has the
// text of the cause; this one keeps the cause itself. It waits until the store knows it.
func (w *World) Fail(cause error) {
	if !w.made() {
		return
	}
	if cause == nil {
		cause = errors.New("comm: no cause was given")
	}
	w.mu.Lock()
	if w.cause != nil {
		w.mu.Unlock()
		return
	}
	w.cause = cause
	close(w.done)
	w.mu.Unlock()
	if w.store != nil {
		w.store.fail(&RankError{member: w.store.member(0), Reason: "failed: " + cause.Error()})
		return
	}
	if w.wire != nil {
		// Where it cannot be said, the end of the connection says it.
		_ = w.wire.send(message{Kind: fail, Text: "failed: " + cause.Error()})
	}
}

// Close waits until all ranks have called it, within the timeout, and leaves. After a failure it
// waits for nobody.
func (w *World) Close() error {
	if !w.made() {
		return nil
	}
	if w.place.Size == 1 {
		w.end(ErrClosed)
		return nil
	}
	var err error
	if w.Err() == nil {
		ctx, cancel := context.WithTimeout(context.Background(), w.options.Timeout)
		defer cancel()
		if err = w.Barrier(ctx, "close"); err == nil {
			w.end(ErrClosed)
			err = w.wire.send(message{Kind: leave})
		}
	}
	return errors.Join(err, w.abandon())
}

// farewell is how long rank 0 waits for the others to hear why the run ends.
const farewell = 3 * time.Second

// abandon closes connections.
func (w *World) abandon() error {
	var err error
	if w.wire != nil {
		err = w.wire.Close()
	}
	if w.store != nil {
		err = errors.Join(err, w.store.close(farewell))
	}
	return err
}

// listen takes what the store says until the connection ends.
func (w *World) listen() {
	for {
		m, err := w.wire.receive(maxMessage)
		if err != nil {
			w.lose(err)
			return
		}
		switch m.Kind {
		case all:
			w.mu.Lock()
			answer := w.waiting[m.Key]
			delete(w.waiting, m.Key)
			w.mu.Unlock()
			if answer != nil {
				answer <- m.Values
			}
		case failed:
			w.end(&RankError{member: m.Member, Reason: m.Text})
			w.wire.Close()
			return
		}
	}
}

// lose ends the run because of the connection to rank 0.
func (w *World) lose(err error) error {
	reason := "died: the connection to it ended"
	if !errors.Is(err, io.EOF) {
		reason += ": " + err.Error()
	}
	return w.end(&RankError{Reason: reason})
}

// end sets the cause, unless there is one, and returns the one that counts.
func (w *World) end(cause error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cause == nil {
		w.cause = cause
		close(w.done)
	}
	return w.cause
}

// ExitPeer is the exit code of a process that ends because another rank failed. Package launch
// looks for the one that is to blame among the others.
const ExitPeer = 75

// ExitCode is the exit code for a program's error: 0 for nil, ExitPeer where another rank failed, 1
// otherwise.
func ExitCode(err error) int {
	var peer *RankError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &peer), errors.Is(err, ErrPeer):
		return ExitPeer
	}
	return 1
}
