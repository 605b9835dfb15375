package cudaops

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/optime"
)

// OpTime is what the nodes of one op took in a run.
type OpTime = optime.OpTime

// Table is the times of ops for people: a line each, with their shares of the whole.
func Table(times []OpTime) string { return optime.Table(times) }

// Profile runs the graph once, without replaying a captured one, and times every task on the device: what each op took,
// the longest first. The gaps that a replay does not have, between one task and the next, are in no op's time.
func (m *Machine) Profile() ([]OpTime, error) {
	times, err := m.profile()
	if err != nil {
		return nil, fmt.Errorf("cudaops.Machine.Profile: %w", err)
	}
	return times, nil
}

func (m *Machine) profile() (times []OpTime, err error) {
	if m.closed || !m.ran {
		return nil, errors.New("the machine must have run, and not be closed")
	}
	ctx := m.device.ctx
	marks := make([]driver.Event, 0, len(m.program.tasks)+1)
	defer func() {
		for _, e := range marks {
			err = errors.Join(err, ctx.DestroyEvent(e))
		}
	}()
	mark := func() error {
		e, err := ctx.NewEvent(true)
		if err != nil {
			return err
		}
		marks = append(marks, e)
		return ctx.Record(e, m.stream)
	}
	if err := mark(); err != nil {
		return nil, err
	}
	m.carried = m.scale.Scale
	for _, t := range m.program.tasks {
		if err := errors.Join(t.run(), mark()); err != nil {
			return nil, fmt.Errorf("%s: %w", describe(t.node), err)
		}
	}
	if err := ctx.SyncStream(m.stream); err != nil {
		return nil, err
	}
	took := make([]time.Duration, len(m.program.tasks))
	for i := range took {
		if took[i], err = ctx.Elapsed(marks[i], marks[i+1]); err != nil {
			return nil, err
		}
	}
	times = byOp(m.program.tasks, func(i int, t *OpTime) { t.Time += took[i] })
	sortTimes(times)
	return times, nil
}

// byOp gathers tasks by their ops; add adds what is known of one.
func byOp(tasks []task, add func(i int, t *OpTime)) (times []OpTime) {
	at := map[string]int{}
	for i, t := range tasks {
		name := opName(t)
		if _, ok := at[name]; !ok {
			at[name] = len(times)
			times = append(times, OpTime{Op: name})
		}
		o := &times[at[name]]
		o.Tasks++
		o.Bytes += t.bytes
		o.FLOPs += t.flops
		add(i, o)
	}
	return times
}

// sortTimes puts the longest first.
func sortTimes(times []OpTime) {
	slices.SortFunc(times, func(a, b OpTime) int {
		return cmp.Or(cmp.Compare(b.Time, a.Time), cmp.Compare(a.Op, b.Op))
	})
}

// opName is the name of this module's ops, and the description of others.
func opName(t task) string {
	if o, ok := t.node.Op().(interface{ Name() string }); ok {
		return o.Name()
	}
	return fmt.Sprint(t.node.Op())
}

// attentionFLOPs is the operations of so many products of an attention, of which a causal mask leaves half.
func attentionFLOPs(s kernels.AttentionShape, products int) float64 {
	n := 2 * float64(products) * float64(s.Batch*s.Heads) * float64(s.Seq) * float64(s.Seq) * float64(s.HeadDim)
	if s.Causal {
		n /= 2
	}
	return n
}
