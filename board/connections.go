package board

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"
)

// Limits of the connections of a board that listens.
const (
	maxConnections = 256
	// A single client cannot take all places.
	maxConnectionsOfClient = maxConnections * 3 / 4

	stalled    = 10 * time.Second // after which a peer that takes nothing of an answer is dropped
	writeChunk = 1 << 16          // what a peer must take of a longer answer in that time
	sendBuffer = 1 << 18          // what the system keeps for a peer that does not read
	patient    = time.Second      // how long a write may last before it gives way to other clients
)

// clientOf returns the client that an address with a port belongs to. The addresses of an IPv6
// network count as one client, which may use any of them.
func clientOf(addr string) string {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return addr
	}
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return host
	}
	ip = ip.Unmap().WithZone("")
	if ip.Is4() {
		return ip.String()
	}
	network, err := ip.Prefix(64)
	if err != nil {
		return ip.String()
	}
	return network.String()
}

// connections is a listener that bounds how many connections there are, in all and of a client.
//
// When a bound is reached, a new connection takes the place of one on which no request is being
// answered, or whose peer does not read its answer. Without any such connection it is closed.
type connections struct {
	net.Listener
	stalled time.Duration

	mu       sync.Mutex
	open     map[*connection]struct{}
	ofClient map[string]int
}

func newConnections(l net.Listener) *connections {
	return &connections{Listener: l, stalled: stalled, open: map[*connection]struct{}{},
		ofClient: map[string]int{}}
}

// A phase is what a connection is used for at the moment.
type phase uint8

const (
	idle      phase = iota // no handler works on a request; one may be on its way
	answering              // a handler works on a request
	writing                // a part of an answer is being written
)

// connection is a connection of a listener that bounds them.
type connection struct {
	net.Conn
	from   *connections
	client string

	// The listener's mu guards these.
	phase phase
	since time.Time // when the phase began
}

// Accept returns the next connection for which there is a place.
func (l *connections) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if own := l.admit(c); own != nil {
			return own, nil
		}
		c.Close()
	}
}

// admit gives a connection a place, and returns nil if there is none.
func (l *connections) admit(c net.Conn) *connection {
	own := &connection{Conn: c, from: l, client: clientOf(c.RemoteAddr().String()),
		since: time.Now()}
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetWriteBuffer(sendBuffer) // on an error it stays as large as the system makes it
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	var leaves *connection
	switch {
	case l.ofClient[own.client] >= maxConnectionsOfClient:
		leaves = l.least(own.client)
	case len(l.open) >= maxConnections:
		leaves = l.least(l.busiest())
	default:
		l.add(own)
		return own
	}
	if leaves == nil {
		return nil
	}

	l.remove(leaves)
	leaves.Conn.Close()
	l.add(own)
	return own
}

// least returns the connection of a client that is missed least: the one that has been idle, or
// else writing, for the longest time. It returns nil if all are in use.
func (l *connections) least(client string) (found *connection) {
	for c := range l.open {
		switch {
		case c.client != client || c.phase == answering:
		case c.phase == writing && time.Since(c.since) < patient:
		case found == nil || c.phase < found.phase ||
			c.phase == found.phase && c.since.Before(found.since):
			found = c
		}
	}
	return found
}

// busiest returns the client with the most connections.
func (l *connections) busiest() (client string) {
	for c, n := range l.ofClient {
		if most := l.ofClient[client]; n > most || n == most && c < client {
			client = c
		}
	}
	return client
}

func (l *connections) add(c *connection) {
	l.open[c] = struct{}{}
	l.ofClient[c.client]++
}

func (l *connections) remove(c *connection) {
	if _, there := l.open[c]; !there {
		return
	}
	delete(l.open, c)
	if l.ofClient[c.client]--; l.ofClient[c.client] == 0 {
		delete(l.ofClient, c.client)
	}
}

// enter notes that a connection is in another phase from now on, and returns the phase before.
func (l *connections) enter(c *connection, p phase) (before phase) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before = c.phase
	c.phase, c.since = p, time.Now()
	return before
}

// connectionKey is the key of a request's connection in its context.
type connectionKey struct{}

// context is for the field ConnContext of a server.
func (l *connections) context(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connectionKey{}, c)
}

// tracked notes on which connections a handler works.
func (l *connections) tracked(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c, ok := r.Context().Value(connectionKey{}).(*connection); ok {
			l.enter(c, answering)
			defer l.enter(c, idle)
		}
		next.ServeHTTP(w, r)
	})
}

// Write writes p. It fails when the peer has not taken any part of writeChunk bytes in time.
func (c *connection) Write(p []byte) (n int, err error) {
	before := c.from.enter(c, writing)
	defer func() { c.from.enter(c, before) }()

	for {
		part := p[n:min(len(p), n+writeChunk)]
		if err := c.Conn.SetWriteDeadline(time.Now().Add(c.from.stalled)); err != nil {
			return n, err
		}
		took, err := c.Conn.Write(part)
		if n += took; err != nil || n == len(p) {
			return n, err
		}
	}
}

// Close closes the connection, whose place is free then.
func (c *connection) Close() error {
	c.from.mu.Lock()
	c.from.remove(c)
	c.from.mu.Unlock()
	return c.Conn.Close()
}

// places are for a bounded number of streams, in all and of a client.
type places struct {
	mu       sync.Mutex
	taken    int
	ofClient map[string]int
}

// take takes a place for a client, and returns what gives it back. It returns false if there is
// none.
func (p *places) take(client string) (leave func(), ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.taken >= maxViewers || p.ofClient[client] >= maxViewersOfClient {
		return nil, false
	}

	if p.ofClient == nil {
		p.ofClient = map[string]int{}
	}
	p.taken++
	p.ofClient[client]++
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.taken--
		if p.ofClient[client]--; p.ofClient[client] == 0 {
			delete(p.ofClient, client)
		}
	}, true
}

// count returns how many places are taken.
func (p *places) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.taken
}

// rates bound how often something happens a second, in all and for a client.
type rates struct {
	perSecond float64

	mu      sync.Mutex
	all     bucket
	clients map[string]*bucket
}

// maxClients bounds the clients that rates remember.
const maxClients = 1 << 10

// take reports whether it may happen now.
func (r *rates) take(client string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()

	own := r.clients[client]
	if own == nil {
		if len(r.clients) >= maxClients {
			r.clients = nil // all begin with a full bucket again
		}
		if r.clients == nil {
			r.clients = map[string]*bucket{}
		}
		own = &bucket{}
		r.clients[client] = own
	}

	// A client that is refused takes nothing from others.
	return own.take(now, r.perSecond*3/4) && r.all.take(now, r.perSecond)
}

// bucket lets something happen so many times a second, on average, and twice as often at once.
type bucket struct {
	left float64
	at   time.Time
}

func (b *bucket) take(now time.Time, perSecond float64) bool {
	most := 2 * perSecond
	if b.at.IsZero() {
		b.left = most
	} else {
		b.left = min(most, b.left+perSecond*now.Sub(b.at).Seconds())
	}
	b.at = now
	if b.left < 1 {
		return false
	}
	b.left--
	return true
}
