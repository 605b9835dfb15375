package cudaops

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
)

// The update beside the backward pass: WithEarlyUpdates. A parameter can be updated as soon as its gradient is there and nothing reads
// it any more, if no norm of all gradients is waited for. As beside the forward pass (late.go) a few multiprocessors do that, on a branch of
// what is captured, and products leave them alone.
//
// A run then changes parameters, which only an update may. So its tasks from the first one on behind which parameters are updated are sent
// when it is known whether an update follows: by StepWhile with updates, by whatever else comes without. Until then the device
// has the beginning to compute, most of it the forward pass.

// ErrUpdated is wrapped by an error of gradients that are not finite (see [ErrNonFinite]) where that became known only when parameters had
// been updated with them: see [WithEarlyUpdates].
var ErrUpdated = errors.New("parameters have been updated with them")

// WithEarlyUpdates has updates begin while gradients are still computed: a parameter is updated as soon as its gradient is there and
// nothing reads the parameter any more, beside the rest of the backward pass, on a few multiprocessors that the products leave free. A step
// of a large model takes less time. The machine's parameters get the same bits as by updates behind its runs; without the option some products may
// be computed in other ways (see [Tuning]). It goes with AdamW and without a limit of the gradients' norm, for which
// all of them must be there before the first is applied: [Machine.SetOptimizer] with another maxNorm than 0 is an error. Updates are early in
// [Machine.StepWhile], from its second call with an optimiser on, if the loss is there before any parameter is updated; those of
// [Machine.Update] are not, nor do they go on beside the next run. [Machine.RunAll] and [Machine.Start] send the device only the beginning
// of a run, about its forward pass, and the rest goes with whatever is asked for next.
//
// A loss that is not finite prevents an update as ever. Whether the gradients are finite is known only behind the last of them, and
// parameters have been updated by then: the error wraps [ErrNonFinite] and [ErrUpdated], and what was saved before is to be loaded.
//
// It does nothing, so that updates are as they are without it, where the parameters take less than a GiB in float32, on GPUs but those of
// compute capability 9.0 with 132 multiprocessors, with the precisions Float16 and Float8, with Muon, with [WithAccumulation],
// [WithParamsOf] and [WithStream], and in runs that are profiled or timed ([Machine.StartProfile], [WithMonitor]).
func WithEarlyUpdates() MachineOption {
	return func(c *machineConfig) error {
		c.early = true
		return nil
	}
}

const (
	// earlyBandwidth is what updates beside a backward pass move in a second: what they would not get done in time with that is updated behind
	// the run, by all multiprocessors.
	earlyBandwidth = kernels.LateMultiprocessors * 66e9
	// earlyLeft is the multiprocessors that products are planned for.
	earlyLeft = lateLeft
)

// earlyPlan is what may be updated in a run.
type earlyPlan struct {
	groups []paramGroup // as their gradients come, each behind its task
	split  int          // the tasks from here on are sent when it is known whether an update follows
}

// mayUpdateEarly reports whether updates of the machine may go on in its runs, if these give them the time.
func (m *Machine) mayUpdateEarly() bool {
	return m.config.early && !m.config.scaled && m.mayPlanLate() && m.trained() >= m.config.late.leastEarly
}

// trained is the bytes of the parameters that have gradients.
func (m *Machine) trained() (bytes int) {
	for _, p := range m.config.params {
		if p.Deriv() != nil {
			bytes += float32s.size() * p.Shape().TotalSize()
		}
	}
	return bytes
}

// planEarly chooses the parameters that may be updated in a run, in the order of their gradients, as many as there is time for.
func (c *compiler) planEarly() bool {
	if !c.m.mayUpdateEarly() || c.program.onHost() {
		return false
	}
	ready := map[*input]int{}
	var all []*input
	for _, in := range c.inputs {
		if g := c.gradient(in); g != nil && !g.resident && in.written() {
			at := max(c.last[g.block], c.last[in.array.block])
			for _, s := range in.copies {
				at = max(at, c.last[s.block])
			}
			ready[in], all = at, append(all, in)
		}
	}
	slices.SortStableFunc(all, func(a, b *input) int { return cmp.Compare(ready[a], ready[b]) })
	starts, _ := c.starts()
	free, end := 0.0, starts[len(c.tasks)]
	group, bytes, moved := paramGroup{}, 0, 0
	var groups []paramGroup
	for _, in := range all {
		group.task, group.params, bytes = ready[in], append(group.params, in), bytes+in.array.extent()
		moved += c.gradient(in).extent() + lateMoved*in.array.len()
		if bytes < c.m.config.late.group {
			continue
		}
		done := max(free, starts[group.task+1]) + float64(moved)/c.m.config.late.earlyBandwidth
		if done > end {
			break
		}
		groups, free = append(groups, group), done
		group, bytes, moved = paramGroup{}, 0, 0
	}
	if len(groups) == 0 {
		return false
	}
	c.early = &earlyPlan{groups, groups[0].task + 1}
	return true
}

// earlyUpdate is what an optimiser does of that.
type earlyUpdate struct {
	*earlyPlan
	stream  driver.Stream
	branch  driver.Event // of captures alone
	chunks  []int        // where each group begins in the table, and where the last one ends
	squares driver.Ptr   // of the loss, of each tensor of the table as AdamWLate leaves them, and of the rounds behind the run
	rounds  int          // where these begin
	sums    int          // how many there are
	looked  bool         // they are those of the last update's gradients, and no run has been asked for since
	updated bool         // the last update went on in a run; a run that is asked for while it goes on changes nothing about that
}

// newEarly makes what the update needs.
func (x *optimizer) newEarly(m *Machine) (err error) {
	ctx, tensors := m.device.ctx, len(x.states)
	e := &earlyUpdate{earlyPlan: m.program.early, chunks: x.chunksOf(m.program.early.groups)}
	x.early = e
	e.rounds = 1 + kernels.LateMultiprocessors*tensors
	e.sums = e.rounds + kernels.RoundsOf(e.chunks[0])
	if e.squares, err = x.alloc(m, 4*e.sums, "the optimiser"); err != nil {
		return err
	}
	if err := ctx.Memset8(e.squares, 0, 4*e.sums, m.stream); err != nil { // of tensors that are not updated early they stay zero
		return err
	}
	if e.stream, err = ctx.NewStreamAhead(); err != nil {
		return err
	}
	e.branch, err = ctx.NewEvent(false)
	return err
}

func (e *earlyUpdate) close(m *Machine) error {
	if e == nil || e.stream == 0 {
		return nil
	}
	ctx := m.device.ctx
	err := joined(ctx.SyncStream(e.stream), ctx.DestroyStream(e.stream))
	if e.branch != 0 {
		err = joined(err, ctx.DestroyEvent(e.branch))
	}
	return err
}

// early reports whether the optimiser may update in runs.
func (m *Machine) early() bool { return m.optimizer != nil && m.optimizer.early != nil }

// splits reports whether only the beginning of the run that is to be replayed is sent: not where others go by the machine's stream, nor
// where the run is timed.
func (m *Machine) splits() bool {
	return m.early() && !m.exposed && !m.bound && !m.profiler.busy() && !m.monitor.timing()
}

// sendHead enqueues the beginning of a run.
func (m *Machine) sendHead() (err error) {
	if m.now.head == nil {
		if m.now.head, err = m.capture(func() error { return m.enqueueTasks(0, m.optimizer.early.split, nil) }); err != nil {
			return err
		}
	}
	if err = m.device.ctx.LaunchGraph(m.now.head, m.stream); err == nil {
		m.pending = true
	}
	return err
}

// complete enqueues the rest of the run of which only the beginning has been sent, if there is one, without updates.
func (m *Machine) complete() (err error) {
	if !m.pending {
		return m.bringRest()
	}
	if m.now.rest == nil {
		rest := func() error { return m.enqueueTasks(m.program.early.split, len(m.program.tasks), nil) }
		if m.now.rest, err = m.capture(rest); err != nil {
			return err
		}
	}
	return m.finishRun(m.now.rest)
}

// finishRun launches the rest of a run, and what follows runs.
func (m *Machine) finishRun(rest *driver.Graph) error {
	if err := m.device.ctx.LaunchGraph(rest, m.stream); err != nil {
		return err
	}
	m.pending, m.unbrought = false, true
	return m.bringRest()
}

// bringRest has the attendants bring back what a run in two pieces has left, unless they have: after an error they are asked again.
func (m *Machine) bringRest() error {
	if !m.unbrought {
		return nil
	}
	err := m.bring()
	m.unbrought = err != nil
	return err
}

// updatesEarly reports whether the update with a loss may go on in the run under way, where the loss is known before anything is updated, and
// an update behind a run has loaded the kernels, which a capture does not allow.
func (m *Machine) updatesEarly(loss *array) bool {
	if !m.pending || !m.early() || loss == nil || m.program.last[loss.block] >= m.optimizer.early.split {
		return false
	}
	behind := m.optimizer.recorded[updateKey{loss: loss.ptr()}]
	return behind != nil && behind.loaded
}

// sendRest is complete with updates.
func (m *Machine) sendRest(x *optimizer, loss *array) error {
	step := m.now.steps[loss.ptr()]
	if step == nil {
		var err error
		if step, err = m.capture(func() error { return m.enqueueRest(x, loss) }); err != nil {
			return err
		}
		if m.now.steps == nil {
			m.now.steps = map[driver.Ptr]*driver.Graph{}
		}
		m.now.steps[loss.ptr()] = step
	}
	return m.finishRun(step)
}

// enqueueRest enqueues the rest of a run with updates, each on a branch of the capture. The control block is that of gradients which are
// finite if the loss is.
func (m *Machine) enqueueRest(x *optimizer, loss *array) error {
	ctx, e := m.device.ctx, x.early
	update := func(task int) error { // what is ready behind a task
		for i, g := range e.groups {
			if g.task != task {
				continue
			}
			if err := joined(ctx.Record(e.branch, m.stream), ctx.Wait(e.stream, e.branch),
				m.k.AdamWLate(e.stream, x.control, x.adamw, e.chunks[i], e.chunks[i+1], e.squares.Offset(4))); err != nil {
				return err
			}
		}
		return nil
	}
	return inTurn(
		func() error {
			return m.k.Unary(m.stream, kernels.MulScalar, e.squares, loss.ptr(), 0, 1, driver.Float32)
		},
		func() error { return m.k.GradNorm(m.stream, x.control, e.squares, 1, 0) },
		func() error { return m.k.AdamW(m.stream, x.control, x.adamw, 0) },
		func() error { return update(e.split - 1) },
		func() error { return m.enqueueTasks(e.split, len(m.program.tasks), update) },
		func() error { return joined(ctx.Record(e.branch, e.stream), ctx.Wait(m.stream, e.branch)) })
}

// launchEnd launches what is left of an update when its run is done, and the norm.
func (m *Machine) launchEnd(x *optimizer) error {
	e := x.early
	if err := m.k.AdamWSquares(m.stream, x.control, x.adamw, e.chunks[0], e.squares.Offset(4*e.rounds)); err != nil {
		return err
	}
	return m.k.GradNorm(m.stream, x.control, e.squares, e.sums, 0)
}

// nonFinite adds the parameters whose gradients the sums of the last update show to be not finite.
func (e *earlyUpdate) nonFinite(m *Machine, x *optimizer, add func(*paramState)) error {
	sums := make([]float32, e.sums)
	if err := m.device.ctx.CopyToHost(driver.Bytes(sums), e.squares, m.stream); err != nil {
		return err
	}
	for i, v := range sums[1:] {
		if v-v == 0 {
			continue
		}
		tensor := i / kernels.LateMultiprocessors
		if round := 1 + i - e.rounds; round >= 0 {
			tensor = x.adamw.TensorOf(round / kernels.RoundsOf(1))
		}
		add(x.states[tensor])
	}
	return nil
}

// refusedLate is the error of an update whose norm is not finite, which was known too late.
func refusedLate(norm float64) error {
	return fmt.Errorf("%w: %w, before their norm, %v, was known: load what was saved before", ErrNonFinite, ErrUpdated, float32(norm))
}
