package state

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/guard"
	"github.com/kasmina-go/kasmina/state/graft"
)

// ErrClosed is wrapped by the error that answers commands submitted to a closed network.
var ErrClosed = errors.New("the network is closed: nothing runs the model")

// queue holds the commands that wait for Apply.
type queue struct {
	mu        sync.Mutex
	submitted []submission
	closed    bool
}

// submission is the commands of one call of Submit.
type submission struct {
	commands []Command
	done     chan<- error // has capacity for the answer
}

// take removes and returns all submissions. With closing set, it also closes the queue.
func (q *queue) take(closing bool) []submission {
	q.mu.Lock()
	defer q.mu.Unlock()
	taken := q.submitted
	q.submitted, q.closed = nil, q.closed || closing
	return taken
}

// Waiting reports whether submitted commands have not been applied yet.
func (n *Network) Waiting() bool {
	n.queue.mu.Lock()
	defer n.queue.mu.Unlock()
	return len(n.queue.submitted) > 0
}

// Submit queues commands that take effect together at the next [Network.Apply]. It may be called
// from any goroutine.
//
// The returned channel has room for one error, so it need not be read. It receives nil once the
// commands have been carried out, the reason if they were rejected, or an error wrapping [ErrClosed]
// if the network is closed, now or before the next Apply. A network without layers answers at once.
//
// The goroutine that calls Apply, and thus a trainer's callbacks, must not wait for the channel,
// because it would wait forever. Such code should use [Network.Do].
func (n *Network) Submit(commands ...Command) <-chan error {
	done := make(chan error, 1)
	if len(n.layers) == 0 {
		done <- n.Do(commands...)
		return done
	}

	n.queue.mu.Lock()
	defer n.queue.mu.Unlock()

	if n.queue.closed {
		done <- errSubmit
		return done
	}

	n.queue.submitted = append(n.queue.submitted, submission{slices.Clone(commands), done})
	return done
}

var errListener = errors.New("state.Submit: a listener panicked before the commands were carried out: nothing was " +
	"done")

var errSubmit = fmt.Errorf("state.Submit: %w: use Network.Do to act at once, or Network.Open when "+
	"something runs the model again", ErrClosed)

// Close declares that Apply will not be called again. All queued commands, and any submitted later,
// are answered with an error wrapping ErrClosed. Nothing else changes.
func (n *Network) Close() {
	for _, s := range n.queue.take(true) {
		s.done <- errSubmit
	}
}

// Refuse answers all queued commands with an error. No command takes effect, and the network stays
// open.
func (n *Network) Refuse(because error) {
	for _, s := range n.queue.take(false) {
		s.done <- because
	}
}

// Open reverses Close. A new network is open.
func (n *Network) Open() {
	n.queue.mu.Lock()
	defer n.queue.mu.Unlock()
	n.queue.closed = false
}

// Apply carries out the queued commands in the order of their submission. It must be called between
// the passes of the model.
func (n *Network) Apply() {
	waiting := n.queue.take(false)

	// If a listener panics, the remaining submissions still get an answer.
	defer func() {
		for _, s := range waiting {
			s.done <- errListener
		}
	}()
	for len(waiting) > 0 {
		s := waiting[0]
		waiting = waiting[1:]
		s.done <- n.do(s.commands)
		n.deliver()
	}
}

// Do carries out commands at once. If one is rejected, none is carried out, and the error names it.
//
// It must be called between the passes of the model, unless the slots provide a lock, in which case
// Do waits for the end of a pass.
func (n *Network) Do(commands ...Command) error {
	defer n.deliver()
	if l, ok := n.slots.(sync.Locker); ok {
		l.Lock()
		defer l.Unlock()
	}
	return n.do(commands)
}

// do carries out commands as one transaction. The resulting events stay queued.
func (n *Network) do(commands []Command) error {
	defer n.lockQuietly()()
	t := transaction{n, map[int]table{}, map[address]undo{}, map[address]SlotParams{}}
	err := guard.Call(blueprints.ErrPanic, "a method of the slots or the strategy", func() error {
		return t.doAll(commands)
	})
	if err != nil {
		t.rollback()
	}
	return err
}

// doAll carries out the commands and then writes the slots.
func (t *transaction) doAll(commands []Command) error {
	for i, c := range commands {
		if err := t.do(c); err != nil {
			if len(commands) > 1 {
				err = fmt.Errorf("command %d of %d, %v: %w", i+1, len(commands), c, err)
			}
			return fmt.Errorf("layer %d: %w", c.Layer, err)
		}
	}

	if err := t.commit(); err != nil {
		return fmt.Errorf("state.Network: writing the slots: %w", err)
	}
	return nil
}

// transaction carries out a group of commands and records their changes so that they can be undone.
type transaction struct {
	*Network
	before map[int]table          // lattices that received commands, as they were before
	seeds  map[address]undo       // seeds that received commands, as they were before
	write  map[address]SlotParams // slots to be written by commit
}

// table holds the state of a lattice outside its seeds.
type table struct {
	strategies []graft.Entry
	pending    int
	telemetry  Telemetry
}

// undo holds the former state of a seed.
type undo struct {
	row  []byte // the bytes that its checksum covers
	crc  uint32
	kept *SlotParams // nil if nothing was saved
}

// do carries out one command and notes the slots to be written for it.
func (t *transaction) do(c Command) error {
	l := t.Lattice(c.Layer)
	if len(t.layers) == 0 {
		return fmt.Errorf("state.%v: %w: there are no layers", c.Action, ErrSeed)
	}
	if l == nil {
		return fmt.Errorf("state.%v: %w: the layer is %d, want 0 to %d", c.Action, ErrSeed,
			c.Layer, len(t.layers)-1)
	}
	if err := l.checkSeed(c.Action.String(), c.Seed); err != nil {
		return err
	}

	at := address{c.Layer, c.Seed}
	t.remember(l, at)
	from, slot := l.at(c.Seed)
	kept := l.keptOf(c.Seed)
	if err := l.do(c); err != nil {
		return err
	}
	if c.Action == Load {
		return t.load(c, address{c.Layer, slot})
	}

	if l.config.Site != blueprints.Chunk {
		if p, ok := t.slots.(Places); ok && c.Action == Germinate {
			return p.Fits(Germination{c.Layer, c.Seed, 0, c.Request.Kind, int(l.epoch)},
				c.Request.Size)
		}
		return nil
	}

	if t.slots == nil {
		return nil
	}

	if c.Action == Germinate {
		_, slot = l.at(c.Seed)
	}
	return t.parameters(c, address{c.Layer, slot}, from, kept)
}

// at returns the stage and slot of a seed.
func (l *Lattice) at(seed int) (Stage, int) {
	return Stage(l.seeds.stage[seed]), int(l.seeds.slot[seed])
}

// parameters notes how the slot of a seed changes after the seed has carried out command c. from is
// the former stage of the seed, and kept holds the saved parameters of the slot, if any.
func (t *transaction) parameters(c Command, slot address, from Stage,
	kept *SlotParams) (err error) {
	l := t.Lattice(c.Layer)
	to, _ := l.at(c.Seed)
	users := l.users[uint16(slot.number)] // including this seed if it is alive
	switch {
	case c.Action == Germinate:
		if users == 1 {
			p, err := t.slots.Start(Germination{c.Layer, c.Seed, slot.number, c.Request.Kind, int(l.epoch)})
			t.write[slot] = t.round(p)
			return err
		}
	case from == to || slot.number == 0:
	case to == Grafting:
		p, written := t.write[slot]
		if !written {
			p, err = t.slots.Read(c.Layer, slot.number)
		}
		l.kept[c.Seed] = p
	case to == RolledBack && users == 0 && kept != nil:
		t.write[slot] = *kept
	}

	return err
}

// load notes that the weights of a Load command replace the first weights of a slot. The remaining
// weights, which the blueprint does not use, are left unchanged.
func (t *transaction) load(c Command, slot address) error {
	if t.slots == nil {
		return fmt.Errorf("state.Load: %w: seed %d: the network has no slots", ErrArgument, c.Seed)
	}

	p, written := t.write[slot]
	if !written {
		var err error
		if p, err = t.slots.Read(c.Layer, slot.number); err != nil {
			return err
		}
	}

	if len(c.Params.Weights) > len(p.Weights) {
		return fmt.Errorf("state.Load: %w: seed %d: got %d weights, but slots have %d", ErrArgument,
			c.Seed, len(c.Params.Weights), len(p.Weights))
	}

	p.Weights, p.Scale = slices.Clone(p.Weights), c.Params.Scale
	copy(p.Weights, c.Params.Weights)
	t.write[slot] = t.round(p)
	return nil
}

// round returns parameters as a slot will hold them, so that commands given together save the same parameters as
// the same commands given one after another.
func (t *transaction) round(p SlotParams) SlotParams {
	if r, ok := t.slots.(Rounder); ok {
		return r.Round(p)
	}
	return p
}

// keptOf returns the saved slot parameters of a seed, or nil if there are none.
func (l *Lattice) keptOf(seed int) *SlotParams {
	if p, ok := l.kept[seed]; ok {
		return &p
	}
	return nil
}

// remember saves the state of a lattice and a seed before their first change.
func (t *transaction) remember(l *Lattice, seed address) {
	if _, known := t.before[seed.layer]; !known {
		t.before[seed.layer] = table{slices.Clone(l.strategies), len(l.pending),
			l.config.Telemetry}
	}
	if _, known := t.seeds[seed]; known {
		return
	}
	t.seeds[seed] = undo{l.sums.Row(seed.number), l.seeds.crc[seed.number], l.keptOf(seed.number)}
}

// commit writes the noted slots, in order.
func (t *transaction) commit() error {
	if len(t.write) == 0 {
		return nil
	}
	var writes []SlotWrite
	for slot, p := range t.write {
		writes = append(writes, SlotWrite{slot.layer, slot.number, p})
	}
	slices.SortFunc(writes, func(a, b SlotWrite) int {
		return cmp.Or(a.Layer-b.Layer, a.Slot-b.Slot)
	})
	return t.slots.Write(writes)
}

// rollback undoes all changes.
func (t *transaction) rollback() {
	for seed, u := range t.seeds {
		l := t.Lattice(seed.layer)
		l.sums.SetRow(seed.number, u.row)
		l.seeds.crc[seed.number] = u.crc
		if delete(l.kept, seed.number); u.kept != nil {
			l.kept[seed.number] = *u.kept
		}
	}

	for layer, b := range t.before {
		l := t.Lattice(layer)
		l.strategies, l.pending = b.strategies, l.pending[:b.pending]
		l.config.Telemetry = b.telemetry
		l.countUsers()
	}
}
