package channel

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/big"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// patience is much longer than any operation in these tests.
const patience = time.Minute

const secret = "a secret that only the ranks know"

// identity returns an identity whose handshakes have no time limit for these tests, so that no listener gets rid of a
// stranger merely because time passes.
func identity(t *testing.T, secret string) *Identity {
	t.Helper()
	id, err := New(secret)
	require.NoError(t, err)
	id.timeout = time.Hour
	return id
}

// listening returns a listener on the loopback interface and its address.
func listening(t *testing.T, id *Identity) (*Listener, string) {
	t.Helper()
	l, err := id.Listen("127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	return l, l.Addrs()[0].String()
}

// accept returns a channel of the connections that a listener accepts.
func accept(l *Listener) <-chan net.Conn {
	conns := make(chan net.Conn, 100)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conns <- conn
		}
	}()

	return conns
}

// works checks that data can be sent in both directions.
func works(t *testing.T, a, b net.Conn) {
	t.Helper()
	sent := make([]byte, 100_000)
	_, _ = rand.Read(sent)
	for _, pair := range [][2]net.Conn{{a, b}, {b, a}} {
		go func() { _, _ = pair[0].Write(sent) }()
		got := make([]byte, len(sent))
		require.NoError(t, pair[1].SetReadDeadline(time.Now().Add(patience)))
		_, err := io.ReadFull(pair[1], got)
		require.NoError(t, err)
		require.True(t, bytes.Equal(sent, got))
	}
}

func TestConnection(t *testing.T) {
	l, address := listening(t, identity(t, secret))
	conns := accept(l)
	a, err := identity(t, secret).Dial(t.Context(), address)
	require.NoError(t, err)
	defer a.Close()
	b := <-conns
	defer b.Close()
	works(t, a, b)

	require.NoError(t, l.Close())
	require.NoError(t, l.Close())
	_, err = l.Accept()
	require.ErrorIs(t, err, net.ErrClosed)
}

func TestEmptySecret(t *testing.T) {
	_, err := New("")
	require.ErrorContains(t, err, "the secret is empty")
}

// refuses checks that a listener accepts no connection during an attack, and accepts a rank after it.
func refuses(t *testing.T, id *Identity, attack func(address string)) {
	t.Helper()
	l, address := listening(t, id)
	conns := accept(l)
	attack(address)

	// Like a rank, dial again after a failure: the listener may have dropped the connection in favor of a stranger's
	// that it had accepted before but handled later.
	var a net.Conn
	var err error
	for began := time.Now(); time.Since(began) < patience; time.Sleep(time.Millisecond) {
		if a, err = id.Dial(t.Context(), address); err == nil {
			break
		}
	}
	require.NoError(t, err)
	defer a.Close()
	select {
	case b := <-conns:
		works(t, a, b) // b is not the stranger's
		b.Close()
	case <-time.After(patience):
		t.Fatal("the listener no longer accepts connections")
	}

	require.Empty(t, conns, "the stranger was accepted")
}

// TestStrangers tries to connect to a listener without the secret.
func TestStrangers(t *testing.T) {
	id := identity(t, secret)

	t.Run("another secret", func(t *testing.T) {
		refuses(t, id, func(address string) {
			_, err := identity(t, secret+"?").Dial(t.Context(), address)
			require.ErrorIs(t, err, ErrStranger)
		})
	})

	t.Run("another key", func(t *testing.T) {
		_, key, err := ed25519.GenerateKey(rand.Reader)
		require.NoError(t, err)
		template := &x509.Certificate{SerialNumber: big.NewInt(1)}
		certificate, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
		require.NoError(t, err)
		own := []tls.Certificate{{Certificate: [][]byte{certificate}, PrivateKey: key}}
		// The run's certificate is public, but its private key is not.
		stolen := []tls.Certificate{{Certificate: id.config.Certificates[0].Certificate, PrivateKey: key}}

		for name, certificates := range map[string][]tls.Certificate{
			"no certificate": nil, "own certificate": own, "the run's certificate": stolen} {
			for _, protocols := range [][]string{{protocol}, {"h2"}, nil} {
				refuses(t, id, func(address string) {
					conn, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true,
						Certificates: certificates, NextProtos: protocols})
					if err != nil {
						return // rejected in the handshake
					}
					defer conn.Close()
					// The server verifies the client only after the client's handshake has ended.
					_, err = conn.Read(make([]byte, 1))
					require.Error(t, err, "%s, %v", name, protocols)
				})
			}
		}
	})

	t.Run("an older TLS", func(t *testing.T) {
		refuses(t, id, func(address string) {
			_, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true,
				MaxVersion: tls.VersionTLS12, NextProtos: []string{protocol}})
			require.Error(t, err)
		})
	})

	t.Run("no TLS", func(t *testing.T) {
		refuses(t, id, func(address string) {
			for _, say := range []string{"", "\x00", "GET / HTTP/1.1\r\n\r\n",
				string(bytes.Repeat([]byte{0xff}, 1<<16)), "\x16\x03\x01\xff\xff"} {
				conn, err := net.Dial("tcp", address)
				require.NoError(t, err)
				defer conn.Close()
				_, _ = conn.Write([]byte(say))
			}
		})
	})
}

// TestStrangerListens dials listeners that do not know the secret.
func TestStrangerListens(t *testing.T) {
	id := identity(t, secret)
	_, address := listening(t, identity(t, secret+"?"))
	_, err := id.Dial(t.Context(), address)
	require.ErrorIs(t, err, ErrStranger)

	plain, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer plain.Close()
	go func() {
		for {
			conn, err := plain.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte("SSH-2.0-OpenSSH_9.6\r\n"))
		}
	}()

	_, err = id.Dial(t.Context(), plain.Addr().String())
	require.ErrorIs(t, err, ErrStranger)
}

// between relays one connection to the given address. It returns the address of the relay, and a function that waits
// for the end of the connection. All data passes through change, one piece at a time. Its argument up is true for data
// from the dialing side.
func between(t *testing.T, to string, change func(up bool, b []byte) []byte) (address string, wait func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	done := make(chan struct{})
	go func() {
		defer close(done)
		a, err := l.Accept()
		if err != nil {
			return
		}
		b, err := net.Dial("tcp", to)
		if err != nil {
			a.Close()
			return
		}
		var changing sync.Mutex
		pipe := func(from, to net.Conn, up bool) {
			defer from.Close()
			defer to.Close()
			buffer := make([]byte, 1<<16)
			for {
				n, err := from.Read(buffer)
				if err != nil {
					return
				}
				changing.Lock()
				changed := change(up, buffer[:n])
				changing.Unlock()
				if _, err := to.Write(changed); err != nil {
					return
				}
			}
		}
		var pipes sync.WaitGroup
		pipes.Go(func() { pipe(a, b, true) })
		pipes.Go(func() { pipe(b, a, false) })
		pipes.Wait()
	}()

	return l.Addr().String(), func() {
		l.Close() // in case nothing has connected
		<-done
	}
}

// TestRelay checks that a relay can neither read the data nor modify it unnoticed.
func TestRelay(t *testing.T) {
	text := []byte("what the ranks say to each other")
	patient, hasty := identity(t, secret), identity(t, secret)
	hasty.timeout = time.Second // modified data may make a peer wait for more, and any error will do

	// exchange sends the text in both directions through a relay. It returns the texts received.
	exchange := func(t *testing.T, id *Identity, change func(up bool, b []byte) []byte) (heard [][]byte, errs error) {
		l, address := listening(t, id)
		relay, wait := between(t, address, change)
		var mu sync.Mutex
		hear := func(c net.Conn) {
			b := make([]byte, len(text))
			_ = c.SetReadDeadline(time.Now().Add(min(id.timeout, patience)))
			_, err := io.ReadFull(c, b)
			mu.Lock()
			defer mu.Unlock()
			if errs = errors.Join(errs, err); err == nil {
				heard = append(heard, b)
			}
		}
		echo := make(chan struct{})
		go func() {
			defer close(echo)
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			hear(c)
			_, _ = c.Write(text)
		}()
		c, err := id.Dial(t.Context(), relay)
		if err == nil {
			_, _ = c.Write(text)
			hear(c)
			c.Close()
		}
		l.Close()
		<-echo
		wait()
		return heard, errors.Join(errs, err)
	}

	t.Run("reads", func(t *testing.T) {
		var seen []byte
		heard, err := exchange(t, patient, func(_ bool, b []byte) []byte {
			seen = append(seen, b...)
			return b
		})
		require.NoError(t, err)
		require.Equal(t, [][]byte{text, text}, heard)
		require.NotContains(t, string(seen), string(text[:8]))
		require.NotContains(t, string(seen), secret[:8])
	})

	t.Run("changes a bit", func(t *testing.T) {
		for _, up := range []bool{true, false} {
			for at := 0; at < 3000; at += 37 {
				passed, changed := 0, false
				heard, err := exchange(t, hasty, func(u bool, b []byte) []byte {
					if u == up {
						if at >= passed && at < passed+len(b) {
							b[at-passed] ^= 0x10
							changed = true
						}
						passed += len(b)
					}
					return b
				})
				for _, h := range heard {
					require.Equal(t, text, h, "a modified message was accepted")
				}
				if !changed {
					break // at is beyond the end of the data
				}
				// A change to what follows the text, the closing alert, does no harm.
				require.True(t, err != nil || len(heard) == 2,
					"a change to byte %d went unnoticed, up: %v", at, up)
			}
		}
	})

	t.Run("repeats", func(t *testing.T) {
		sent := 0
		heard, _ := exchange(t, hasty, func(up bool, b []byte) []byte {
			if sent += len(b); up && sent > 3000 {
				return append(append([]byte{}, b...), b...)
			}
			return b
		})
		for _, h := range heard {
			require.Equal(t, text, h)
		}
	})
}

// TestReplay replays a recording of a rank's connection.
func TestReplay(t *testing.T) {
	id := identity(t, secret)
	l, address := listening(t, id)
	conns := accept(l)
	var mu sync.Mutex
	var recorded [][]byte
	relay, _ := between(t, address, func(up bool, b []byte) []byte {
		mu.Lock()
		defer mu.Unlock()
		if up {
			recorded = append(recorded, append([]byte{}, b...))
		}
		return b
	})

	c, err := id.Dial(t.Context(), relay)
	require.NoError(t, err)
	works(t, c, <-conns)
	c.Close()

	refuses(t, id, func(address string) {
		again, err := net.Dial("tcp", address)
		require.NoError(t, err)
		defer again.Close()
		mu.Lock()
		defer mu.Unlock()
		for _, b := range recorded {
			if _, err := again.Write(b); err != nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	})
}

// TestReflection sends a rank's own data back to it.
func TestReflection(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(conn, conn) }()
		}
	}()

	_, err = identity(t, secret).Dial(t.Context(), l.Addr().String())
	require.Error(t, err)
}

// TestFlood opens many more idle connections than the listener keeps.
func TestFlood(t *testing.T) {
	id := identity(t, secret)
	refuses(t, id, func(address string) {
		for range 2*MaxPending + 50 {
			conn, err := net.Dial("tcp", address)
			require.NoError(t, err)
			t.Cleanup(func() { conn.Close() })
		}
	})
}

// TestFloodIsBounded checks that a flood is limited to MaxPending connections and displaces only
// connections from the same address.
func TestFloodIsBounded(t *testing.T) {
	l, address := listening(t, identity(t, secret))
	dial := func(from string) net.Conn {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		conn, err := d.DialContext(t.Context(), "tcp", address)
		if errors.Is(err, syscall.EADDRNOTAVAIL) {
			t.Skip("this system has one loopback address")
		}
		require.NoError(t, err)
		t.Cleanup(func() { conn.Close() })
		return conn
	}

	pending := func() int {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.pending)
	}
	first := dial("127.0.0.1")
	require.Eventually(t, func() bool { return pending() == 1 }, patience, time.Millisecond)
	oldest := dial("127.0.0.2")
	require.Eventually(t, func() bool { return pending() == 2 }, patience, time.Millisecond)
	for range 2 * MaxPending {
		dial("127.0.0.2")
		require.LessOrEqual(t, pending(), MaxPending)
	}

	// Only the flooding address has lost a connection.
	require.NoError(t, oldest.SetReadDeadline(time.Now().Add(patience)))
	_, err := oldest.Read(make([]byte, 1))
	require.Error(t, err)
	require.False(t, isTimeout(err))
	require.NoError(t, first.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
	_, err = first.Read(make([]byte, 1))
	require.True(t, isTimeout(err), err)
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

// TestSlowLoris sends a handshake one byte at a time. The listener must give up in time.
func TestSlowLoris(t *testing.T) {
	id := identity(t, secret)
	id.timeout = 300 * time.Millisecond
	_, address := listening(t, id)
	conn, err := net.Dial("tcp", address)
	require.NoError(t, err)
	defer conn.Close()
	hello := append([]byte{22, 3, 1, 0x40, 0}, make([]byte, 1<<14)...) // longer than patience
	for began := time.Now(); err == nil && time.Since(began) < patience; time.Sleep(10 * time.Millisecond) {
		_, err = conn.Write(hello[:1])
		hello = hello[1:]
	}

	require.Error(t, err, "the listener still waits")
}

// TestDialGivesUp dials a program that never answers.
func TestDialGivesUp(t *testing.T) {
	id := identity(t, secret)
	id.timeout = 100 * time.Millisecond
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	_, err = id.Dial(context.Background(), l.Addr().String())
	require.ErrorIs(t, err, context.DeadlineExceeded)
}
