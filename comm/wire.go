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

// A message is what a rank and the store say to each other. Its meaning depends on its kind.
type message struct {
	Kind   kind
	Member member
	Size   int    `json:",omitempty"` // number of ranks
	Run    string `json:",omitempty"`
	Port   int    `json:",omitempty"` // at which the rank found the store
	Key    string `json:",omitempty"` // of a gathering
	Bytes  int64  `json:",omitempty"` // of a value that is too large to send
	Text   string `json:",omitempty"` // why something is refused or has failed
	Pulse  *pulse `json:",omitempty"`

	// Deadline is how long any rank may be silent, as rank 0 was told.
	Deadline time.Duration `json:",omitempty"`

	// Lengths has the lengths of Values, which follow the message as they are.
	Lengths []int    `json:",omitempty"`
	Values  [][]byte `json:"-"` // one rank's part of a gathering, or those of all
}

type kind string

const (
	join    kind = "join"    // rank: this is who I am
	welcome kind = "welcome" // store: you are in
	refused kind = "refused" // store: this is not the place that you are looking for
	invalid kind = "invalid" // store: it is, but you cannot be in this run
	give    kind = "give"    // rank: my part of a gathering
	all     kind = "all"     // store: all parts of a gathering, or why there are none
	beat    kind = "beat"    // either: I am alive; from a rank with its pulse
	fail    kind = "fail"    // rank: I cannot go on
	failed  kind = "failed"  // store: that rank cannot go on
	leave   kind = "leave"   // rank: I am done
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
	// MaxGather is the most bytes that the values of one [World.Gather] may have together.
	MaxGather = 1 << 30

	// maxHead bounds a message without its values, for as many ranks as there may be.
	maxHead = 16 << 20

	// maxGreeting bounds messages until a rank has joined.
	maxGreeting = 64 << 10
)

// chunk is how much is read or written between two looks at the clock.
const chunk = 1 << 20

// writeTimeout is how long a peer may take none of what is sent to it.
const writeTimeout = 30 * time.Second

var errGarbled = errors.New("what came is no message of this program")

// A wire carries messages over a connection, which is authenticated. Sending never blocks: a
// goroutine writes what was posted, in order.
type wire struct {
	conn  net.Conn
	heard atomic.Int64 // when something last came, in nanoseconds since start

	mu     sync.Mutex
	more   sync.Cond
	queue  []posted
	closed bool
}

// posted is a message that waits to be written.
type posted struct {
	message message
	done    chan struct{} // closed once it is written or never will be
}

// start is the origin of the times that wires keep.
var start = time.Now()

// newWire takes over a connection.
func newWire(conn net.Conn) *wire {
	w := &wire{conn: conn}
	w.more.L = &w.mu
	w.hear()
	go w.write()
	return w
}

// hear notes that something came just now.
func (w *wire) hear() { w.heard.Store(int64(time.Since(start))) }

// silence returns how long nothing has come.
func (w *wire) silence() time.Duration {
	return time.Since(start) - time.Duration(w.heard.Load())
}

// post queues a message. The channel that it returns is closed once the message has been handed to
// the system, or cannot be any more.
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

// flush waits until all that was posted is written, or cannot be, but not longer than patience.
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

// Close cuts the connection. What was posted and is not written yet is lost.
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

// write writes what is posted until the wire is closed. The message being written stays in the
// queue, so that flush waits for it.
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

// send writes a message. The peer may take as long as it likes as long as it takes something.
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

	// A small message is one write, and so one packet.
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

// receive waits for a message, whose head and values may have so many bytes.
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

// read reads n bytes, of which there may be most. It takes memory as they come, not as they are
// announced.
func (w *wire) read(n, most int64) ([]byte, error) {
	if n < 0 || n > most {
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
