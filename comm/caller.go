package comm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kasmina-go/kasmina/comm/internal/channel"
)

// A caller finds rank 0 and joins its run.
type caller struct {
	place   Place
	id      *channel.Identity
	targets []string // addresses, each with a port
}

// connect tries the addresses until one of them answers for this run. It returns the deadline of
// rank 0.
func (c *caller) connect(ctx context.Context, timeout time.Duration) (*wire, time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var refusals []error
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		w, deadline, failures := c.round(ctx)
		if w != nil {
			return w, deadline, nil
		}
		if i := slices.IndexFunc(failures, isFinal); i >= 0 {
			return nil, 0, failures[i]
		}
		if ctx.Err() == nil {
			refusals = failures
		}

		select {
		case <-ctx.Done():
			ports := c.place.ports()
			return nil, 0, fmt.Errorf("rank 0 was not found at %s, ports %d to %d, within %v: is it "+
				"running, and is MASTER_ADDR its host? It answers only until all ranks have joined. %w",
				c.place.MasterAddr, ports[0], ports[PortWindow-1], timeout,
				errors.Join(append(telling(refusals), context.Cause(ctx))...))
		case <-time.After(pause):
		}
	}
}

// telling leaves out that nobody listens at a port, if there is anything else to tell.
func telling(failures []error) []error {
	rest := slices.DeleteFunc(slices.Clone(failures), func(err error) bool {
		return errors.Is(err, syscall.ECONNREFUSED)
	})
	if len(rest) == 0 && len(failures) > 0 {
		return failures[:1]
	}
	return rest
}

// finalError is the refusal of this run's rank 0, after which it makes no sense to look elsewhere.
type finalError struct{ error }

func isFinal(err error) bool {
	var final finalError
	return errors.As(err, &final)
}

// round calls all addresses at once, so that one that does not answer holds up none of the others.
// It joins the run at the first that does, or returns what is wrong with each.
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
				go func() { // hang up on the others
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

// join tells the store at the other end of a connection who this is, and waits to be let in.
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

// self identifies this process as a rank.
func self(rank int) member {
	host, _ := os.Hostname() // only a name for people
	return member{rank, strings.TrimSpace(host), os.Getpid()}
}
