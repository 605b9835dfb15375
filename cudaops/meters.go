package cudaops

import (
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// meters passes the figures that each run measures to the ops that they belong to.
type meters struct {
	m      *Machine
	host   [][]byte // pinned memory that receives the figures, for each of the program's meters
	copied gpu.Event
	unread bool // a run has measured figures that no op has received yet
}

// newMeters allocates the host memory of a machine's meters. It returns nil if there are none.
func newMeters(m *Machine) (_ *meters, err error) {
	if len(m.runner.Program.Meters) == 0 {
		return nil, nil
	}

	r := &meters{m: m}
	for _, meter := range m.runner.Program.Meters {
		memory, err := m.runner.Memory.AllocHost(meter.Extent())
		if err != nil {
			return nil, err
		}
		r.host = append(r.host, memory)
	}
	r.copied, err = m.runner.Memory.NewEvent(false)
	return r, err
}

// send copies the figures of the run that has just been enqueued to the host.
func (r *meters) send() error {
	if r == nil {
		return nil
	}

	ctx, stream := r.m.device.ctx, r.m.runner.Stream
	for i, meter := range r.m.runner.Program.Meters {
		if err := ctx.CopyToHost(r.host[i], meter.Ptr(), stream); err != nil {
			return err
		}
	}
	err := ctx.Record(r.copied, stream)
	r.unread = err == nil
	return err
}

// read waits for the last run and passes its figures to the ops, unless it has already done so. It does not wait for an
// update that follows the run.
func (r *meters) read() error {
	if r == nil || !r.unread {
		return nil
	}

	r.unread = false
	if err := r.m.device.ctx.SyncEvent(r.copied); err != nil {
		return err
	}
	for i, meter := range r.m.runner.Program.Meters {
		meter.Add(slices.Clone(gpu.View[float32](r.host[i])[:meter.Len()]))
	}
	return nil
}
