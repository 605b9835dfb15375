package cudaops

import (
	"fmt"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// bareTime is how a sample of the monitor tells what telemetry costs a pass of a Kasmina layer: ahead of the pass its arithmetic
// runs twice without telemetry, the first time only for the caches. The results are the same bits, and nobody reads what these
// runs count.
type bareTime struct {
	on       bool          // in the sample under way
	from, to gpu.Event     // around the second run
	latest   time.Duration // of that, in the latest sample
}

// loadBare runs what a capture would have to load modules for. Nothing that a run has computed is alive between two runs.
func (o *monitor) loadBare() error {
	for i, t := range o.m.program.tasks {
		if !o.tasks[i].bare.on {
			continue
		}
		if err := t.bare(); err != nil {
			return fmt.Errorf("%s: %w", describe(t.node), err)
		}
	}
	return nil
}

// runBare enqueues what comes ahead of a task in a sample.
func (o *monitor) runBare(i int, mark func(gpu.Event, gpu.Stream) error) error {
	b, t, s := o.tasks[i].bare, o.m.program.tasks[i], o.m.stream
	if !b.on {
		return nil
	}
	calls := []func() error{t.bare, func() error { return mark(b.from, s) }, t.bare, func() error { return mark(b.to, s) }}
	if t.spare != nil {
		calls = append([]func() error{t.spare}, calls...)
	}
	if err := inTurn(calls...); err != nil {
		return fmt.Errorf("%s: %w", describe(t.node), err)
	}
	return nil
}

// noteBare tells a layer's lattice what its pass took.
func (o *monitor) noteBare(i int) {
	b, t := o.tasks[i].bare, o.m.program.tasks[i]
	if !b.on {
		return
	}
	l := t.layer
	seeds := 2 * l.seeds() // read and written, in x and y
	if _, backward := t.node.Op().(*op.KasminaGradOp); backward {
		reads, writes := l.moving(t.inPlace)
		seeds = reads + l.seeds() + writes // in x, the gradient of y, and that of x
	}
	l.op.Lattice.RecordTiming(state.Timing{Kernel: b.latest, Telemetry: o.tasks[i].latest - b.latest,
		Bytes: int64(seeds * l.rows * l.chunk * l.elem.size())})
}
