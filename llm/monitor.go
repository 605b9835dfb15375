package llm

import (
	"io"

	"github.com/kasmina-go/kasmina/internal/optime"
)

// OpTime is what the nodes of one op took in a step, on average.
type OpTime = optime.OpTime

// Profiler is an engine that times its ops while it trains.
type Profiler interface {
	Engine
	// OpTimes returns the mean times so far, the longest first, none before the first sample.
	OpTimes() ([]OpTime, error)
}

// Monitor tells the callbacks every so many steps (0 for never), and after the last one, what the ops of the trainer's engine
// take, as a Profiled event, and at the end of the run prints them as a table. It does nothing for an engine that is no
// [Profiler].
func Monitor(t *Trainer, w io.Writer, every int) Callback {
	if t == nil || w == nil {
		return refuse("Monitor: the trainer or the writer is nil")
	}
	return func(e Event) error {
		p, ok := t.engine.(Profiler)
		if !ok || !due(e, every) && e.Kind != RunEnd {
			return nil
		}
		ops, err := p.OpTimes()
		if err != nil || len(ops) == 0 {
			return err
		}
		if e.Kind == RunEnd {
			_, err := io.WriteString(w, optime.Table(ops))
			return err
		}
		return t.emit(Profiled, func(e *Event) { e.Ops = ops })
	}
}
