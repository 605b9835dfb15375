// Package loopback implements [comm.Group] over TCP between processes of one host, or goroutines of
// one process. Tests use it to run any number of ranks without a GPU. Its connections are encrypted
// and authenticated with the secret of the run, as in package comm.
//
// It behaves like NCCL, only a thousand times slower: work runs on streams, sends and receives wait
// for their counterparts, sums depend on the number of ranks, and after the loss of a rank, later work
// fails, as [Group.Err] reports. In one respect it is stricter. Ranks that call different collectives
// get an error naming them, where NCCL would hang or mix up data.
package loopback

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/kasmina-go/kasmina/comm"
)

// Group is a [comm.Group] over TCP. Its methods may be called from any goroutine.
type Group struct {
	comm.Singles

	world  *comm.World
	device Device
	peers  []*peer // by rank; nil for this rank

	issue sync.Mutex // held while operations are numbered and enqueued

	mu            sync.Mutex
	changed       sync.Cond
	cause         error // the reason why the group has ended
	registrations map[comm.Registration]bool
	registered    comm.Registration
}

var _ comm.Uncapturable = (*Group)(nil)

// errLeft is the cause after Close.
var errLeft = fmt.Errorf("loopback: %w", comm.ErrClosed)

// Rank returns the rank of this process.
func (g *Group) Rank() int { return g.world.Rank() }

// Size returns the number of ranks.
func (g *Group) Size() int { return g.world.Size() }

// Uncaptured implements [comm.Uncapturable].
func (g *Group) Uncaptured() {}

// operation is a collective at one rank. It sends its data immediately, waits for the data of other
// ranks, and then calls finish.
type operation struct {
	header header  // the call that all other ranks must make too
	read   []piece // data to send to each rank
	write  []piece // where to write the data from each rank; the address is 0 if only finish reads it
	local  piece   // this rank's own contribution
	finish finish  // may be nil
	result piece   // where finish writes the result
	turns  turns
}

// finish computes the result from this rank's own contribution and the received ones.
type finish func(own []byte, received [][]byte, result []byte) error

// piece is memory to send to a rank or to receive from one.
type piece struct {
	peer  int
	at    comm.Ptr
	bytes int
}

// turns holds the numbers of the operation's messages to and from each rank.
type turns struct{ sent, received []uint64 }

// calls records the collectives of a batch as operations.
type calls struct {
	g       *Group
	list    []operation
	stream  comm.Stream
	started bool
}

// add adds an operation to the batch.
func (c *calls) add(o operation, s comm.Stream) error {
	if c.started && s != c.stream {
		return fmt.Errorf("loopback: a batch on streams %d and %d: want one", c.stream, s)
	}
	c.stream, c.started = s, true
	c.list = append(c.list, o)
	return nil
}

// otherRanks returns the ranks other than this one.
func (c *calls) otherRanks() (ranks []int) {
	for r := range c.g.Size() {
		if r != c.g.Rank() {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// AllReduce implements [comm.Collectives].
func (c *calls) AllReduce(dst, src comm.Ptr, count int, t comm.Type, op comm.Op,
	s comm.Stream) error {
	if err := comm.CheckCall("AllReduce", c.g, count, t, op, 0); err != nil {
		return err
	}

	bytes := count * t.Size()
	o := operation{header: header{Call: allReduce, Type: t, Op: op, Count: uint64(count)},
		local: piece{at: src, bytes: bytes}, result: piece{at: dst, bytes: bytes}}
	for _, r := range c.otherRanks() {
		o.read = append(o.read, piece{r, src, bytes})
		o.write = append(o.write, piece{peer: r, bytes: bytes})
	}

	o.finish = c.reduction(t, op)
	return c.add(o, s)
}

// ReduceScatter implements [comm.Collectives].
func (c *calls) ReduceScatter(dst, src comm.Ptr, count int, t comm.Type, op comm.Op,
	s comm.Stream) error {
	if err := comm.CheckCall("ReduceScatter", c.g, count, t, op, 0); err != nil {
		return err
	}

	bytes := count * t.Size()
	o := operation{header: header{Call: reduceScatter, Type: t, Op: op, Count: uint64(count)},
		local:  piece{at: src.Offset(c.g.Rank()*count, t), bytes: bytes},
		result: piece{at: dst, bytes: bytes}}
	for _, r := range c.otherRanks() {
		o.read = append(o.read, piece{r, src.Offset(r*count, t), bytes})
		o.write = append(o.write, piece{peer: r, bytes: bytes})
	}

	o.finish = c.reduction(t, op)
	return c.add(o, s)
}

// reduction returns a finish that reduces this rank's part and the received ones.
func (c *calls) reduction(t comm.Type, op comm.Op) finish {
	me := c.g.Rank()
	return func(own []byte, received [][]byte, written []byte) error {
		return reduceRing(written, slices.Insert(slices.Clone(received), me, own), t, op)
	}
}

// AllGather implements [comm.Collectives].
func (c *calls) AllGather(dst, src comm.Ptr, count int, t comm.Type, s comm.Stream) error {
	if err := comm.CheckCall("AllGather", c.g, count, t, 0, 0); err != nil {
		return err
	}

	bytes := count * t.Size()
	o := operation{header: header{Call: allGather, Type: t, Count: uint64(count)},
		local:  piece{at: src, bytes: bytes},
		result: piece{at: dst.Offset(c.g.Rank()*count, t), bytes: bytes}}
	for _, r := range c.otherRanks() {
		o.read = append(o.read, piece{r, src, bytes})
		o.write = append(o.write, piece{r, dst.Offset(r*count, t), bytes})
	}

	o.finish = func(own []byte, _ [][]byte, written []byte) error {
		copy(written, own)
		return nil
	}
	return c.add(o, s)
}

// Broadcast implements [comm.Collectives].
func (c *calls) Broadcast(buffer comm.Ptr, count int, t comm.Type, root int, s comm.Stream) error {
	if err := comm.CheckCall("Broadcast", c.g, count, t, 0, root); err != nil {
		return err
	}

	bytes := count * t.Size()
	o := operation{header: header{Call: broadcast, Type: t, Root: uint32(root),
		Count: uint64(count)}}
	if root != c.g.Rank() {
		o.write = []piece{{root, buffer, bytes}}
		return c.add(o, s)
	}

	for _, r := range c.otherRanks() {
		o.read = append(o.read, piece{r, buffer, bytes})
	}

	return c.add(o, s)
}

// Send implements [comm.Collectives].
func (c *calls) Send(src comm.Ptr, count int, t comm.Type, to int, s comm.Stream) error {
	if err := c.checkPair("Send", count, t, to); err != nil {
		return err
	}
	return c.add(operation{header: header{Call: sendReceive, Type: t, Count: uint64(count)},
		read: []piece{{to, src, count * t.Size()}}}, s)
}

// Recv implements [comm.Collectives].
func (c *calls) Recv(dst comm.Ptr, count int, t comm.Type, from int, s comm.Stream) error {
	if err := c.checkPair("Recv", count, t, from); err != nil {
		return err
	}
	return c.add(operation{header: header{Call: sendReceive, Type: t, Count: uint64(count)},
		write: []piece{{from, dst, count * t.Size()}}}, s)
}

// checkPair checks the arguments of Send and Recv.
func (c *calls) checkPair(name string, count int, t comm.Type, peer int) error {
	if err := comm.CheckCall(name, c.g, count, t, 0, peer); err != nil {
		return err
	}
	if peer == c.g.Rank() {
		return fmt.Errorf("loopback: %s with this rank itself, %d", name, peer)
	}
	return nil
}

// Batch runs the collectives that f calls as one operation.
func (g *Group) Batch(f func(c comm.Collectives) error) error {
	c := &calls{g: g}
	if err := f(c); err != nil {
		return err
	}

	if len(c.list) == 0 {
		return g.Err()
	}

	return g.enqueue(c)
}

// enqueue adds the operations to the stream. Messages are numbered at this point so that those of
// different streams cannot be confused. When a graph runs the work again, its messages get new
// numbers.
func (g *Group) enqueue(c *calls) error {
	g.issue.Lock()
	defer g.issue.Unlock()

	if err := g.Err(); err != nil {
		return err
	}

	g.number(c.list)
	again := false
	err := g.device.Enqueue(c.stream, func() error {
		if again {
			g.number(c.list)
		}
		again = true
		return g.run(c.list)
	})

	if err != nil {
		g.Abort(err)
	}

	return err
}

// number assigns numbers to the messages of the operations.
func (g *Group) number(list []operation) {
	g.mu.Lock()
	defer g.mu.Unlock()

	for i := range list {
		o := &list[i]
		o.turns = turns{}
		for _, p := range o.read {
			o.turns.sent = append(o.turns.sent, g.peers[p.peer].sent)
			g.peers[p.peer].sent++
		}
		for _, p := range o.write {
			o.turns.received = append(o.turns.received, g.peers[p.peer].received)
			g.peers[p.peer].received++
		}
	}
}

// run sends all data before it waits for any.
func (g *Group) run(list []operation) (err error) {
	defer func() {
		if err != nil {
			g.Abort(err)
			err = g.Err()
		}
	}()

	own := make([][]byte, len(list))
	for i := range list {
		if own[i], err = g.send(&list[i]); err != nil {
			return err
		}
	}

	for i := range list {
		if err := g.receive(&list[i], own[i]); err != nil {
			return err
		}
	}

	return nil
}

// send queues copies of the data for other ranks, and returns a copy of this rank's own
// contribution.
func (g *Group) send(o *operation) ([]byte, error) {
	for i, p := range o.read {
		data, err := g.device.Bytes(p.at, p.bytes)
		if err != nil {
			return nil, err
		}
		h := o.header
		h.Turn = o.turns.sent[i]
		g.peers[p.peer].queue(h, slices.Clone(data))
	}

	own, err := g.device.Bytes(o.local.at, o.local.bytes)
	if o.finish == nil || o.local.bytes == 0 {
		return nil, nil
	}

	return slices.Clone(own), err
}

// receive waits for the data of other ranks and computes the result.
func (g *Group) receive(o *operation, own []byte) error {
	var received [][]byte
	for i, p := range o.write {
		data, err := g.await(p.peer, o.turns.received[i], o.header)
		if err != nil {
			return err
		}
		if p.at == 0 || p.bytes == 0 {
			received = append(received, data)
			continue
		}
		to, err := g.device.Bytes(p.at, p.bytes)
		if err != nil {
			return err
		}
		copy(to, data)
	}

	if o.finish == nil || o.result.bytes == 0 {
		return nil
	}

	written, err := g.device.Bytes(o.result.at, o.result.bytes)
	if err != nil {
		return err
	}

	return o.finish(own, received, written)
}

// await waits for a message from a rank and checks that the rank called the same collective.
func (g *Group) await(rank int, turn uint64, want header) ([]byte, error) {
	g.mu.Lock()
	defer g.mu.Unlock()

	p := g.peers[rank]
	for {
		if m, ok := p.inbox[turn]; ok {
			delete(p.inbox, turn)
			want.Turn = m.header.Turn
			if m.header != want {
				return nil, fmt.Errorf("loopback: rank %d called %v, rank %d called %v: all "+
					"ranks must call the same, in the same order", rank,
					m.header, g.Rank(), want)
			}
			return m.data, nil
		}

		if g.cause != nil {
			return nil, g.cause
		}
		if p.left {
			return nil, fmt.Errorf("loopback: rank %d has left, rank %d waits for its %v", rank,
				g.Rank(),
				want)
		}
		g.changed.Wait()
	}
}

// Alloc allocates memory of the device.
func (g *Group) Alloc(bytes int) (comm.Ptr, error) {
	return g.device.Alloc(bytes)
}

// Free frees memory.
func (g *Group) Free(p comm.Ptr) error {
	return g.device.Free(p)
}

// Register registers memory.
func (g *Group) Register(p comm.Ptr, bytes int) (comm.Registration, error) {
	if _, err := g.device.Bytes(p, bytes); err != nil {
		return 0, err
	}

	g.mu.Lock()
	defer g.mu.Unlock()

	g.registered++
	g.registrations[g.registered] = true
	return g.registered, nil
}

// Deregister reverses Register.
func (g *Group) Deregister(r comm.Registration) error {
	g.mu.Lock()
	defer g.mu.Unlock()

	if !g.registrations[r] {
		return fmt.Errorf("loopback: nothing is registered as %d", r)
	}
	delete(g.registrations, r)
	return nil
}

// Err returns the reason why the group has ended, or nil if it has not.
func (g *Group) Err() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.cause
}

// Abort terminates all work.
func (g *Group) Abort(cause error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.end(cause)
}

// end ends the group, unless it has already ended. The caller holds the lock.
func (g *Group) end(cause error) {
	if g.cause != nil {
		return
	}

	g.cause = cause
	g.changed.Broadcast()
	for _, p := range g.peers {
		if p != nil {
			p.end(errors.Is(cause, comm.ErrClosed))
		}
	}
}

// Close announces that no more messages will follow, and closes the connections.
func (g *Group) Close() error {
	g.Abort(errLeft)
	for _, p := range g.peers {
		if p != nil {
			<-p.written
		}
	}
	if err := g.Err(); !errors.Is(err, comm.ErrClosed) {
		return err
	}
	return nil
}
