package cudaops

import (
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
)

// A pass over many rows leaves sums of parts of them, or figures, and a small launch makes one result of these. Nothing waits for such
// an end but that of the run, as a rule, so the ends of all passes of a kind are made by one launch: when a task touches one of their
// results, when they keep too much memory, and at the latest at the end of the program.

// endsMemory is how many bytes of parts, of one kind, may be kept while other tasks run.
const endsMemory = 64 << 20

// ends are those of one kind which no launch has made yet. E is what a pass says that it has left.
type ends[E any] struct {
	op      string // what the launch is called
	launch  func(left []E) error
	left    []*E
	node    *gorgonia.Node // of the last one
	results []*array
	parts   []*array // and what else the launch reads
	bytes   int      // of memory that would not be kept without it
}

// pending are ends of any kind.
type pending interface {
	makes(b *block) bool
	flush(c *compiler)
}

// leave has the end of the last task be made with others of its kind, from parts that only it needs. When the task runs it writes to
// left what there is to do.
func leave[E any](c *compiler, e *ends[E], left *E, n *gorgonia.Node, results, parts []*array, others ...*array) {
	bytes := 0
	for _, p := range parts {
		bytes += p.extent()
	}
	e.left, e.node, e.bytes = append(e.left, left), n, e.bytes+bytes
	e.results, e.parts = append(e.results, results...), append(append(e.parts, parts...), others...)
	if e.bytes > endsMemory {
		e.flush(c)
	}
}

// later is where a pass says what it has left, nil in a run whose passes are to make their ends.
func later[E any](m *Machine, left *E) *E {
	if m.apart {
		*left = *new(E)
		return nil
	}
	return left
}

func (e *ends[E]) makes(b *block) bool {
	return slices.ContainsFunc(e.results, func(a *array) bool { return a.block == b })
}

// flush adds the launch.
func (e *ends[E]) flush(c *compiler) {
	if len(e.left) == 0 {
		return
	}
	left, launch, touched := e.left, e.launch, slices.Concat(e.results, e.parts)
	e.left, e.results, e.parts, e.bytes = nil, nil, nil, 0
	c.do(e.node, func() error {
		all := make([]E, len(left))
		for i, l := range left {
			all[i] = *l
		}
		return launch(all)
	}, touched...)
	c.named(e.op)
	if len(left) > 1 {
		c.tasks[len(c.tasks)-1].place = ""
	}
}

// settle makes all ends whose results are among the arrays.
func (c *compiler) settle(arrays []*array) {
	for _, a := range arrays {
		if a == nil {
			continue
		}
		c.settle(a.parts)
		for _, p := range c.pending {
			if a.block != nil && p.makes(a.block) {
				p.flush(c)
			}
		}
	}
}

// settleAll makes all ends.
func (c *compiler) settleAll() {
	for _, p := range c.pending {
		p.flush(c)
	}
}

// newEnds prepares the kinds of ends.
func (c *compiler) newEnds() {
	m := c.m
	c.normEnds = ends[kernels.RMSNormParts]{op: "RMSNormWeightGrad",
		launch: func(left []kernels.RMSNormParts) error { return m.k.AddRMSNormParts(m.stream, left) }}
	c.figureEnds = ends[kernels.KasminaRecords]{op: "KasminaFigures",
		launch: func(left []kernels.KasminaRecords) error { return m.k.MergeKasminaRecords(m.stream, left) }}
	c.gradientEnds = ends[kernels.KasminaParts]{op: "KasminaWeightGrad",
		launch: func(left []kernels.KasminaParts) error { return m.k.AddKasminaParts(m.stream, left) }}
	c.pending = []pending{&c.normEnds, &c.figureEnds, &c.gradientEnds}
}
