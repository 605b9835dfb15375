package comm

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// A message is exchanged between a rank and the store. Its kind determines which fields are used.
type message struct {
	Kind   kind
	Member member
	Size   int    `json:",omitempty"` // number of ranks
	Run    string `json:",omitempty"`
	Port   int    `json:",omitempty"` // port the rank connected to
	Key    string `json:",omitempty"` // key of a gathering
	Bytes  int64  `json:",omitempty"` // size of a value that is too large to send
	Text   string `json:",omitempty"` // reason for a rejection or failure
	Pulse  *pulse `json:",omitempty"`

	// Deadline is the deadline configured at rank 0.
	Deadline time.Duration `json:",omitempty"`

	// Lengths holds the lengths of Values, which follow the JSON text as raw bytes.
	Lengths []int    `json:",omitempty"`
	Values  [][]byte `json:"-"` // values of a gathering, from one rank or from all
}

type kind string

const (
	join    kind = "join"    // from a rank: request to join
	welcome kind = "welcome" // from the store: request accepted
	refused kind = "refused" // from the store: wrong run or port, try elsewhere
	invalid kind = "invalid" // from the store: request rejected permanently
	give    kind = "give"    // from a rank: its value in a gathering
	all     kind = "all"     // from the store: the values of a gathering, or its error
	beat    kind = "beat"    // from either: sign of life, with a pulse if from a rank
	fail    kind = "fail"    // from a rank: it has failed
	failed  kind = "failed"  // from the store: a rank has failed
	leave   kind = "leave"   // from a rank: it has finished
)

// A member identifies the process of a rank.
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

const (
	// MaxGather is the maximum total size in bytes of the values in one [World.Gather].
	MaxGather = 1 << 30

	// maxHead is the maximum size of a message without its values.
	maxHead = 16 << 20

	// maxGreeting is the maximum size of a message exchanged before a rank has joined.
	maxGreeting = 64 << 10
)

// chunk is the unit for reading and writing large values. Timeouts apply to each chunk.
const chunk = 1 << 20

// writeTimeout limits the time for writing one chunk.
const writeTimeout = 30 * time.Second

var errGarbled = errors.New("received data that is not a message of this program")

// A wire sends and receives messages over an authenticated connection. Sending never blocks: a
// goroutine writes posted messages in order.
type wire struct {
	conn  net.Conn
	heard atomic.Int64 // time of the last received data, in nanoseconds since start

	mu     sync.Mutex
	more   sync.Cond
	queue  []posted
	closed bool
}

// A posted message is queued for writing.
type posted struct {
	message message
	done    chan struct{} // closed when the message is written or dropped
}

// start is the reference for wire.heard.
var start = time.Now()

// newWire returns a wire that owns conn.
func newWire(conn net.Conn) *wire {
	w := &wire{conn: conn}
	w.more.L = &w.mu
	w.hear()
	go w.write()
	return w
}

// hear records that data was received now.
func (w *wire) hear() { w.heard.Store(int64(time.Since(start))) }

// silence returns the time since data was last received.
func (w *wire) silence() time.Duration {
	return time.Since(start) - time.Duration(w.heard.Load())
}

// post queues a message. The returned channel is closed when the message has been written or
// dropped.
func (w *wire) post(m message) <-chan struct{} {
	p := posted{m, make(chan struct{})}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		close(p.done)
		return p.done
	}
	w.queue = append(w.queue, p)
	w.more.Signal()
	return p.done
}

// flush waits up to patience until all posted messages are written or dropped.
func (w *wire) flush(patience time.Duration) {
	w.mu.Lock()
	var last <-chan struct{}
	if n := len(w.queue); n > 0 {
		last = w.queue[n-1].done
	}

	w.mu.Unlock()
	if last == nil {
		return
	}

	select {
	case <-last:
	case <-time.After(patience):
	}
}

// Close closes the connection and drops queued messages.
func (w *wire) Close() error {
	w.mu.Lock()
	closed := w.closed
	w.closed = true
	w.more.Signal()
	w.mu.Unlock()
	if closed {
		return nil
	}
	return w.conn.Close()
}

// write writes posted messages until the wire is closed. A message stays in the queue while it is
// being written, so that flush waits for it.
func (w *wire) write() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		for len(w.queue) == 0 && !w.closed {
			w.more.Wait()
		}
		if w.closed {
			for _, p := range w.queue {
				close(p.done)
			}
			w.queue = nil
			return
		}

		next := w.queue[0]
		w.mu.Unlock()
		err := w.send(next.message)
		if err != nil {
			w.Close()
		}
		w.mu.Lock()
		if err == nil {
			close(next.done)
			w.queue = w.queue[1:]
		}
	}
}

// send writes a message. A slow peer is tolerated as long as it keeps reading.
func (w *wire) send(m message) error {
	for _, v := range m.Values {
		m.Lengths = append(m.Lengths, len(v))
	}

	head, err := json.Marshal(m)
	if err != nil {
		return err
	}

	if len(head) > maxHead {
		return fmt.Errorf("a message of %d bytes, want at most %d", len(head), maxHead)
	}

	// Small messages are sent in a single write.
	frame := binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(head)), uint32(len(head)))
	frame = append(frame, head...)
	values := m.Values
	for len(values) > 0 && len(frame)+len(values[0]) <= 16<<10 {
		frame, values = append(frame, values[0]...), values[1:]
	}

	for _, part := range append([][]byte{frame}, values...) {
		for len(part) > 0 {
			if err := w.conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
				return err
			}
			n, err := w.conn.Write(part[:min(len(part), chunk)])
			if err != nil {
				return err
			}
			part = part[n:]
		}
	}

	return nil
}

// receive reads a message. maxHead and maxValues limit its size in bytes, without and with only its
// values.
func (w *wire) receive(maxHead, maxValues int64) (m message, err error) {
	var length [4]byte
	if _, err := io.ReadFull(w.conn, length[:]); err != nil {
		return m, err
	}

	w.hear()
	head, err := w.read(int64(binary.BigEndian.Uint32(length[:])), maxHead)
	if err != nil {
		return m, err
	}

	if err := json.Unmarshal(head, &m); err != nil {
		return m, fmt.Errorf("%w: %w", errGarbled, err)
	}

	for _, n := range m.Lengths {
		value, err := w.read(int64(n), maxValues)
		if err != nil {
			return m, err
		}
		maxValues -= int64(n)
		m.Values = append(m.Values, value)
	}

	w.hear()
	return m, nil
}

// read reads n bytes, or fails if n exceeds limit. Memory is allocated as data arrives, not for the
// announced length.
func (w *wire) read(n, limit int64) ([]byte, error) {
	if n < 0 || n > limit {
		return nil, errGarbled
	}

	var b bytes.Buffer
	for int64(b.Len()) < n {
		if _, err := io.CopyN(&b, w.conn, min(n-int64(b.Len()), chunk)); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
		w.hear()
	}

	return b.Bytes(), nil
}
