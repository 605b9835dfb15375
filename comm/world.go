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
	// minutes if it is 0.
	Timeout time.Duration
	// Deadline is how long a rank may be silent, or the run make no progress, before the run ends;
	// 0 stands for ever. Rank 0's applies to all. See [World.Report].
	Deadline time.Duration
	// Facts must be the same at all ranks, or none may join: the program's version, options, data.
	Facts []Fact
}

// Fact is something on which all ranks must agree.
type Fact struct{ Name, Value string }

// World is the processes of a run, seen from one of them. All methods may be called from any
// goroutine.
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

// errZero is the error of a World that Join did not return.
var errZero = errors.New("comm: the World is nil or its zero value, want one that Join returns")

// over is closed: nobody waits for a World that Join did not return.
var over = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// made reports whether Join has returned the World.
func (w *World) made() bool { return w != nil && w.done != nil }

// Join meets the other ranks and returns when all are there. Rank 0 must be reachable at the
// place's address. All processes of the run must have the same secret: whoever does not know it
// cannot join, read what the ranks say or change it. The error says which ranks are missing, or in
// which fact a rank differs.
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

// meet connects to the store and waits for the others.
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

	// The store says who is missing, so it is given time to.
	joining, cancel := context.WithTimeout(ctx, w.options.Timeout+writeTimeout)
	defer cancel()
	c := caller{place: p, id: id, targets: targets}
	if w.wire, w.options.Deadline, err = c.connect(joining, w.options.Timeout); err != nil {
		return err
	}
	go w.listen()
	if w.options.Deadline > 0 {
		go watchdog(w.options.Deadline, w.done, w.beat)
	}

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

// compare returns an error that says which rank differs from rank 0 in what.
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
//
// All values together may have [MaxGather] bytes. Where they have more, or a rank has left, every
// rank's call returns an error at once, and the run may go on.
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
	answer := make(chan message, 1)
	w.waiting[turn] = answer
	w.mu.Unlock()
	defer w.activity.wait()()

	given := message{Kind: give, Key: turn, Values: [][]byte{value}}
	if len(value) > MaxGather { // the store says so to all ranks
		given.Values, given.Bytes = nil, int64(len(value))
	}
	w.wire.post(given)
	select {
	case m := <-answer:
		return gathered(key, m)
	case <-w.done:
		select {
		case m := <-answer: // it came before the failure
			return gathered(key, m)
		default:
			return nil, w.Err()
		}
	case <-ctx.Done():
		return nil, fmt.Errorf("gathering %q: %w", key, context.Cause(ctx))
	}
}

// gathered returns what the store has answered.
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

// Report says that this rank has come to a step, from 0, and so makes progress. From the first
// report on, the run must make progress: if no rank reports or is busy ([World.Busy]) for as long as
// the deadline, all ranks fail with a *[RankError]. It names the rank that has stood still for the
// longest time without waiting for others ([World.Wait]).
//
// With or without reports, a rank whose process does not run for as long as the deadline, because
// it or its host is stopped, ends the run in the same way.
func (w *World) Report(step int) error {
	if err := w.Err(); err != nil || w.place.Size == 1 {
		return err
	}
	w.activity.progress(int64(step))
	w.tell()
	return nil
}

// Busy says that this rank is busy with something that may take longer than the deadline, such as
// "writing a checkpoint", until the function that it returns is called. Meanwhile no rank has to
// report, since any may be waiting for this one; a process that stops is found all the same.
func (w *World) Busy(what string) (done func()) {
	if !w.made() || w.place.Size == 1 {
		return func() {}
	}
	end := w.activity.begin(what)
	w.tell()
	return func() {
		end()
		w.tell()
	}
}

// Wait calls f, which waits for other ranks: this rank is not the one to blame for the time that it
// takes. Gather and Barrier do so by themselves.
func (w *World) Wait(f func() error) error {
	if f == nil {
		return errors.New("comm: Wait: the function is nil")
	}
	if w.made() {
		defer w.activity.wait()()
	}
	return f()
}

// tell sends this rank's pulse to the store, if anybody there wants to know.
func (w *World) tell() {
	if w.options.Deadline > 0 && w.wire != nil {
		w.wire.post(message{Kind: beat, Pulse: w.activity.pulse()})
	}
}

// beat sends this rank's pulse, and looks whether rank 0 is alive.
func (w *World) beat(frozen bool) {
	if frozen {
		w.wire.hear()
		w.activity.excuse()
	}
	if d := w.options.Deadline; w.place.Rank > 0 && w.wire.silence() > d {
		w.end(&RankError{Reason: fmt.Sprintf("hangs: nothing came from it for %v", d)})
		w.wire.Close()
		return
	}
	w.tell()
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
		w.store.fail(&RankError{member: w.store.member(0), Reason: "failed: " + cause.Error()},
			false)
		return
	}
	if w.wire != nil {
		// If it cannot be said, the end of the connection says it.
		w.wire.post(message{Kind: fail, Text: "failed: " + cause.Error()})
		w.wire.flush(farewell)
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
			w.wire.post(message{Kind: leave})
			w.wire.flush(farewell)
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
