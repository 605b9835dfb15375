package cudaops

import (
	"cmp"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
)

// The update beside the next forward pass. Later layers need their new weights only when the next run gets to them. Until then a few
// multiprocessors are enough to update them, on a stream of their own, and the run waits for each piece of that where it first
// needs it. In a forward pass these multiprocessors are to be had for nothing: products of Hopper work on 256 × 256 elements with
// two, and at the sizes of models 64 pairs take as many turns as 66.
//
// To all but the runs that are captured, the update is over when it has been sent: what reads or writes parameters, moments and
// gradients waits for it (join). Gradients keep their memory until then, so that no value of the next run may take it, which is
// planned where the device has memory to spare.

// What an update beside a forward pass moves in a second, at least, and what the tasks of the pass do meanwhile (H200): it is to be done
// in time. An update that is not makes the pass wait: KERNELS.md has what more and less than this cost.
const (
	lateBandwidth = kernels.LateMultiprocessors * 45e9
	lateFLOPS     = 680e12
	lateBytes     = 3.8e12
)

// lateRule says when updates beside a forward or a backward pass are worth it: from so many bytes of parameters on, updated in groups of
// so many, while so many bytes are moved in a second.
type lateRule struct {
	least, leastEarly, group  int
	bandwidth, earlyBandwidth float64
}

var usualLate = lateRule{least: 64 << 20, leastEarly: 1 << 30, group: 16 << 20, bandwidth: lateBandwidth, earlyBandwidth: earlyBandwidth}

// latePlan is what an update leaves for later.
type latePlan struct {
	groups []paramGroup // as they are needed
	end    int          // the task that needs the last of them
}

// paramGroup is parameters that are updated together, before a task that needs them or behind one.
type paramGroup struct {
	task   int
	params []*input
}

// regroup sorts the optimiser's parameters: those of no group, then those of each.
func (x *optimizer) regroup(groups []paramGroup) {
	at := map[*input]int{}
	for i, g := range groups {
		for _, in := range g.params {
			at[in] = i + 1
		}
	}
	slices.SortStableFunc(x.states, func(a, b *paramState) int { return cmp.Compare(at[a.input], at[b.input]) })
}

// chunksOf is where each group, the last parameters of the optimiser's table, begins there, and where the last one ends.
func (x *optimizer) chunksOf(groups []paramGroup) (chunks []int) {
	at := len(x.states)
	for _, g := range groups {
		at -= len(g.params)
	}
	for _, g := range groups {
		from, _ := x.adamw.ChunksOf(at)
		chunks = append(chunks, from)
		at += len(g.params)
	}
	return append(chunks, x.adamw.Chunks)
}

// onlyAdamW reports whether all parameters are updated by that.
func (x *optimizer) onlyAdamW() bool {
	return !slices.ContainsFunc(x.states, func(p *paramState) bool { return p.rule.Muon })
}

// planLate chooses the parameters that may be updated beside the next run, from those on that it needs last, as many as there is time
// for, and keeps the memory of their gradients. The optimiser is not known yet: with one that leaves nothing for later, as Muon, it is kept
// in vain, of a device that has it to spare. Another plan then would need the parameters elsewhere, whose addresses others may have.
func (c *compiler) planLate() {
	if !c.roomy || !c.m.mayPlanLate() || c.program.onHost() {
		return
	}
	needed := map[*input]int{}
	var all []*input
	for _, in := range c.inputs {
		if g := c.gradient(in); g != nil && !g.resident && in.written() {
			if task, ok := c.firstUse(in); ok {
				needed[in], all = min(task, g.First), append(all, in) // before the next gradient, too
			}
		}
	}
	slices.SortStableFunc(all, func(a, b *input) int { return cmp.Compare(needed[b], needed[a]) })
	starts, crowded := c.starts()
	group, bytes, total, moved := paramGroup{}, 0, 0, 0
	deadline := starts[len(starts)-1]
	var groups []paramGroup
	for _, in := range all {
		if needed[in] > crowded {
			continue
		}
		group.task, group.params, bytes = needed[in], append(group.params, in), bytes+in.array.extent()
		moved += c.gradient(in).extent() + lateMoved*in.array.len()
		if bytes < c.m.config.late.group {
			continue
		}
		if deadline = min(deadline, starts[group.task]) - float64(moved)/c.m.config.late.bandwidth; deadline < 0 {
			break
		}
		groups, total = append(groups, group), total+bytes
		group, bytes, moved = paramGroup{}, 0, 0
	}
	if len(groups) == 0 || total < c.m.config.late.least {
		return
	}
	slices.Reverse(groups)
	c.late, c.spent = &latePlan{groups: groups, end: groups[len(groups)-1].task}, true
	for _, g := range groups {
		for _, in := range g.params {
			c.gradient(in).First = 0
		}
	}
}

// lateMoved is the bytes that an update of a number of a parameter moves beside its gradient: it reads and writes the number and its
// moments, and writes a copy of 16 bits.
const lateMoved = 2*3*4 + 2

// lateLeft is the multiprocessors that must be left: with fewer than 64 pairs products take more turns than with all.
const lateLeft = 2 * 64

// mayPlanLate reports whether updates of the machine may go on beside its runs. There must be multiprocessors to spare, and nothing
// else behind an update.
func (m *Machine) mayPlanLate() bool {
	c, d := &m.config, m.device.info
	return d.Capability() == 90 && d.SMs >= lateLeft+kernels.LateMultiprocessors &&
		!c.gather && !c.float8 && c.lone == nil && c.share == nil && c.stream == 0
}

// written reports whether an update writes the only copy of a parameter along with it.
func (in *input) written() bool {
	return in.constant && (len(in.copies) == 0 || len(in.copies) == 1 && in.copies[0].at%vectorBytes == 0)
}

// gradient returns the gradient of an input that is a parameter, nil if there is none.
func (c *compiler) gradient(in *input) *array { return c.m.gradientIn(c.program, in) }

// firstUse is the first task that reads a parameter or its copy.
func (c *compiler) firstUse(in *input) (task int, ok bool) {
	task, ok = c.used[in.array.block]
	for _, s := range in.copies {
		if i, used := c.used[s.block]; used && (!ok || i < task) {
			task, ok = i, true
		}
	}
	return task, ok
}

// starts is when the tasks may be expected to start, in seconds from the beginning of a run, and behind them when the last one ends; and
// the first one that would take all multiprocessors whatever it is told.
func (c *compiler) starts() (at []float64, crowded int) {
	at, crowded = []float64{0}, len(c.tasks)
	for i, t := range c.tasks {
		took := t.bytes / lateBytes
		if t.flops > 0 {
			took = t.flops / lateFLOPS
		}
		at = append(at, at[i]+took)
		if t.crowds && crowded > i {
			crowded = i
		}
	}
	return at, crowded
}

// lateUpdate is what an optimiser does of that.
type lateUpdate struct {
	*latePlan
	stream  driver.Stream
	ready   driver.Event   // the update has come to it
	done    []driver.Event // of each group
	chunks  []int          // where each group begins in the table, and where the last one ends
	running bool           // nobody on the machine's stream has waited for the last one
}

// lateOrder sorts parameters as they are updated, the groups of the plan last, and reports whether there is anything for later.
func (x *optimizer) lateOrder(plan *latePlan) bool {
	if plan == nil || !x.onlyAdamW() {
		return false
	}
	x.regroup(plan.groups)
	return true
}

// newLate makes what the update needs to leave the plan's groups, the last ones of the table, for later.
func (x *optimizer) newLate(m *Machine) (err error) {
	ctx := m.device.ctx
	x.late = &lateUpdate{latePlan: m.program.late, chunks: x.chunksOf(m.program.late.groups)}
	if x.late.stream, err = ctx.NewStreamAhead(); err != nil {
		return err
	}
	if x.late.ready, err = ctx.NewEvent(false); err != nil {
		return err
	}
	for range x.late.groups {
		e, err := ctx.NewEvent(false)
		if err != nil {
			return err
		}
		x.late.done = append(x.late.done, e)
	}
	return nil
}

func (l *lateUpdate) close(m *Machine) error {
	if l == nil || l.stream == 0 {
		return nil
	}
	ctx := m.device.ctx
	errs := []error{ctx.SyncStream(l.stream), ctx.DestroyStream(l.stream)}
	for _, e := range append(l.done, l.ready) {
		if e != 0 {
			errs = append(errs, ctx.DestroyEvent(e))
		}
	}
	return joined(errs...)
}

// last is the event behind all groups.
func (l *lateUpdate) last() driver.Event { return l.done[len(l.done)-1] }

// leavesLate reports whether the next update leaves groups for later: not where others go by the machine's stream, nor where
// the update, or the run behind it, is being timed.
func (m *Machine) leavesLate() bool {
	return m.optimizer.late != nil && !m.exposed && !m.bound && !m.profiler.busy() && !m.monitor.timing()
}

// sendLate enqueues the update of the groups behind what is on the machine's stream.
func (m *Machine) sendLate(x *optimizer) error {
	ctx, l := m.device.ctx, x.late
	if err := joined(ctx.Record(l.ready, m.stream), ctx.Wait(l.stream, l.ready)); err != nil {
		return err
	}
	for i, done := range l.done {
		if err := joined(m.k.AdamWLate(l.stream, x.control, x.adamw, l.chunks[i], l.chunks[i+1], 0), ctx.Record(done, l.stream)); err != nil {
			return joined(err, ctx.SyncStream(l.stream))
		}
	}
	l.running = true
	return nil
}

// join completes the run under way, and has the machine's stream wait for what the last update has left for later, also that of a machine
// with whose parameters this one works: there a run that has waited for it has done so on that machine's stream alone.
func (m *Machine) join() error {
	ctx := m.device.ctx
	if err := m.complete(); err != nil {
		return err
	}
	if x := m.optimizer; x != nil && x.late != nil && x.late.running {
		if err := ctx.Wait(m.stream, x.late.last()); err != nil {
			return err
		}
		x.late.running = false
	}
	if of := m.config.share; of != nil && !of.closed && of.optimizer != nil && of.optimizer.late != nil {
		return ctx.Wait(m.stream, of.optimizer.late.last())
	}
	return nil
}

// awaitLate has a graph that is captured wait for what its task i needs.
func (m *Machine) awaitLate(i int) error {
	if m.optimizer == nil || m.optimizer.late == nil {
		return nil
	}
	l := m.optimizer.late
	for k, g := range l.groups {
		if g.task == i {
			if err := m.device.ctx.Await(m.stream, l.done[k]); err != nil {
				return err
			}
		}
	}
	return nil
}

// leave has the kernels of task i leave multiprocessors to the update. It is the same in all runs, captured or not, so that
// all compute the same bits.
func (m *Machine) leave(i int) {
	n := 0
	if x := m.optimizer; x != nil && (x.late != nil && i < x.late.end || x.early != nil && x.early.split <= i && i < len(m.program.tasks)) {
		n = kernels.LateMultiprocessors
	}
	if n != m.left {
		m.k.Leave(n)
		m.left = n
	}
}

// crowded reports whether ways are not wanted whose blocks would wait for all multiprocessors.
func (t *tuner) crowded() bool { return t.m != nil && t.m.left > 0 }
