package cudaops

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/cudaops/internal/update"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/optim"
)

// ErrNonFinite is wrapped by the error of an update when the gradients contain NaN or infinity. The
// update has changed nothing.
var ErrNonFinite = errors.New("the gradients are not finite")

// SetOptimizer moves an optimizer of package optim, including its state, to the device, where
// [Machine.Update] applies it to the machine's parameters.
//
// If maxNorm is not 0, it limits the global norm of the gradients. Gradients that [WithSeparateClipping]
// names are clipped by a separate norm, with the same limit.
//
// If an argument is invalid, nothing changes. Otherwise the machine drops the optimizer that it had
// before, including its state on the device. After any other error it has no optimizer.
func (m *Machine) SetOptimizer(o optim.Optimizer, maxNorm float64) (err error) {
	defer annotate("Machine.SetOptimizer", &err)
	if err = usable(m); err != nil {
		return
	}

	rules, ok := o.(optim.Rules)
	switch v := reflect.ValueOf(o); {
	case ok && v.Kind() == reflect.Pointer && v.IsNil():
		return fmt.Errorf("the optimizer is a nil %T", o)
	case !ok:
		return fmt.Errorf("a %T does not declare its rules: want an optimizer of package optim", o)
	case !(maxNorm >= 0) || math.IsInf(maxNorm, 0):
		return fmt.Errorf("maxNorm is %v, want a finite number of at least 0", maxNorm)
	case len(m.config.inherits) > 0 && len(m.config.kept.Params) == 0:
		return errors.New("the moments for WithKept no longer exist: their Kept was closed, or " +
			"other machines have passed them on")
	}

	if name := m.config.missingParam(); name != "" {
		return fmt.Errorf("another machine has passed on the moments of %s", name)
	}

	if old := m.optimizer; old != nil {
		m.optimizer, m.runner.Overlap = nil, nil
		// Captured runs may include the exchange of gradients.
		if err := run.Joined(m.runner.DropCaptures(), old.Close()); err != nil {
			return err
		}
	}

	var all []*update.Param
	for _, i := range m.runner.Program.Inputs {
		if g := gradientOf(m, m.runner.Program, i); g != nil {
			if sum := m.runner.Program.Sums[i.Node]; sum != nil {
				g = sum
			}
			all = append(all, &update.Param{Input: i, Grad: g,
				Rule:           rules.Rule(i.Node.Name(), i.Node.Shape()),
				ClipSeparately: slices.Contains(m.config.separatelyClipped, i.Node)})
		}
	}

	if len(all) == 0 {
		return errors.New("no parameter has a gradient: name them with WithParams and derive " +
			"them with gorgonia.Grad")
	}

	x, err := update.New(update.Runtime{Runner: m.runner, Chooser: m.chooser,
		Activation: m.config.Activation, Kept: m.config.inherited}, rules, all, maxNorm,
		m.config.ranks)
	if err != nil {
		return err
	}

	m.config.inherits = nil // a later optimizer has its own state
	if m.optimizer = x; x.Shared() {
		m.runner.Overlap = x
	}

	return nil
}

// Update applies the optimizer, at its present learning rate, to the parameters and the gradients
// of the last run. It returns the global norm of the gradients before clipping. Update waits for
// this norm only, and the device continues with the rest of the update.
//
// If the norm is not finite, no parameter changes and the error wraps [ErrNonFinite];
// [Machine.NonFinite] then finds the first bad gradient. With WithPrecision(Float16), this is not
// an error as long as the loss scale is above 1, since the next step uses a smaller one: see
// [Machine.LossScale].
//
// After an error of the device, which a later call may report, part of the update may have been
// made. The optimizer state is then undefined, and further updates fail.
func (m *Machine) Update() (norm float64, err error) {
	defer annotate("Machine.Update", &err)
	_, norm, err = applyUpdate(m, nil, nil)
	return norm, err
}

// Step is like [Machine.Update], but also takes the loss of the last run into account and returns it. The
// loss is a node of one float32 that the machine keeps after a run. Call [Machine.RunAll] first; the
// device does not wait between the two.
//
// Step returns as soon as the loss and the norm are known. If the loss is not finite, no parameter
// changes and accumulated gradients are dropped; Step then returns no error, but a norm that is not
// finite either. It returns the same errors as [Machine.Value] and Update.
func (m *Machine) Step(loss *gorgonia.Node) (value, norm float64, err error) {
	defer annotate("Machine.Step", &err)
	a, err := lossOf(m, loss)
	if err != nil {
		return 0, 0, err
	}
	return applyUpdate(m, a, nil)
}

// lossOf returns the array of a loss: one float32 that is kept and not multiplied by the loss
// scale.
func lossOf(m *Machine, loss *gorgonia.Node) (*program.Array, error) {
	a, err := retained(m, loss)
	if err != nil {
		return nil, err
	}
	p := m.runner.Program
	if a.Type != gpu.Float32 || a.Len() != 1 || p.Scaling.Carried[loss] {
		return nil, fmt.Errorf("%s is not a loss, want one float32 number", graph.Describe(loss))
	}
	return a, nil
}

// applyUpdate makes an update that depends on a loss, which may be nil. It calls during, which may be
// nil too, with the loss as soon as the preceding run has ended.
func applyUpdate(m *Machine, by *program.Array,
	during func(float64) error) (value, norm float64, err error) {
	x, err := updatable(m)
	if err != nil {
		return 0, 0, err
	}

	if !m.config.Accumulate { // otherwise, the sums of the gradients are elsewhere
		if err := m.hasValues(); err != nil {
			return 0, 0, err
		}
	}

	scale := &m.runner.Scale
	if m.runner.Program.Scale != nil && scale.Carried != scale.Current.Scale {
		return 0, 0, errors.New("the loss scale has changed since the last run: run the machine again")
	}

	x.Abandoned = true // until the outcome of the update is known
	if err := run.InOrder(func() error { return enqueueUpdate(m, by) }, x.WaitForRun); err != nil {
		return 0, 0, err
	}

	settled := run.Joined(m.layers.Flush(), m.meters.read())
	if by != nil {
		value = float64(x.Loss())
	}

	if during != nil {
		if err := during(value); err != nil {
			return value, 0, run.Joined(settled, err)
		}
	}

	done, err := x.Wait()
	if err != nil {
		return value, 0, err
	}

	x.Abandoned = false
	if m.runner.Program.Scale != nil {
		scale.Current = done.Next
	}

	if done.Skipped && !(scale.Carried > 1) && value-value == 0 {
		settled = run.Joined(fmt.Errorf("%w: their norm is %v", ErrNonFinite, done.Norm), settled)
	}

	return value, float64(done.Norm), settled
}

// enqueueUpdate enqueues an update, together with the marks of a profiler or the monitor.
func enqueueUpdate(m *Machine, loss *program.Array) error {
	defer m.profiler.Finish()
	defer m.profiler.Call("Update")()
	o := m.observer()
	return o.Update(func() error { return m.optimizer.Enqueue(loss, o) })
}

// optimizerOf returns the machine's optimizer.
func optimizerOf(m *Machine) (*update.Optimizer, error) {
	if err := usable(m); err != nil {
		return nil, err
	}
	if m.optimizer == nil {
		return nil, errNoOptimizer
	}
	if m.optimizer.Abandoned {
		return nil, errAbandoned
	}
	return m.optimizer, nil
}

// updatable returns the machine's optimizer if there can be gradients for it.
func updatable(m *Machine) (*update.Optimizer, error) {
	x, err := optimizerOf(m)
	if err == nil && !m.runner.State.Ran() {
		err = errNoGradients
	}
	return x, err
}

var (
	errNoOptimizer = errors.New("the machine has no optimizer: set one with SetOptimizer")
	errNoGradients = errors.New("the machine has not run, so there are no gradients")
	errAbandoned   = errors.New("the last update failed before it was complete, so the optimizer " +
		"state is undefined: resume from a checkpoint")
)

// Forget clears the optimizer's state on the device for the elements from ≤ i < to of a parameter,
// in row-major order. The parameter's step count stays.
func (m *Machine) Forget(param *gorgonia.Node, from, to int) (err error) {
	defer annotate("Machine.Forget", &err)
	x, err := optimizerOf(m)
	switch {
	case err != nil:
		return err
	case param == nil:
		return errors.New("the parameter is nil")
	}

	all := x.Params
	i := slices.IndexFunc(all, func(p *update.Param) bool { return p.Input.Node == param })
	if i < 0 {
		return fmt.Errorf("the optimizer has no parameter %s", graph.Describe(param))
	}

	if n := all[i].Grad.Len(); from < 0 || to < from || to > n {
		return fmt.Errorf("got elements %d to %d of %s, which has %d elements", from, to,
			graph.Describe(param), n)
	}

	x.StateCleared() // on all ranks, since they gather the state together
	return x.Forget(i, from, to)
}

// DropGradients drops the gradients that a machine made with WithAccumulation has accumulated since
// the last update.
//
// Before it returns, the lattices of Kasmina layers receive the measurements of previous runs. A
// caller that restores the lattices after a failed step therefore does not find these measurements
// there later.
func (m *Machine) DropGradients() (err error) {
	defer annotate("Machine.DropGradients", &err)
	if err = usable(m); err != nil {
		return
	}
	return errors.Join(m.layers.Flush(), update.ClearSums(m.runner))
}

// NonFinite returns the first parameter with a gradient that contains NaN or infinity, or that has an
// infinite norm. It returns nil if all gradients are finite. It waits for the device.
//
// After a call of Update, whether or not it changed parameters, NonFinite examines the gradients of
// that update. After a later run, it examines the gradients that the next update would apply, which
// are the accumulated ones with [WithAccumulation].
//
// With [WithRanks], all ranks return the same parameter after an update. Before an update and after
// [Rank.Contribute], each rank examines only the elements that it updates.
func (m *Machine) NonFinite() (_ *gorgonia.Node, err error) {
	defer annotate("Machine.NonFinite", &err)
	x, err := updatable(m)
	if err != nil {
		return nil, err
	}

	bad, err := x.NonFinite()
	for _, p := range m.config.Params {
		if bad[p] {
			return p, nil
		}
	}

	return nil, err
}

// LossScale is the loss scale of a machine made with WithPrecision(Float16), and its history. Like
// the optimizer state it belongs to the state of a training run.
type LossScale struct {
	Scale   float64 `json:"scale"`
	Good    int     `json:"good"`    // steps since the last change of the scale
	Skipped int     `json:"skipped"` // steps skipped because of a gradient that was not finite
}

// firstLossScale is the initial loss scale, the same as PyTorch's.
const firstLossScale = 1 << 16

// LossScale returns the loss scale after the last update. It is 1 for a machine that does not scale
// the loss.
func (m *Machine) LossScale() LossScale {
	s := m.runner.Scale.Current
	return LossScale{Scale: float64(s.Scale), Good: int(s.Good), Skipped: int(s.Skipped)}
}

// SetLossScale continues with the loss scale of another machine or of an earlier run. The machine
// drops the gradients that it has, since they were computed with the old loss scale.
func (m *Machine) SetLossScale(s LossScale) (err error) {
	defer annotate("Machine.SetLossScale", &err)
	if err = usable(m); err != nil {
		return
	}

	scale := optimizer.LossScale{Scale: float32(s.Scale), Good: int32(s.Good),
		Skipped: int32(s.Skipped)}
	at := m.runner.Program.Scale
	switch {
	case at == nil:
		return errors.New("the machine does not scale the loss: its precision is not Float16, or " +
			"its graph has no gradients")
	case float64(scale.Scale) != s.Scale || !(s.Scale >= 1) || scale.Scale-scale.Scale != 0:
		return fmt.Errorf("the loss scale: Scale is %v, want a float32 of at least 1", s.Scale)
	case int(scale.Good) != s.Good || int(scale.Skipped) != s.Skipped ||
		s.Good < 0 || s.Skipped < 0:
		return fmt.Errorf("numbers of steps: Good is %d and Skipped %d, want at least 0", s.Good,
			s.Skipped)
	}

	if err := m.device.ctx.CopyToDevice(at.Ptr(), scale.Bytes(), m.runner.Stream); err != nil {
		return err
	}

	m.runner.Scale = run.Scale{Current: scale}
	return update.ClearSums(m.runner)
}

// GradientPrecision returns BFloat16 if the machine keeps any parameter's gradient in that type
// (see [WithGradientPrecision]), and Float32 otherwise.
func (m *Machine) GradientPrecision() Precision {
	for _, p := range m.config.Params {
		if g := m.runner.Program.Values[p.Deriv()]; g != nil && g.Type == gpu.BFloat16 {
			return BFloat16
		}
	}
	return Float32
}

// Rank groups the methods that a program calls on the machines of all ranks together: see
// [Machine.Rank].
type Rank struct{ m *Machine }

// Rank returns the methods of a machine made with [WithRanks] that must be called on all ranks
// together, once the machine has an optimizer. Like the machine's own methods, they must not be
// called concurrently on one machine.
func (m *Machine) Rank() Rank { return Rank{m} }

// optimizer returns the optimizer that the machine shares with other ranks.
func (r Rank) optimizer() (*update.Optimizer, error) {
	x, err := optimizerOf(r.m)
	if err == nil && !x.Shared() {
		err = errors.New("the machine is not one of several ranks: make it with WithRanks")
	}
	return x, err
}

// Expect announces the next run: the number of ranks that contribute to its round, and whether the
// round is the first of a step. If all ranks contribute, gradients are sent during the run, each as
// soon as it has been computed.
//
// The announcement holds for one run. Either all contributing ranks call Expect or none does.
func (r Rank) Expect(contributors int, first bool) (err error) {
	defer annotate("Rank.Expect", &err)
	x, err := r.optimizer()
	if err != nil {
		return err
	}
	return x.Expect(contributors, first)
}

// Contribute sends the gradients of the last run to the ranks that own them, provided that this
// rank is one of the first contributors. It adds the gradients that arrive to this rank's sums,
// which start at zero if first is true. Gradients that were sent during the run (see [Rank.Expect])
// are not sent again.
//
// All ranks call Contribute after each round of runs, and [Rank.Step] or [Machine.Update] after the
// last round of a step.
func (r Rank) Contribute(contributors int, first bool) (err error) {
	defer annotate("Rank.Contribute", &err)
	x, err := r.optimizer()
	switch {
	case err != nil:
		return err
	case !r.m.runner.State.Ran() && r.m.config.ranks.Group.Rank() < contributors:
		return errNoGradients
	}
	return x.Contribute(contributors, first)
}

// Step is [Machine.Step] for all ranks together, after the last round of a step. If the loss of any
// rank is not finite, no rank changes its parameters. The loss is nil on a rank that did not
// contribute to the last round.
//
// When the run has ended, Step calls during with the loss, or with 0 on a rank without one, while the
// update continues. If during fails, Step returns its error without waiting for the norm.
//
// After any error the optimizer state and the loss scale are undefined, and further updates fail.
func (r Rank) Step(loss *gorgonia.Node, during func(loss float64) error) (norm float64, err error) {
	defer annotate("Rank.Step", &err)
	if _, err := r.optimizer(); err != nil {
		return 0, err
	}

	if during == nil {
		return 0, errors.New("the function to call during the update is nil")
	}

	var by *program.Array
	if loss != nil {
		if by, err = lossOf(r.m, loss); err != nil {
			return 0, err
		}
	}

	_, norm, err = applyUpdate(r.m, by, during)
	return norm, err
}

// GatherState completes this rank's optimizer state with the parts that other ranks have. All ranks
// call it. On a machine with several ranks, [Machine.Download] does not touch the optimizer.
func (r Rank) GatherState() (err error) {
	defer annotate("Rank.GatherState", &err)
	x, err := r.optimizer()
	if err != nil {
		return err
	}
	return setOptimizerState(x, x.GatheredMoment)
}

// DownloadOwn copies this rank's part of the optimizer state from the device to the optimizer, and
// returns the parts of parameters that it covers. The optimizer's other moments become zero.
// DownloadOwn does not wait for other ranks.
func (r Rank) DownloadOwn() (parts []optim.Part, err error) {
	defer annotate("Rank.DownloadOwn", &err)
	x, err := r.optimizer()
	if err != nil {
		return nil, err
	}

	for i, p := range x.Params {
		if from, to := x.Part(i); from < to {
			parts = append(parts, optim.Part{Name: p.Input.Node.Name(), From: from, To: to})
		}
	}

	return parts, setOptimizerState(x, x.Own)
}
