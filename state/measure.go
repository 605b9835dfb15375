package state

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// Measured is what the passes of one batch have measured of a lattice, not yet taken in.
type Measured struct {
	Recorded bool             // whether the passes were made with telemetry
	Health   []HealthSample   // by seed; nil where no forward pass has reported
	Gradient []GradientSample // by seed; nil where no backward pass has reported
}

// Defer makes passes leave what they measure in m, in the place of the lattice, until it is called
// with nil. They count as those of the ahead-th batch from now, from 0, and know of the figures
// before the first alone. Processes that compute the batches of a step side by side do so: each
// then takes in what all have measured, in the order of batches, by [Lattice.Take].
func (l *Lattice) Defer(m *Measured, ahead int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deferred, l.ahead = m, uint64(ahead)
	if m == nil {
		l.ahead = 0
	}
}

// Take takes in what the passes of a batch have measured, at this process or another one, as if
// they had run here and now.
func (l *Lattice) Take(m Measured) error {
	if m.Health == nil && m.Gradient == nil {
		return nil
	}
	var p Pass
	l.Begin(&p, m.Recorded)
	for _, n := range []int{len(m.Health), len(m.Gradient)} {
		if n != 0 && n != len(p.Stage) {
			return fmt.Errorf("state.Take: %w: figures of %d seeds, want %d",
				ErrArgument, n, len(p.Stage))
		}
	}
	if m.Health != nil {
		if err := l.RecordHealth(&p, func(i int) HealthSample { return m.Health[i] }); err != nil {
			return err
		}
	}
	if m.Gradient == nil {
		return nil
	}
	return l.RecordGradient(&p, func(i int) GradientSample { return m.Gradient[i] })
}

// deferHealth keeps what a forward pass has measured for later. The caller holds the lock.
func (l *Lattice) deferHealth(p *Pass, sample func(seed int) HealthSample) {
	l.deferred.Recorded = p.Record
	l.deferred.Health = samples(l.n, sample)
	for i := range l.deferred.Health {
		if h := &l.deferred.Health[i].Histogram; *h != nil {
			own := **h
			*h = &own
		}
	}
}

// samples asks for those of all seeds, on all cores.
func samples[S any](seeds int, sample func(seed int) S) []S {
	all := make([]S, seeds)
	cpu.Parallel(seeds, 64, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			all[i] = sample(i)
		}
	})
	return all
}

// Digest is a checksum of the lattices' seeds and of how far they are. Processes whose lattices
// shall be the same compare it.
func (n *Network) Digest() uint32 {
	n = n.orNone()
	var sum uint32
	for _, l := range n.layers {
		sum = l.Lattice.digest(sum)
	}
	return sum
}

func (l *Lattice) digest(sum uint32) uint32 {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.n == 0 {
		return sum
	}
	b := binary.LittleEndian.AppendUint64(nil, l.step)
	b = binary.LittleEndian.AppendUint32(b, l.epoch)
	for _, c := range l.seeds.crc {
		b = binary.LittleEndian.AppendUint32(b, c)
	}
	return crc32.Update(sum, crc32.IEEETable, b)
}

// Obey carries out one command, for whoever runs the model, between the passes of the model.
func (n *Network) Obey(c Command) error {
	n = n.orNone()
	defer n.deliver()
	return n.do([]Command{c})
}

// ApplyShared is [Network.Apply] of several processes with the same model: what was submitted to
// any of them is carried out at each. exchange hands over the commands that were submitted here,
// and returns those of all processes in an order that all have; at is the place of its own among
// them. Its error is the answer to those who have submitted something, and is returned.
func (n *Network) ApplyShared(exchange func(own [][]Command) (all [][]Command,
	at int, err error)) error {
	n = n.orNone()
	waiting := n.queue.take(false)
	own := make([][]Command, len(waiting))
	for i, s := range waiting {
		own[i] = s.commands
	}
	all, at, err := exchange(own)
	if err == nil && (at < 0 || at+len(own) > len(all)) {
		err = fmt.Errorf("state.ApplyShared: %w: %d of %d commands from the %d-th on", ErrArgument,
			len(own), len(all), at)
	}
	if err != nil {
		for _, s := range waiting {
			s.done <- err
		}
		return err
	}
	answered := 0
	defer func() { // a listener has panicked
		for _, s := range waiting[answered:] {
			s.done <- errListener
		}
	}()
	for i, commands := range all {
		err := n.do(commands)
		if i >= at && i < at+len(own) {
			answered++
			waiting[answered-1].done <- err
		}
		n.deliver()
	}
	return nil
}
