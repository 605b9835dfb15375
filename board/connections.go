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

	stalled    = 10 * time.Second // limit for a client to read writeChunk bytes of an answer
	writeChunk = 1 << 16
	sendBuffer = 1 << 18     // bytes that the system buffers for a client that does not read
	patient    = time.Second // a longer write may be interrupted in favor of another client
)

// clientOf returns the client that uses an address, which includes a port. All addresses of an IPv6
// network count as the same client, because a client may use any address of its network.
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

// connections is a listener that limits the number of connections, in total and per client.
//
// When a limit is reached, a new connection replaces an idle one, or one whose client does not read
// its response. If there is no such connection, the new one is closed.
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

// A phase is the current use of a connection.
type phase uint8

const (
	idle      phase = iota // no handler is running
	answering              // a handler is running
	writing                // a handler is writing a part of its answer
)

// A connection is a connection accepted by a listener with limits.
type connection struct {
	net.Conn
	from   *connections
	client string

	// The listener's mu guards these.
	phase phase
	since time.Time // start of the phase
}

// Accept returns the next connection that the limits permit.
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

// admit adds a connection, possibly in place of another one. It returns nil if the limits do not
// permit that.
func (l *connections) admit(c net.Conn) *connection {
	own := &connection{Conn: c, from: l, client: clientOf(c.RemoteAddr().String()),
		since: time.Now()}
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetWriteBuffer(sendBuffer) // if this fails, the default size remains
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	var replaced *connection
	switch {
	case l.ofClient[own.client] >= maxConnectionsOfClient:
		replaced = l.leastUsed(own.client)
	case len(l.open) >= maxConnections:
		replaced = l.leastUsed(l.busiest())
	default:
		l.add(own)
		return own
	}
	if replaced == nil {
		return nil
	}

	l.remove(replaced)
	replaced.Conn.Close()
	l.add(own)
	return own
}

// leastUsed returns the connection of a client that has been idle for the longest time. If none is
// idle, it returns the connection that has been writing for the longest time. It returns nil if all
// connections are in use.
func (l *connections) leastUsed(client string) (found *connection) {
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
	if _, open := l.open[c]; !open {
		return
	}
	delete(l.open, c)
	if l.ofClient[c.client]--; l.ofClient[c.client] == 0 {
		delete(l.ofClient, c.client)
	}
}

// enter starts a phase of a connection and returns the previous one.
func (l *connections) enter(c *connection, p phase) (before phase) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before = c.phase
	c.phase, c.since = p, time.Now()
	return before
}

// connectionKey is the context key for the connection of a request.
type connectionKey struct{}

// context implements the field ConnContext of a server.
func (l *connections) context(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connectionKey{}, c)
}

// tracked records that a handler is running for a connection.
func (l *connections) tracked(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c, ok := r.Context().Value(connectionKey{}).(*connection); ok {
			l.enter(c, answering)
			defer l.enter(c, idle)
		}
		next.ServeHTTP(w, r)
	})
}

// Write writes p. It fails if the client takes too long to read a chunk of writeChunk bytes.
func (c *connection) Write(p []byte) (n int, err error) {
	before := c.from.enter(c, writing)
	defer func() { c.from.enter(c, before) }()

	for {
		part := p[n:min(len(p), n+writeChunk)]
		if err := c.Conn.SetWriteDeadline(time.Now().Add(c.from.stalled)); err != nil {
			return n, err
		}
		written, err := c.Conn.Write(part)
		if n += written; err != nil || n == len(p) {
			return n, err
		}
	}
}

// Close closes the connection and removes it from its listener.
func (c *connection) Close() error {
	c.from.mu.Lock()
	c.from.remove(c)
	c.from.mu.Unlock()
	return c.Conn.Close()
}

// places limits the number of streams, in total and per client.
type places struct {
	mu       sync.Mutex
	taken    int
	ofClient map[string]int
}

// take reserves a stream for a client and returns a function that releases it. It returns false if
// the limits do not permit another one.
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

// count returns the number of reserved places.
func (p *places) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.taken
}

// rates limits the rate of events, in total and per client.
type rates struct {
	perSecond float64

	mu      sync.Mutex
	all     bucket
	clients map[string]*bucket
}

// maxClients limits the number of clients that rates tracks.
const maxClients = 1 << 10

// take reports whether an event of a client is permitted now.
func (r *rates) take(client string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()

	own := r.clients[client]
	if own == nil {
		if len(r.clients) >= maxClients {
			r.clients = nil // every client starts with a full bucket again
		}
		if r.clients == nil {
			r.clients = map[string]*bucket{}
		}
		own = &bucket{}
		r.clients[client] = own
	}

	// A rejected event must not count against the total.
	return own.take(now, r.perSecond*3/4) && r.all.take(now, r.perSecond)
}

// A bucket permits a number of events per second on average, and twice that number at once.
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
