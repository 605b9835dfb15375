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

	mu     sync.Mutex
	failed []error // why the latest attempts failed
}

// connect retries all targets until rank 0 of this run accepts the connection. It also returns rank
// 0's deadline.
func (c *caller) connect(ctx context.Context, timeout time.Duration) (*wire, time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var refusals []error
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		w, deadline, failures := c.round(ctx)
		if w != nil {
			c.setRefusals(nil)
			return w, deadline, nil
		}
		if i := slices.IndexFunc(failures, isFinal); i >= 0 {
			return nil, 0, failures[i]
		}
		if ctx.Err() == nil {
			refusals = failures
			c.setRefusals(failures)
		}

		select {
		case <-ctx.Done():
			ports := c.place.ports()
			return nil, 0, fmt.Errorf("rank 0 was not found at %s, ports %d to %d, within %v: is it "+
				"running, and is MASTER_ADDR its host? It answers only until all ranks have joined. %w",
				c.place.MasterAddr, ports[0], ports[PortWindow-1], timeout,
				errors.Join(append(informative(refusals), context.Cause(ctx))...))
		case <-time.After(pause):
		}
	}
}

// informative drops refused connections from failures, unless every connection was refused. Most
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

// A finalError is a refusal by rank 0 of this run. Trying other addresses would be pointless.
type finalError struct{ error }

func isFinal(err error) bool {
	var final finalError
	return errors.As(err, &final)
}

// round dials all targets in parallel, so an unresponsive one cannot delay the rest, and joins the
// run through the first target that accepts. If no target does, round returns an error for each.
func (c *caller) round(ctx context.Context) (*wire, time.Duration, []error) {
	type call struct {
		target string
		conn   net.Conn
		err    error
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	calls := make(chan call, len(c.targets))
	for _, target := range c.targets {
		go func() {
			conn, err := c.id.Dial(ctx, target)
			calls <- call{target, conn, err}
		}()
	}

	var failures []error
	for n := range c.targets {
		got := <-calls
		err := got.err
		if err == nil {
			var w *wire
			var deadline time.Duration
			if w, deadline, err = c.join(ctx, got.conn); err == nil {
				go func() { // close the remaining connections
					for range len(c.targets) - n - 1 {
						if other := <-calls; other.err == nil {
							other.conn.Close()
						}
					}
				}()
				return w, deadline, nil
			}
		}
		failures = append(failures, fmt.Errorf("%s: %w", got.target, err))
	}

	return nil, 0, failures
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
