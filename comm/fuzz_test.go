package comm

import (
	"bytes"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/bounded"
)

// heard is a connection at whose other end somebody has said all that he will.
type heard struct {
	net.Conn
	said *bytes.Reader
}

func (h heard) Read(b []byte) (int, error)       { return h.said.Read(b) }
func (h heard) Write(b []byte) (int, error)      { return len(b), nil }
func (h heard) SetReadDeadline(time.Time) error  { return nil }
func (h heard) SetWriteDeadline(time.Time) error { return nil }
func (h heard) Close() error                     { return nil }

// says is a connection on which a stranger says something.
func says(b []byte) *wire { return &wire{Conn: heard{said: bytes.NewReader(b)}} }

// FuzzStranger gives rank 0 what anybody may send to its port, and a rank what anybody may answer.
// Nobody gets in without knowing the secret.
func FuzzStranger(f *testing.F) {
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add(append(protocol[:], 0, 0, 0, 2, '{', '}'))
	f.Add(append(protocol[:], 3, 0xff, 0xff, 0xff, '{'))
	join := `{"Kind":"join","Member":{"Rank":1,"Host":"h","PID":2},"Size":2,"Run":"r","Nonce":"AAAA","Proof":"AAAA"}`
	f.Add(append(append(protocol[:], 0, 0, 0, byte(len(join))), join...))
	s := &store{place: Place{Size: 2, LocalSize: 1, Run: "r", Secret: "s"}, seats: make([]seat, 2),
		gathering: map[string]*gathering{}, empty: make(chan struct{})}
	f.Fuzz(func(t *testing.T, said []byte) {
		bounded.Run(t, int64(len(said)), func() {
			_, in := s.admit(says(said))
			require.False(t, in)
		})
		w := &World{wire: says(said), waiting: map[string]chan [][]byte{},
			done: make(chan struct{})}
		bounded.Run(t, int64(len(said)), w.listen)
		var end *RankError
		require.True(t, errors.As(w.Err(), &end))
	})
}
