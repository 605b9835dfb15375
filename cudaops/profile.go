package cudaops

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
)

// OpTime is what the nodes of one op took in a run.
type OpTime struct {
	Op    string // the op's name, as in RMSNormGrad
	Tasks int    // launches, matrix products among them
	Time  time.Duration
}

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
	byOp := map[string]*OpTime{}
	for i, t := range m.program.tasks {
		d, err := ctx.Elapsed(marks[i], marks[i+1])
		if err != nil {
			return nil, err
		}
		name := opName(t)
		if byOp[name] == nil {
			byOp[name] = &OpTime{Op: name}
		}
		byOp[name].Tasks++
		byOp[name].Time += d
	}
	for _, t := range byOp {
		times = append(times, *t)
	}
	slices.SortFunc(times, func(a, b OpTime) int {
		return cmp.Or(cmp.Compare(b.Time, a.Time), cmp.Compare(a.Op, b.Op))
	})
	return times, nil
}

// opName is the name of this module's ops, and the description of others.
func opName(t task) string {
	if o, ok := t.node.Op().(interface{ Name() string }); ok {
		return o.Name()
	}
	return fmt.Sprint(t.node.Op())
}
