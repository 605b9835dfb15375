package comm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/bounded"
)

// fixedInput is a connection that delivers a fixed input.
type fixedInput struct {
	net.Conn
	input *bytes.Reader
}

func (h fixedInput) Read(b []byte) (int, error)       { return h.input.Read(b) }
func (h fixedInput) Write(b []byte) (int, error)      { return len(b), nil }
func (h fixedInput) SetReadDeadline(time.Time) error  { return nil }
func (h fixedInput) SetWriteDeadline(time.Time) error { return nil }
func (h fixedInput) Close() error                     { return nil }

// wireOf returns a wire to a peer that sends b and closes the connection.
func wireOf(b []byte) *wire { return newWire(fixedInput{input: bytes.NewReader(b)}) }

// FuzzMessages feeds arbitrary input from an authenticated peer to the store and to a World. The
// input must not cause a panic or excessive allocation, or replace a rank that has joined.
func FuzzMessages(f *testing.F) {
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add([]byte{0, 0, 0, 2, '{', '}'})
	f.Add([]byte{3, 0xff, 0xff, 0xff, '{'})
	for _, head := range []string{
		`{"Kind":"join","Member":{"Rank":1,"Host":"h","PID":2},"Size":3,"Run":"r","Port":5}`,
		`{"Kind":"all","Key":"k#0","Lengths":[1,-1,1000000000]}`,
		`{"Kind":"failed","Member":{"Rank":-7},"Text":"x"}`,
	} {
		f.Add(append(binary.BigEndian.AppendUint32(nil, uint32(len(head))), head...))
	}

	s := &store{place: Place{Size: 2, LocalSize: 1, Run: "r"}, seats: make([]seat, 2), port: 5,
		gathering: map[string]*gathering{}, empty: make(chan struct{})}
	for r := range s.seats {
		s.seats[r].wire = wireOf(nil)
	}

	f.Fuzz(func(t *testing.T, sent []byte) {
		bounded.Run(t, int64(len(sent)), func() {
			_, in := s.admit(wireOf(sent))
			require.False(t, in)
		})
		w := &World{wire: wireOf(sent), waiting: map[string]chan message{},
			done: make(chan struct{})}
		bounded.Run(t, int64(len(sent)), w.listen)
		var end *RankError
		require.True(t, errors.As(w.Err(), &end))
	})
}
