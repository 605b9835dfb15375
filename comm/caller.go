package comm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kasmina-go/kasmina/comm/internal/channel"
)

// A caller finds rank 0 and joins the run.
type caller struct {
	place   Place
	id      *channel.Identity
	targets []string // host:port addresses to try

	joining sync.Mutex // held while this process identifies itself to a store
	joined  bool       // guarded by joining

	mu     sync.Mutex
	failed []error // why the latest attempt at each target failed, or nil
}

// connect tries all targets, again and again, until rank 0 of this run accepts the connection. It also
// returns rank 0's deadline. Each target is retried independently, so an unresponsive target delays
// nothing, even if rank 0 only starts to listen after the first attempts.
func (c *caller) connect(ctx context.Context, timeout time.Duration) (*wire, time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	type result struct {
		wire     *wire
		deadline time.Duration
		err      error
	}
	results := make(chan result, len(c.targets))
	var attempts sync.WaitGroup
	for i, target := range c.targets {
		attempts.Go(func() {
			for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
				w, deadline, err := c.attempt(ctx, target)
				switch {
				case err == nil || isFinal(err):
					results <- result{w, deadline, err}
					return
				case ctx.Err() != nil:
					return
				}
				c.setRefusal(i, fmt.Errorf("%s: %w", target, err))

				select {
				case <-ctx.Done():
					return
				case <-time.After(pause):
				}
			}
		})
	}

	select {
	case r := <-results:
		c.clearRefusals()
		return r.wire, r.deadline, r.err
	case <-ctx.Done():
	}

	// An attempt may have succeeded at the same moment.
	attempts.Wait()
	select {
	case r := <-results:
		c.clearRefusals()
		return r.wire, r.deadline, r.err
	default:
		ports := c.place.ports()
		return nil, 0, fmt.Errorf("rank 0 was not found at %s, ports %d to %d, within %v: is it "+
			"running, and is MASTER_ADDR its host? It answers only until all ranks have joined. %w",
			c.place.MasterAddr, ports[0], ports[PortWindow-1], timeout,
			errors.Join(append(informative(c.refusals()), context.Cause(ctx))...))
	}
}

// informative drops refused connections from failures, unless every connection was rejected. Most
// ports of the window are expected to be closed.
func informative(failures []error) []error {
	rest := slices.DeleteFunc(slices.Clone(failures), func(err error) bool {
		return errors.Is(err, syscall.ECONNREFUSED)
	})
	if len(rest) == 0 && len(failures) > 0 {
		return failures[:1]
	}
	return rest
}

// A finalError is a rejection by this run's rank 0, after which trying other addresses would be
// pointless.
type finalError struct{ error }

func isFinal(err error) bool {
	var final finalError
	return errors.As(err, &final)
}

// attempt dials a target and tries to join the run there. Rank 0 may listen at several targets, but each
// process joins through a single one.
func (c *caller) attempt(ctx context.Context, target string) (*wire, time.Duration, error) {
	conn, err := c.id.Dial(ctx, target)
	if err != nil {
		return nil, 0, err
	}

	c.joining.Lock()
	defer c.joining.Unlock()
	if c.joined {
		conn.Close()
		return nil, 0, errors.New("joined at another address")
	}

	w, deadline, err := c.join(ctx, conn)
	c.joined = err == nil
	return w, deadline, err
}

// join identifies this process to the store and waits to be admitted.
func (c *caller) join(ctx context.Context, conn net.Conn) (*wire, time.Duration, error) {
	w := newWire(conn)
	stop := context.AfterFunc(ctx, func() { w.Close() })
	defer stop()
	fail := func(err error) (*wire, time.Duration, error) {
		w.Close()
		return nil, 0, err
	}

	if err := conn.SetReadDeadline(time.Now().Add(channel.HandshakeTimeout)); err != nil {
		return fail(err)
	}

	w.post(message{Kind: join, Member: self(c.place.Rank), Size: c.place.Size, Run: c.place.Run,
		Port: portOf(conn.RemoteAddr())})
	answer, err := w.receive(maxGreeting, 0)
	switch {
	case err != nil:
		return fail(err)
	case answer.Kind == refused:
		return fail(fmt.Errorf("refused: %s", answer.Text))
	case answer.Kind != welcome:
		return fail(finalError{fmt.Errorf("refused: %s", answer.Text)})
	}

	if err := conn.SetReadDeadline(time.Time{}); err != nil {
		return fail(err)
	}

	if !stop() {
		return fail(context.Cause(ctx))
	}

	return w, answer.Deadline, nil
}

// self returns the member for this process.
func self(rank int) member {
	host, _ := os.Hostname() // appears only in error messages
	return member{rank, strings.TrimSpace(host), os.Getpid()}
}
