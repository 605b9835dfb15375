package loopback

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/comm/internal/channel"
)

// header identifies the operation that a message belongs to.
type header struct {
	Call  call
	Type  comm.Type
	Op    comm.Op
	_     uint8
	Root  uint32
	Turn  uint64
	Count uint64
}

// call identifies a collective.
type call uint8

const (
	allReduce call = iota
	reduceScatter
	allGather
	broadcast
	sendReceive
	bye // no more messages follow
)

// String describes the collective for error messages.
func (h header) String() string {
	name := [...]string{"AllReduce", "ReduceScatter", "AllGather", "Broadcast", "Send and Recv",
		"Close"}[h.Call]
	switch h.Call {
	case allReduce, reduceScatter:
		name += " by " + h.Op.String()
	case broadcast:
		name += fmt.Sprintf(" from rank %d", h.Root)
	}
	return fmt.Sprintf("%s of %d %v", name, h.Count, h.Type)
}

// message is the data of an operation for one rank.
type message struct {
	header header
	data   []byte
}

// peer is the connection to another rank. The group's lock guards all fields above mu; mu guards
// the queue.
type peer struct {
	rank           int
	conn           net.Conn
	sent, received uint64 // number of messages that have been numbered
	inbox          map[uint64]message
	left           bool

	mu      sync.Mutex
	more    sync.Cond
	outbox  []message
	ended   bool
	written chan struct{} // closed when the last message has been written
}

// newPeer returns the peer for a connection.
func newPeer(rank int, conn net.Conn) *peer {
	p := &peer{rank: rank, conn: conn, inbox: map[uint64]message{}, written: make(chan struct{})}
	p.more.L = &p.mu
	return p
}

// queue adds a message without blocking, so that no rank waits for another in order to send.
func (p *peer) queue(h header, data []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()

	if !p.ended {
		p.outbox = append(p.outbox, message{h, data})
		p.more.Signal()
	}
}

// end ends the connection. If well is true, it delivers the queued messages first. Otherwise it
// drops them.
func (p *peer) end(well bool) {
	p.mu.Lock()
	defer p.mu.Unlock()

	if p.ended {
		return
	}

	p.ended = true
	if well {
		p.outbox = append(p.outbox, message{header: header{Call: bye}})
	} else {
		p.outbox = nil
		p.conn.Close()
	}

	p.more.Signal()
}

// writeAll writes queued messages until the peer ends.
func (p *peer) writeAll(g *Group) {
	defer close(p.written)
	w := bufio.NewWriter(p.conn)
	for {
		p.mu.Lock()
		for len(p.outbox) == 0 && !p.ended {
			p.more.Wait()
		}
		list, ended := p.outbox, p.ended
		p.outbox = nil
		p.mu.Unlock()
		var err error
		for _, m := range list {
			err = errors.Join(err, binary.Write(w, binary.BigEndian, m.header),
				binary.Write(w, binary.BigEndian, uint64(len(m.data))))
			_, werr := w.Write(m.data)
			err = errors.Join(err, werr)
		}

		if err = errors.Join(err, w.Flush()); err != nil && !ended {
			g.lost(p, err)
		}
		if ended || err != nil {
			p.conn.Close()
			return
		}
	}
}

// readAll stores received messages in the inbox until the peer ends.
func (p *peer) readAll(g *Group) {
	r := bufio.NewReader(p.conn)
	for {
		var m message
		var length uint64
		err := binary.Read(r, binary.BigEndian, &m.header)
		if err == nil {
			err = binary.Read(r, binary.BigEndian, &length)
		}
		if err == nil && (m.header.Call > bye || length > maxBytes) {
			err = errors.New("it sent data that is not a message")
		}
		if err == nil && m.header.Call == bye {
			g.mu.Lock()
			p.left = true
			g.changed.Broadcast()
			g.mu.Unlock()
			return
		}

		if err == nil {
			m.data = make([]byte, length)
			_, err = io.ReadFull(r, m.data)
		}

		if err != nil {
			g.lost(p, err)
			return
		}

		g.mu.Lock()
		p.inbox[m.header.Turn] = m
		g.changed.Broadcast()
		g.mu.Unlock()
	}
}

// maxBytes is the maximum length of a message's data.
const maxBytes = 1 << 40

// lost terminates the group because the connection to a rank was lost, unless that rank has closed
// its group.
func (g *Group) lost(p *peer, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !p.left {
		g.end(fmt.Errorf("loopback: rank %d: %w: %w", p.rank, comm.ErrPeer, err))
	}
}

// New connects all ranks of a world. Every rank must call it.
func New(ctx context.Context, w *comm.World, d Device) (*Group, error) {
	g := &Group{world: w, device: d, peers: make([]*peer, w.Size()),
		registrations: map[comm.Registration]bool{}}
	g.Singles, g.changed.L = comm.NewSingles(g.Batch), &g.mu
	if w.Size() == 1 {
		return g, nil
	}

	conns, err := connect(ctx, w)
	if err != nil {
		return nil, fmt.Errorf("loopback: rank %d: %w", w.Rank(), err)
	}

	for r, conn := range conns {
		if conn != nil {
			g.peers[r] = newPeer(r, conn)
		}
	}

	for _, p := range g.peers {
		if p != nil {
			go p.writeAll(g)
			go p.readAll(g)
		}
	}

	return g, nil
}

// invitation contains the address of a rank's listener and a random word that distinguishes groups
// with the same secret.
type invitation struct {
	Address string
	Word    [16]byte
}

// greeting is the first message of a rank that connects to another.
type greeting struct {
	Word [16]byte
	Rank uint32
}

// connect returns an authenticated connection to every other rank. The higher rank dials the lower
// one.
func connect(ctx context.Context, w *comm.World) (conns []net.Conn, err error) {
	conns = make([]net.Conn, w.Size())
	defer func() {
		if err != nil {
			closeAll(conns)
		}
	}()

	id, err := channel.New(string(w.Place().Secret))
	if err != nil {
		return nil, err
	}

	listener, err := id.Listen("127.0.0.1:0")
	if err != nil {
		return nil, err
	}

	defer listener.Close()

	mine := invitation{Address: listener.Addrs()[0].String()}
	rand.Read(mine.Word[:])
	text, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}

	texts, err := w.Gather(ctx, "loopback", text)
	if err != nil {
		return nil, err
	}

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { listener.Close() })()
	go func() {
		select {
		case <-w.Done(): // a failed rank will not connect
			cancel()
		case <-ctx.Done():
		}
	}()

	for r := range w.Rank() {
		var to invitation
		if err := json.Unmarshal(texts[r], &to); err != nil {
			return conns, err
		}
		if conns[r], err = id.Dial(ctx, to.Address); err != nil {
			return conns, errors.Join(err, w.Err())
		}
		err := binary.Write(conns[r], binary.BigEndian, greeting{to.Word, uint32(w.Rank())})
		if err != nil {
			return conns, errors.Join(err, w.Err())
		}
	}

	for n := w.Rank() + 1; n < w.Size(); {
		conn, err := listener.Accept()
		if err != nil {
			return conns, errors.Join(err, context.Cause(ctx), w.Err())
		}
		if r, ok := hear(conn, mine.Word, w); ok && conns[r] == nil {
			conns[r] = conn
			n++
		} else {
			conn.Close()
		}
	}

	return conns, nil
}

// closeAll closes the connections that are not nil.
func closeAll(conns []net.Conn) {
	for _, c := range conns {
		if c != nil {
			c.Close()
		}
	}
}

// hear reads the greeting of a higher rank. ok is false if it does not belong to this group.
func hear(conn net.Conn, word [16]byte, w *comm.World) (rank int, ok bool) {
	var heard greeting
	if conn.SetReadDeadline(time.Now().Add(channel.HandshakeTimeout)) != nil ||
		binary.Read(conn, binary.BigEndian, &heard) != nil ||
		conn.SetReadDeadline(time.Time{}) != nil {
		return 0, false
	}
	rank = int(heard.Rank)
	return rank, heard.Word == word && rank > w.Rank() && rank < w.Size()
}
