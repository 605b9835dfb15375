package board

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// listening returns a board that listens, and its address.
func listening(t *testing.T) (b *Board, addr string) {
	t.Helper()
	b, err := New()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	return b, strings.Trim(strings.TrimPrefix(url, "http://"), "/")
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

// reachable checks that a new client receives the page quickly.
func reachable(t *testing.T, addr, what string) {
	t.Helper()
	client := &http.Client{Timeout: 5 * time.Second,
		Transport: &http.Transport{DisableKeepAlives: true}}
	began := time.Now()
	r, err := client.Get("http://" + addr + "/style.css")
	require.NoError(t, err, "%s: %v after %v", what, err, time.Since(began))
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
			_, addr := listening(t)
			for range maxConnections + 20 {
				if path == "" || path[0] == '/' {
					silent(t, addr, path)
					continue
				}
				_, err := io.WriteString(silent(t, addr, ""), path)
				require.NoError(t, err)
			}
			time.Sleep(50 * time.Millisecond) // until the send buffers are full
			for range 3 {
				reachable(t, addr, name)
			}
		})
	}
}

// TestSlowReaders checks that a connection is dropped if its client does not read a long answer,
// and that a new connection may replace it even before that.
func TestSlowReaders(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	places := newConnections(l)
	places.stalled = 4 * time.Second
	failed := make(chan error, maxConnections)
	long := func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/long" {
			return
		}
		for range 64 {
			if _, err := w.Write(make([]byte, 1<<20)); err != nil {
				failed <- err
				return
			}
		}
	}
	s := &http.Server{ConnContext: places.context, Handler: places.tracked(http.HandlerFunc(long))}
	go s.Serve(places)
	defer s.Close()
	addr := l.Addr().String()

	for range maxConnectionsOfClient {
		silent(t, addr, "/long")
	}
	require.Eventually(t, func() bool {
		places.mu.Lock()
		defer places.mu.Unlock()
		n := 0
		for c := range places.open {
			if c.phase == writing && time.Since(c.since) > patient {
				n++
			}
		}
		return n == maxConnectionsOfClient
	}, 10*time.Second, 10*time.Millisecond)
	r, err := http.Get("http://" + addr + "/short")
	require.NoError(t, err)
	require.NoError(t, r.Body.Close())

	for range maxConnectionsOfClient {
		select {
		case err := <-failed:
			require.Error(t, err)
		case <-time.After(10 * time.Second):
			t.Fatal("a client that reads nothing is not dropped")
		}
	}
}

// TestReadingConnectionsStay checks that new connections do not replace connections that are in
// use, such as streams.
func TestReadingConnectionsStay(t *testing.T) {
	_, addr := listening(t)
	stream := silent(t, addr, "/api/v1/stream")
	lines := bufio.NewReader(stream)
	first, err := lines.ReadString('\n')
	require.NoError(t, err)
	require.Contains(t, first, "200 OK")
	for range 2 * maxConnections {
		silent(t, addr, "")
	}
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
