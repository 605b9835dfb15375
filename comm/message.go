package comm

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// message is what ranks and the store say to each other. What it means depends on its kind.
type message struct {
	Kind   kind
	Key    string   `json:",omitempty"` // of a gathering
	Value  []byte   `json:",omitempty"` // one rank's part
	Values [][]byte `json:",omitempty"` // all ranks' parts
	Nonce  []byte   `json:",omitempty"`
	Proof  []byte   `json:",omitempty"` // of knowing the secret
	Member member
	Size   int    `json:",omitempty"`
	Run    string `json:",omitempty"`
	Text   string `json:",omitempty"`
	Step   int64  `json:",omitempty"`
}

type kind string

const (
	hello   kind = "hello"   // store: who are you
	join    kind = "join"    // rank: this is who I am
	welcome kind = "welcome" // store: you are in
	refused kind = "refused" // store: this is another run
	invalid kind = "invalid" // store: it is this run, but you cannot be in it
	give    kind = "give"    // rank: my part of a gathering
	all     kind = "all"     // store: all parts of a gathering
	report  kind = "report"  // rank: I have come to this step
	fail    kind = "fail"    // rank: I cannot go on
	failed  kind = "failed"  // store: that rank cannot go on
	leave   kind = "leave"   // rank: I am done
)

// member says which process a rank is.
type member struct {
	Rank int
	Host string
	PID  int
}

func (m member) String() string {
	if m.Host == "" {
		return fmt.Sprintf("rank %d", m.Rank)
	}
	return fmt.Sprintf("rank %d (process %d on %s)", m.Rank, m.PID, m.Host)
}

// Bounds of messages, so that a stranger's bytes are not taken for a length.
const (
	maxMessage  = 64 << 20
	maxGreeting = 64 << 10 // until somebody has shown that he knows the secret
)

var protocol = [8]byte{'k', 'a', 's', 'm', 'c', 'o', 'm', 1}

var errStranger = errors.New("what listens there is no rank 0 of this program")

// wire is a connection on which messages go both ways.
type wire struct {
	net.Conn
	write sync.Mutex
}

// writeTimeout is how long a peer that reads nothing may hold up a message.
const writeTimeout = 30 * time.Second

func (w *wire) send(m message) error {
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if len(text) > maxMessage {
		return fmt.Errorf("a message of %d bytes: at most %d", len(text), maxMessage)
	}
	frame := append(protocol[:], 0, 0, 0, 0)
	binary.BigEndian.PutUint32(frame[len(protocol):], uint32(len(text)))
	w.write.Lock()
	defer w.write.Unlock()
	if err := w.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	_, err = w.Write(append(frame, text...))
	return err
}

// receive waits for a message of at most so many bytes.
func (w *wire) receive(most uint32) (m message, err error) {
	var head [len(protocol) + 4]byte
	if _, err := io.ReadFull(w, head[:]); err != nil {
		return m, err
	}
	length := binary.BigEndian.Uint32(head[len(protocol):])
	if [len(protocol)]byte(head[:]) != protocol || length > most {
		return m, errStranger
	}
	var text bytes.Buffer // which grows with what comes, not with what is announced
	if _, err := io.CopyN(&text, w, int64(length)); err != nil {
		return m, err
	}
	return m, json.Unmarshal(text.Bytes(), &m)
}

// proof shows that somebody knows the secret, for the nonce of the other side.
func proof(secret, nonce []byte, role string, m message) []byte {
	h := hmac.New(sha256.New, secret)
	fmt.Fprintf(h, "%s|%x|%d|%d|%q", role, nonce, m.Member.Rank, m.Size, m.Run)
	return h.Sum(nil)
}

func newNonce() []byte {
	nonce := make([]byte, 16)
	rand.Read(nonce) // never fails
	return nonce
}

// keepAlive lets the kernel find, within 15 s, a host that is gone. It does not depend on how busy
// the process at the other end is.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 5 * time.Second,
	Count: 2}
