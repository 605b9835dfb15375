package state

// Mark saves everything that passes measure on the network's seeds and returns a function that
// restores it, as if later passes had not run. Trainers use it to discard the measurements of a
// step that fails before its update. [Lattice.History] still contains the reports of those passes.
// A mark is valid until the next call of Mark.
func (n *Network) Mark() (restore func()) {
	for _, l := range n.layers {
		l.Lattice.mark()
	}
	return func() {
		for _, l := range n.layers {
			l.Lattice.unmark()
		}
	}
}

// marked is a snapshot of the figures that passes measure.
type marked struct {
	of      *seedState // the seeds that columns point into
	step    uint64
	columns []markedColumn
}

// markedColumn is a field of all seeds together with a copy. The next mark reuses the memory of the
// copy.
type markedColumn interface {
	save()
	restore()
}

// column is a markedColumn of elements of one type.
type column[T any] struct {
	field *[]T
	copy  []T
}

func (c *column[T]) save()    { c.copy = append(c.copy[:0], *c.field...) }
func (c *column[T]) restore() { copy(*c.field, c.copy) }

func columnOf[T any](field *[]T) markedColumn { return &column[T]{field: field} }

// measured returns the fields that passes change.
func (s *seedState) measured() []markedColumn {
	return []markedColumn{
		columnOf(&s.variance), columnOf(&s.mean), columnOf(&s.lowest), columnOf(&s.highest),
		columnOf(&s.deadRatio), columnOf(&s.snr),
		columnOf(&s.gradNorm), columnOf(&s.gradVariance), columnOf(&s.gradMax),
		columnOf(&s.stepMean), columnOf(&s.stepVariance), columnOf(&s.stepCount),
		columnOf(&s.runMean), columnOf(&s.runVariance), columnOf(&s.runCount),
		columnOf(&s.normMean), columnOf(&s.normVariance), columnOf(&s.normCount),
		columnOf(&s.nonFiniteX), columnOf(&s.nonFiniteG), columnOf(&s.clips),
	}
}

func (l *Lattice) mark() {
	l.mu.Lock()
	defer l.mu.Unlock()

	if l.n == 0 {
		return
	}

	if l.marked.of != l.seeds {
		l.marked = marked{of: l.seeds, columns: l.seeds.measured()}
	}
	l.marked.step = l.step
	for _, c := range l.marked.columns {
		c.save()
	}
}

func (l *Lattice) unmark() {
	l.mu.Lock()
	defer l.mu.Unlock()

	if l.n == 0 || l.marked.of != l.seeds {
		return
	}

	l.step = l.marked.step

	// Restoring must not hide corruption, so a seed that did not match its checksum before must not
	// match it afterwards.
	found := l.sums.Faults(0, l.n, l.seeds.crc)
	for _, c := range l.marked.columns {
		c.restore()
	}

	l.seal(0, l.n)
	for _, bad := range found {
		l.seeds.crc[bad.Row] ^= bad.Syndrome
	}
}
