package board

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// listening returns the connections of a board that listens, and its address.
func listening(t *testing.T) (l *connections, addr string) {
	t.Helper()
	b, err := New()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	l = newConnections(tcp)
	require.NoError(t, b.serve(l))
	return l, tcp.Addr().String()
}

// rest waits until all connections without a stream are idle.
func (l *connections) rest(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		busy := 0
		for c := range l.open {
			if c.phase != idle {
				busy++
			}
		}
		return busy <= maxViewersOfClient
	}, longest, time.Millisecond)
}

// silent opens a connection and never reads from it. It requests a path unless that is empty.
func silent(t *testing.T, addr, path string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	if path != "" {
		_, err = fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: %s\r\n\r\n", path, addr)
		require.NoError(t, err)
	}
	return c
}

// longest is much longer than anything in these tests takes.
const longest = 2 * time.Minute

// reachable checks that a new client receives the page.
func reachable(t *testing.T, addr, what string) {
	t.Helper()
	client := &http.Client{Timeout: longest, Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := client.Get("http://" + addr + "/style.css")
	require.NoError(t, err, what)
	defer r.Body.Close()
	_, err = io.Copy(io.Discard, r.Body)
	require.NoError(t, err, what)
	require.Equal(t, http.StatusOK, r.StatusCode, what)
}

// TestSilentConnections checks that connections of clients that neither read nor request anything
// do not exclude new connections, even from the same address.
func TestSilentConnections(t *testing.T) {
	for name, path := range map[string]string{
		"which ask for nothing":      "",
		"which never read":           "/uplot.js",
		"which never read the API":   "/api/v1/runs",
		"with streams that are idle": "/api/v1/stream",

		"with a part of a request":   "GET / HT",
		"with a body that is late":   "POST /api/v1/runs/0/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
		"with a body that is unread": "GET /style.css HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			l, addr := listening(t)
			for range maxConnections + 20 {
				if path == "" || path[0] == '/' {
					silent(t, addr, path)
					continue
				}
				_, err := io.WriteString(silent(t, addr, ""), path)
				require.NoError(t, err)
			}
			for range 3 {
				l.rest(t) // until the send buffers are full
				reachable(t, addr, name)
			}
		})
	}
}

// longAnswers serves an answer at /long that is longer than the buffers of a connection, and an empty one elsewhere. The
// returned channel receives the error of every answer that cannot be written.
func longAnswers(t *testing.T, stalled time.Duration) (l *connections, addr string, failed <-chan error) {
	t.Helper()
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	l = newConnections(tcp)
	l.stalled = stalled
	errs := make(chan error, maxConnections)
	long := func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/long" {
			return
		}
		for range 64 {
			if _, err := w.Write(make([]byte, 1<<20)); err != nil {
				errs <- err
				return
			}
		}
	}
	s := &http.Server{ConnContext: l.context, Handler: l.tracked(http.HandlerFunc(long))}
	go s.Serve(l)
	t.Cleanup(func() { s.Close() })
	return l, tcp.Addr().String(), errs
}

// TestSlowReaders checks that a connection is dropped if its client does not read a long answer.
func TestSlowReaders(t *testing.T) {
	t.Parallel()
	_, addr, failed := longAnswers(t, 100*time.Millisecond)
	for range maxConnectionsOfClient {
		silent(t, addr, "/long")
	}
	for range maxConnectionsOfClient {
		select {
		case err := <-failed:
			require.Error(t, err)
		case <-time.After(longest):
			t.Fatal("a client that reads nothing is not dropped")
		}
	}
}

// TestSlowReadersAreReplaced checks that a new connection may replace one whose client does not read a long answer,
// even before that is dropped.
func TestSlowReadersAreReplaced(t *testing.T) {
	t.Parallel()
	l, addr, failed := longAnswers(t, time.Hour)
	for range maxConnectionsOfClient {
		silent(t, addr, "/long")
	}
	require.Eventually(t, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		n := 0
		for c := range l.open {
			if c.phase == writing && time.Since(c.since) > patient {
				n++
			}
		}
		return n == maxConnectionsOfClient
	}, longest, 10*time.Millisecond)
	require.Empty(t, failed)

	r, err := http.Get("http://" + addr + "/short")
	require.NoError(t, err)
	require.NoError(t, r.Body.Close())
	require.Error(t, <-failed)
}

// TestReadingConnectionsStay checks that new connections do not replace connections that are in
// use, such as streams.
func TestReadingConnectionsStay(t *testing.T) {
	l, addr := listening(t)
	stream := silent(t, addr, "/api/v1/stream")
	lines := bufio.NewReader(stream)
	first, err := lines.ReadString('\n')
	require.NoError(t, err)
	require.Contains(t, first, "200 OK")
	for range 2 * maxConnections {
		silent(t, addr, "")
	}
	l.rest(t)
	reachable(t, addr, "new client")
	require.NoError(t, stream.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
	_, err = io.Copy(io.Discard, lines)
	var late net.Error
	require.ErrorAs(t, err, &late, "the stream has ended")
	require.True(t, late.Timeout())
}

// TestShares checks that no single client can use up all connections, streams and requests.
func TestShares(t *testing.T) {
	var p places
	var leave []func()
	for range maxViewersOfClient {
		l, ok := p.take("192.0.2.1")
		require.True(t, ok)
		leave = append(leave, l)
	}
	_, ok := p.take("192.0.2.1")
	require.False(t, ok)
	for range maxViewers - maxViewersOfClient {
		_, ok := p.take("192.0.2.2")
		require.True(t, ok)
	}
	_, ok = p.take("192.0.2.3")
	require.False(t, ok, "there are no more places for anybody")
	leave[0]()
	_, ok = p.take("192.0.2.3")
	require.True(t, ok)
	require.Equal(t, maxViewers, p.count())

	r, now := rates{perSecond: 200}, time.Now()
	taken := 0
	for range 10_000 {
		if r.take("192.0.2.1", now) {
			taken++
		}
	}
	require.Equal(t, 300, taken)
	for range 100 {
		require.True(t, r.take("192.0.2.2", now))
	}
	require.False(t, r.take("192.0.2.2", now), "no more than the bound for all")
	for i := range 3 * maxClients {
		r.take(fmt.Sprint(i), now)
	}
	require.LessOrEqual(t, len(r.clients), maxClients)
}

// TestClientOf checks which addresses count as the same client.
func TestClientOf(t *testing.T) {
	for addr, want := range map[string]string{
		"192.0.2.1:80":              "192.0.2.1",
		"[::ffff:192.0.2.1]:80":     "192.0.2.1",
		"[2001:db8:1:2:3:4:5:6]:80": "2001:db8:1:2::/64",
		"[2001:db8:1:2::9]:81":      "2001:db8:1:2::/64",
		"[fe80::1%eth0]:80":         "fe80::/64",
		"@":                         "@",
		"host:80":                   "host",
	} {
		require.Equal(t, want, clientOf(addr), addr)
	}
}
