package channel

import (
	"context"
	"crypto/tls"
	"net"
	"slices"
	"sync"
	"time"
)

// MaxPending is the maximum number of unauthenticated connections that a [Listener] keeps.
const MaxPending = 256

// A Listener accepts connections from peers that know the secret. Strangers cannot exhaust it: each
// connection must authenticate within [HandshakeTimeout]. If more than [MaxPending] connections are
// unauthenticated, or the process runs out of file descriptors, the listener drops the oldest
// connection of the remote address that has the most.
type Listener struct {
	id        *Identity
	listeners []net.Listener
	accepted  chan net.Conn
	closed    chan struct{}

	mu      sync.Mutex
	pending []pending // oldest first
}

// A pending connection has not been authenticated yet.
type pending struct {
	conn net.Conn
	host string // remote address without port
}

// Listen listens on all of the given host:port addresses, or on none if it returns an error.
func (id *Identity) Listen(addresses ...string) (*Listener, error) {
	config := net.ListenConfig{KeepAliveConfig: KeepAlive}
	l := &Listener{id: id, accepted: make(chan net.Conn), closed: make(chan struct{})}
	for _, address := range addresses {
		listener, err := config.Listen(context.Background(), "tcp", address)
		if err != nil {
			l.Close()
			return nil, err
		}
		l.listeners = append(l.listeners, listener)
	}

	for _, listener := range l.listeners {
		go l.serve(listener)
	}

	return l, nil
}

// Addrs returns the addresses on which the listener listens.
func (l *Listener) Addrs() (addrs []net.Addr) {
	for _, listener := range l.listeners {
		addrs = append(addrs, listener.Addr())
	}
	return addrs
}

// Accept returns the next authenticated connection. After Close, it returns net.ErrClosed.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.accepted:
		return conn, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close stops listening and closes all connections that Accept has not returned. It may be called
// more than once.
func (l *Listener) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.closed:
		return nil
	default:
	}

	close(l.closed)

	var err error
	for _, listener := range l.listeners {
		if e := listener.Close(); err == nil {
			err = e
		}
	}

	for _, p := range l.pending {
		p.conn.Close()
	}

	return err
}

// Delays after a failed accept, as in net/http.
const (
	firstPause = 5 * time.Millisecond
	lastPause  = time.Second
)

// serve accepts connections until the listener is closed.
func (l *Listener) serve(listener net.Listener) {
	pause := firstPause
	for {
		conn, err := listener.Accept()
		if err == nil {
			pause = firstPause
			go l.greet(conn)
			continue
		}

		// The process may have run out of file descriptors, or the peer may have disconnected.
		// Both are temporary. Dropping a stranger's connection frees a descriptor.
		l.mu.Lock()
		l.evict()
		l.mu.Unlock()
		select {
		case <-l.closed:
			return
		case <-time.After(pause):
			pause = min(2*pause, lastPause)
		}
	}
}

// greet authenticates a connection and passes it to Accept.
func (l *Listener) greet(conn net.Conn) {
	if !l.add(conn) {
		conn.Close()
		return
	}

	ctx, cancel := context.WithTimeout(context.Background(), l.id.timeout)
	defer cancel()
	secured := tls.Server(conn, l.id.config)
	err := secured.HandshakeContext(ctx)
	l.remove(conn)
	if err != nil {
		conn.Close()
		return
	}

	select {
	case l.accepted <- secured:
	case <-l.closed:
		conn.Close()
	}
}

// add registers a pending connection. It returns false if the listener is closed.
func (l *Listener) add(conn net.Conn) bool {
	host, _, err := net.SplitHostPort(conn.RemoteAddr().String())
	if err != nil {
		host = conn.RemoteAddr().String()
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.closed:
		return false
	default:
	}

	l.pending = append(l.pending, pending{conn, host})
	if len(l.pending) > MaxPending {
		l.evict()
	}

	return true
}

func (l *Listener) remove(conn net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pending = slices.DeleteFunc(l.pending, func(p pending) bool { return p.conn == conn })
}

// evict closes the oldest pending connection of the remote address with the most pending connections.
// The caller holds the lock.
func (l *Listener) evict() {
	count := map[string]int{}
	most := 0
	for _, p := range l.pending {
		count[p.host]++
		most = max(most, count[p.host])
	}

	oldest := slices.IndexFunc(l.pending, func(p pending) bool { return count[p.host] == most })
	if oldest < 0 {
		return
	}

	l.pending[oldest].conn.Close() // its handshake fails
	l.pending = slices.Delete(l.pending, oldest, oldest+1)
}
