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

// ErrClosed is wrapped by the answer to commands that nobody is there to carry out.
var ErrClosed = errors.New("nobody runs the model any more")

// queue is the commands that wait for Apply.
type queue struct {
	mu        sync.Mutex
	submitted []submission
	closed    bool
}

type submission struct {
	commands []Command
	done     chan<- error // has room for the answer
}

// take empties the queue, and closes it if asked to.
func (q *queue) take(closing bool) []submission {
	q.mu.Lock()
	defer q.mu.Unlock()
	taken := q.submitted
	q.submitted, q.closed = nil, q.closed || closing
	return taken
}

// Waiting reports whether commands have been submitted that have not been applied.
func (n *Network) Waiting() bool {
	n = n.orNone()
	n.queue.mu.Lock()
	defer n.queue.mu.Unlock()
	return len(n.queue.submitted) > 0
}

// Submit hands over commands that take effect together at the next [Network.Apply]. The channel,
// which need not be read, gets nil then, or why they were refused. It is an ErrClosed when the
// network is closed, now or before the next Apply. It may be called from any goroutine. The one
// that calls Apply, such as that of a trainer's callbacks, would wait for the channel without end,
// and has [Network.Do]. A network without layers answers at once.
func (n *Network) Submit(commands ...Command) <-chan error {
	n = n.orNone()
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

var errListener = errors.New("state.Submit: a listener has panicked before its turn: nothing was " +
	"done")

var errSubmit = fmt.Errorf("state.Submit: %w: Network.Do acts at once, and Network.Open says "+
	"that somebody runs it again", ErrClosed)

// Close says that nobody will call Apply: what waits for it is answered with ErrClosed now, and
// what is submitted later at once. All else goes on as before.
func (n *Network) Close() {
	n = n.orNone()
	for _, s := range n.queue.take(true) {
		s.done <- errSubmit
	}
}

// Refuse answers the commands that wait for Apply with an error, and none of them takes effect. The
// network stays open.
func (n *Network) Refuse(because error) {
	n = n.orNone()
	for _, s := range n.queue.take(false) {
		s.done <- because
	}
}

// Open takes a Close back. A new network is open.
func (n *Network) Open() {
	n = n.orNone()
	n.queue.mu.Lock()
	defer n.queue.mu.Unlock()
	n.queue.closed = false
}

// Apply carries out what has been submitted, in order. It must be called between the passes of the
// model.
func (n *Network) Apply() {
	n = n.orNone()
	waiting := n.queue.take(false)
	defer func() { // a listener has panicked
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

// Do carries out commands: all of them, or, when one is refused, none, and its error says which. It
// must be called between the passes of the model, unless the slots have a lock: then it waits for
// the end of a pass.
func (n *Network) Do(commands ...Command) error {
	n = n.orNone()
	defer n.deliver()
	if l, ok := n.slots.(sync.Locker); ok {
		l.Lock()
		defer l.Unlock()
	}
	return n.do(commands)
}

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

// transaction is what commands that take effect together have changed.
type transaction struct {
	*Network
	before map[int]table          // of the lattices that commands were for
	seeds  map[address]undo       // as they were
	write  map[address]SlotParams // slots as they shall be
}

// table is the state of a lattice, apart from its seeds, before a transaction.
type table struct {
	strategies []graft.Entry
	pending    int
	telemetry  Telemetry
}

// undo is a seed as it was.
type undo struct {
	row  []byte // as its checksum is made of
	crc  uint32
	kept *SlotParams // nil for nothing
}

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

// at returns a seed's stage and slot.
func (l *Lattice) at(seed int) (Stage, int) {
	return Stage(l.seeds.stage[seed]), int(l.seeds.slot[seed])
}

// parameters notes what becomes of the slot of a seed that has just obeyed a command. from and kept
// are what the seed's stage was and what was kept of the slot.
func (t *transaction) parameters(c Command, slot address, from Stage,
	kept *SlotParams) (err error) {
	l := t.Lattice(c.Layer)
	to, _ := l.at(c.Seed)
	users := l.users[uint16(slot.number)] // this seed included if it is alive
	switch {
	case c.Action == Germinate:
		if users == 1 {
			t.write[slot], err = t.slots.Start(Germination{c.Layer, c.Seed, slot.number,
				c.Request.Kind, int(l.epoch)})
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

// load notes that a slot shall hold what the command has, in front of the weights that its
// blueprint does not use.
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
		return fmt.Errorf("state.Load: %w: seed %d: %d weights, and slots have %d", ErrArgument,
			c.Seed, len(c.Params.Weights), len(p.Weights))
	}
	p.Weights, p.Scale = slices.Clone(p.Weights), c.Params.Scale
	copy(p.Weights, c.Params.Weights)
	t.write[slot] = p
	return nil
}

// keptOf returns what is kept of a seed's slot, nil if nothing is.
func (l *Lattice) keptOf(seed int) *SlotParams {
	if p, ok := l.kept[seed]; ok {
		return &p
	}
	return nil
}

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

// commit writes slots.
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
