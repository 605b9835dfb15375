package comm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/kasmina-go/kasmina/comm/internal/channel"
)

// RankError reports which rank failed and why. Every rank gets the same error.
type RankError struct {
	member
	Reason string
}

func (e *RankError) Error() string { return fmt.Sprintf("%v %s", e.member, e.Reason) }

// ErrClosed reports the use of a closed [World].
var ErrClosed = errors.New("comm: closed")

// Options are settings of a run's processes.
type Options struct {
	// Timeout limits how long the ranks wait for each other when they join and when they close; 10
	// minutes if it is 0.
	Timeout time.Duration
	// Deadline is the time after which a silent rank, or a run without progress, fails; 0 means no
	// limit. Rank 0's value applies to all ranks. See [World.Report].
	Deadline time.Duration
	// Facts, such as the program's version, options and data, must be equal on all ranks, or no rank
	// may join.
	Facts []Fact
	// Waiting, unless nil, is called with a message for the user when a rank has waited more than a
	// few seconds for the rest to join, and periodically from then on.
	Waiting func(text string)
}

// Fact is something on which all ranks must agree.
type Fact struct{ Name, Value string }

// World is one process's view of all processes of a run. Its methods are safe for concurrent use.
type World struct {
	place    Place
	options  Options
	wire     *wire
	store    *store // at rank 0
	activity activity

	mu      sync.Mutex
	waiting map[string]chan message
	turns   map[string]int
	cause   error
	done    chan struct{} // closed when there is a cause
}

const joinKey = "join#0"

// Join connects to the other ranks and returns when all have joined. Rank 0 must be reachable at
// the place's address.
//
// All processes must share the same secret. Without it, a process can neither join nor read or modify
// the traffic between ranks.
//
// If ranks are missing or disagree on a fact, the error names them.
func Join(ctx context.Context, p Place, o Options) (*World, error) {
	if err := p.Check(); err != nil {
		return nil, fmt.Errorf("comm: %w", err)
	}

	if o.Timeout <= 0 {
		o.Timeout = 10 * time.Minute
	}

	w := &World{place: p, options: o, waiting: map[string]chan message{}, turns: map[string]int{},
		done: make(chan struct{})}
	if p.Size == 1 {
		return w, nil
	}

	if err := w.meet(ctx); err != nil {
		w.end(err)
		w.abandon()
		return nil, fmt.Errorf("comm: rank %d of %d: %w", p.Rank, p.Size, err)
	}

	return w, nil
}

// meet connects to the store and waits for the other ranks.
func (w *World) meet(ctx context.Context) (err error) {
	p := w.place
	id, err := channel.New(string(p.Secret))
	if err != nil {
		return err
	}

	targets := p.targets()
	if p.Rank == 0 {
		w.store, err = openStore(ctx, p, id, w.options.Timeout, w.options.Deadline)
		if err != nil {
			return err
		}
		targets = nil
		for _, a := range w.store.listener.Addrs() {
			targets = append(targets, a.String())
		}
	}

	// The store reports missing ranks after the timeout, so allow it more time than that.
	joining, cancel := context.WithTimeout(ctx, w.options.Timeout+writeTimeout)
	defer cancel()
	c := &caller{place: p, id: id, targets: targets}
	defer w.reportWaiting(c)()
	if w.wire, w.options.Deadline, err = c.connect(joining, w.options.Timeout); err != nil {
		return err
	}
	return w.enter(joining)
}

// enter starts to handle the store's messages and waits for the other ranks.
func (w *World) enter(ctx context.Context) error {
	go w.listen()
	if w.options.Deadline > 0 {
		go watchdog(w.options.Deadline, w.done, w.beat)
	}

	facts, err := json.Marshal(w.options.Facts)
	if err != nil {
		return err
	}

	values, err := w.Gather(ctx, "join", facts)
	if err == nil {
		err = w.compare(values)
	}

	return err
}

// compare returns an error if a rank's facts differ from rank 0's.
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
				return fmt.Errorf("ranks 0 and %d compare different facts, %v and %v: start "+
					"the same program everywhere", r, zero, facts)
			case facts[i].Value != zero[i].Value:
				return fmt.Errorf("%s differs: %q at rank 0, %q at rank %d", facts[i].Name,
					zero[i].Value, facts[i].Value, r)
			}
		}
	}

	return nil
}

// Rank returns the rank of this process.
func (w *World) Rank() int { return w.Place().Rank }

// Size returns the number of ranks.
func (w *World) Size() int { return w.Place().Size }

// Deadline returns the time after which a silent rank fails the run, or 0 without a limit.
func (w *World) Deadline() time.Duration {
	return w.options.Deadline
}

// Place returns this process's place.
func (w *World) Place() Place {
	return w.place
}

// Done returns a channel that is closed when a rank fails, including this one, or the World is
// closed.
func (w *World) Done() <-chan struct{} {
	return w.done
}

// Err returns nil while the run is healthy. It returns a *[RankError] if another rank failed, the
// error passed to Fail if this rank failed, and [ErrClosed] after Close.
func (w *World) Err() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.cause
}

// Gather sends a value to all ranks and returns the values of all ranks, indexed by rank. Every rank
// must call it with the same key. A key may be reused. Gather is meant for small values such as
// addresses.
//
// If the values exceed [MaxGather] bytes in total, or a rank has left the run, Gather returns an
// error on every rank. The World remains usable.
func (w *World) Gather(ctx context.Context, key string, value []byte) ([][]byte, error) {
	switch {
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
	answer := make(chan message, 1)
	w.waiting[turn] = answer
	w.mu.Unlock()
	defer w.activity.wait()()

	given := message{Kind: give, Key: turn, Values: [][]byte{value}}
	if len(value) > MaxGather { // the store reports the error to all ranks
		given.Values, given.Bytes = nil, int64(len(value))
	}

	w.wire.post(given)
	select {
	case m := <-answer:
		return gathered(key, m)
	case <-w.done:
		select {
		case m := <-answer: // received before the failure
			return gathered(key, m)
		default:
			return nil, w.Err()
		}
	case <-ctx.Done():
		return nil, fmt.Errorf("gathering %q: %w", key, context.Cause(ctx))
	}
}

// gathered returns the values or the error in the store's answer.
func gathered(key string, m message) ([][]byte, error) {
	if m.Text != "" {
		return nil, fmt.Errorf("comm: gathering %q: %s", key, m.Text)
	}
	return m.Values, nil
}

// Barrier returns when every rank has called it with the same key.
func (w *World) Barrier(ctx context.Context, key string) error {
	_, err := w.Gather(ctx, "barrier "+key, nil)
	return err
}

// Report records that this rank has reached a step, starting from 0.
//
// After the first report, the run must keep making progress. If no rank calls Report or is busy (see
// [World.Busy]) within the deadline, the run fails with a *[RankError] on every rank. The error names
// the rank that has gone longest without progress, not counting ranks that wait for others (see
// [World.Wait]).
//
// A process that is suspended for longer than the deadline also fails the run, whether or not it has
// called Report.
func (w *World) Report(step int) error {
	if err := w.Err(); err != nil || w.place.Size == 1 {
		return err
	}
	w.activity.progress(int64(step))
	w.sendPulse()
	return nil
}

// Busy declares work that may take longer than the deadline, such as "writing a checkpoint". The
// work ends when the returned function is called.
//
// Until then, no rank is required to make progress, because the other ranks may be waiting for this
// one. A suspended process is still detected.
func (w *World) Busy(what string) (done func()) {
	if w.place.Size == 1 {
		return func() {}
	}
	end := w.activity.begin(what)
	w.sendPulse()
	return func() {
		end()
		w.sendPulse()
	}
}

// Wait calls f, which must do nothing but wait for other ranks. A waiting rank is not blamed for lack
// of progress. Gather and Barrier are covered automatically.
func (w *World) Wait(f func() error) error {
	defer w.activity.wait()()
	return f()
}

// sendPulse sends this rank's pulse to the store if there is a deadline.
func (w *World) sendPulse() {
	if w.options.Deadline > 0 && w.wire != nil {
		w.wire.post(message{Kind: beat, Pulse: w.activity.pulse()})
	}
}

// beat sends this rank's pulse and checks that rank 0 is alive.
func (w *World) beat(frozen bool) {
	if frozen {
		w.wire.hear()
		w.activity.excuse()
	}
	if d := w.options.Deadline; w.place.Rank > 0 && w.wire.silence() > d {
		w.end(&RankError{Reason: fmt.Sprintf("hangs: no message for %v", d)})
		w.wire.Close()
		return
	}
	w.sendPulse()
}

// Fail reports the failure of this rank to the other ranks, which receive a *[RankError] with the
// text of the cause. Fail returns once the store has been notified.
func (w *World) Fail(cause error) {
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
		w.store.fail(&RankError{member: w.store.member(0), Reason: "failed: " + cause.Error()},
			false)
		return
	}

	if w.wire != nil {
		// If this fails, the store notices that the connection has ended.
		w.wire.post(message{Kind: fail, Text: "failed: " + cause.Error()})
		w.wire.flush(farewell)
	}
}

// Close waits until all ranks have called it, up to the timeout, and disconnects. After a failure, it
// does not wait.
func (w *World) Close() error {
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
			w.wire.post(message{Kind: leave})
			w.wire.flush(farewell)
		}
	}

	return errors.Join(err, w.abandon())
}

// farewell limits the wait for other ranks to receive the reason for a failure. Tests change it.
var farewell = 3 * time.Second

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

// listen handles messages from the store until the connection ends.
func (w *World) listen() {
	for {
		m, err := w.wire.receive(maxHead, MaxGather)
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
				answer <- m
			}
		case failed:
			w.end(&RankError{member: m.Member, Reason: m.Text})
			w.wire.Close()
			return
		}
	}
}

// lose terminates the run after the connection to rank 0 failed.
func (w *World) lose(err error) error {
	reason := "died: the connection to it ended"
	if !errors.Is(err, io.EOF) {
		reason += ": " + err.Error()
	}
	return w.end(&RankError{Reason: reason})
}

// end sets the cause unless one is already set, and returns it.
func (w *World) end(cause error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cause == nil {
		w.cause = cause
		close(w.done)
	}
	return w.cause
}

// ExitPeer is the exit code of a process that exited because another rank failed. Package launch uses
// it to find the process that failed first.
const ExitPeer = 75

// ExitCode returns the exit code for a program's error: 0 for nil, ExitPeer if another rank failed,
// and 1 otherwise.
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
