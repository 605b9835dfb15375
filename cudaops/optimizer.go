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

// ErrNonFinite is wrapped by the error of an update whose gradients hold NaN or infinity. It has
// changed nothing.
var ErrNonFinite = errors.New("the gradients are not finite")

// SetOptimizer puts an optimiser of the package optim, with what it remembers so far, on the
// device. There [Machine.Update] applies it to the machine's parameters. The limit maxNorm is of
// the global norm of the gradients, and of that of those [WithApart]; 0 means none. Arguments that
// are refused change nothing. Else an optimiser that the machine had before is let go of, with what
// it remembered there, and after an error it has none.
func (m *Machine) SetOptimizer(o optim.Optimizer, maxNorm float64) (err error) {
	defer in("Machine.SetOptimizer", &err)
	if err = usable(m); err != nil {
		return
	}
	rules, ok := o.(optim.Rules)
	switch v := reflect.ValueOf(o); {
	case ok && v.Kind() == reflect.Pointer && v.IsNil():
		return fmt.Errorf("the optimiser is a nil %T", o)
	case !ok:
		return fmt.Errorf("a %T does not declare its rules: want an optimizer of the package optim", o)
	case !(maxNorm >= 0) || math.IsInf(maxNorm, 0):
		return fmt.Errorf("maxNorm is %v, want a finite number of at least 0", maxNorm)
	case len(m.config.inherits) > 0 && len(m.config.kept.Params) == 0:
		return errors.New("the moments that WithKept hands on are not there any more: what was kept " +
			"was closed before, or other machines have left it to the next")
	}
	if name := m.config.missing(); name != "" {
		return fmt.Errorf("another machine has left the moments of %s to the next", name)
	}
	if old := m.optimizer; old != nil {
		m.optimizer, m.runner.Beside = nil, nil
		// runs may have been captured with the exchange that goes along with them
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
				Rule:  rules.Rule(i.Node.Name(), i.Node.Shape()),
				Apart: slices.Contains(m.config.apart, i.Node)})
		}
	}
	if len(all) == 0 {
		return errors.New("no parameter has a gradient: name them with WithParams and derive " +
			"them with gorgonia.Grad")
	}
	x, err := update.New(update.Machine{Runner: m.runner, Chooser: m.chooser,
		Activation: m.config.Activation, Kept: m.config.inherited}, rules, all, maxNorm,
		m.config.ranks)
	if err != nil {
		return err
	}
	m.config.inherits = nil // a later optimiser remembers what it does
	if m.optimizer = x; x.Shared() {
		m.runner.Beside = x
	}
	return nil
}

// Update applies the optimiser, at its present learning rate, to the parameters and the gradients
// of the last run. It waits for the global norm of the gradients before clipping, which it returns;
// the device then goes on with the rest of the update. If the norm is not finite, no parameter
// changes and the error wraps [ErrNonFinite], and [Machine.NonFinite] says where that shows first.
// But WithPrecision(Float16) it is no error while the loss scale is above 1, since the next step has
// a smaller one (see [Machine.LossScale]). After an error of the device, which may show in a later
// call, the update may have been made in part. Then it is not known what the optimiser remembers:
// it makes no other update, and its state is not to be had.
func (m *Machine) Update() (norm float64, err error) {
	defer in("Machine.Update", &err)
	_, norm, err = updateBy(m, nil, nil)
	return norm, err
}

// Step is [Machine.Update] by the loss of the last run, a node of one float32 that is kept, whose
// value it returns too. [Machine.RunAll] comes before it, and the device does not wait between the
// two. Step returns when loss and norm are known, as Update does. If the loss is not finite no
// parameter changes, which is no error. Then the norm is not finite either, and gathered gradients
// are dropped. The errors are those of [Machine.Value] and Update.
func (m *Machine) Step(loss *gorgonia.Node) (value, norm float64, err error) {
	defer in("Machine.Step", &err)
	a, err := lossOf(m, loss)
	if err != nil {
		return 0, 0, err
	}
	return updateBy(m, a, nil)
}

// lossOf is where a loss lies: one float32 that is kept, and does not carry the loss scale.
func lossOf(m *Machine, loss *gorgonia.Node) (*program.Array, error) {
	a, err := lasting(m, loss)
	if err != nil {
		return nil, err
	}
	p := m.runner.Program
	if a.Type != gpu.Float32 || a.Len() != 1 || p.Scaling.Carried[loss] {
		return nil, fmt.Errorf("%s is no loss, want a number", graph.Describe(loss))
	}
	return a, nil
}

// updateBy is an update by a loss, nil for none, with which beside is called when the run before it
// is over.
func updateBy(m *Machine, by *program.Array,
	beside func(float64) error) (value, norm float64, err error) {
	x, err := updatable(m)
	if err != nil {
		return 0, 0, err
	}
	scale := &m.runner.Scale
	if m.runner.Program.Scale != nil && scale.Carried != scale.Now.Scale {
		return 0, 0,
			errors.New("the loss scale is not that of the last run: run the machine again")
	}
	x.Abandoned = true // until it is known how the update ended
	if err := run.InTurn(func() error { return enqueueUpdate(m, by) }, x.WaitForRun); err != nil {
		return 0, 0, err
	}
	settled := m.layers.Settle()
	if by != nil {
		value = float64(x.Loss())
	}
	if beside != nil {
		if err := beside(value); err != nil {
			return value, 0, run.Joined(settled, err)
		}
	}
	done, err := x.Wait()
	if err != nil {
		return value, 0, err
	}
	x.Abandoned = false
	if m.runner.Program.Scale != nil {
		scale.Now = done.Next
	}
	if done.Skipped && !(scale.Carried > 1) && value-value == 0 {
		settled = run.Joined(fmt.Errorf("%w: their norm is %v", ErrNonFinite, done.Norm), settled)
	}
	return value, float64(done.Norm), settled
}

// enqueueUpdate puts an update on its way, with the marks of a profiler or of the monitor.
func enqueueUpdate(m *Machine, loss *program.Array) error {
	defer m.profiler.Finish()
	defer m.profiler.Call("Update")()
	o := m.observer()
	return o.Update(func() error { return m.optimizer.Enqueue(loss, o) })
}

// optimizerOf is the machine's optimiser.
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

// updatable is the machine's optimiser, where there can be gradients for it.
func updatable(m *Machine) (*update.Optimizer, error) {
	x, err := optimizerOf(m)
	if err == nil && !m.runner.State.Ran() {
		err = errNoGradients
	}
	return x, err
}

var (
	errNoOptimizer = errors.New("the machine has no optimiser: give it one with SetOptimizer")
	errNoGradients = errors.New("the machine has not run, so there are no gradients")
	errAbandoned   = errors.New("the last update failed while it was made, so what the optimiser " +
		"remembers is not known: resume from a checkpoint")
)

// Forget makes zero what the machine's optimiser remembers on the device of a parameter's elements
// from ≤ i < to, in row-major order. The count of its steps stays.
func (m *Machine) Forget(param *gorgonia.Node, from, to int) (err error) {
	defer in("Machine.Forget", &err)
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
		return fmt.Errorf("the optimiser has no parameter %s", graph.Describe(param))
	}
	if n := all[i].Grad.Len(); from < 0 || to < from || to > n {
		return fmt.Errorf("elements %d to %d of %s, which has %d", from, to,
			graph.Describe(param), n)
	}
	x.Forgot() // at all ranks, which gather the state together
	return x.Forget(i, from, to)
}

// DropGradients forgets the gradients that a machine made WithAccumulation has gathered since the
// last update. The lattices of Kasmina layers receive what runs have measured before it returns, so
// that a caller who restores the lattices after a failed step does not find it there later.
func (m *Machine) DropGradients() (err error) {
	defer in("Machine.DropGradients", &err)
	if err = usable(m); err != nil {
		return
	}
	return errors.Join(m.layers.Settle(), update.ClearSums(m.runner))
}

// NonFinite returns the first parameter whose gradient has an element that is NaN or infinite, or a
// norm that is, nil if there is none. It looks at the gradients of the last [Machine.Update],
// whether that was made or not. After another run it looks at those that the next one would apply:
// with [WithAccumulation] at the sums. It waits for the device. After an update all ranks
// ([WithRanks]) name the same parameter. Ahead of one, behind [Rank.Contribute], each looks only at
// the elements that it updates, and returns nil where none of these is bad.
func (m *Machine) NonFinite() (_ *gorgonia.Node, err error) {
	defer in("Machine.NonFinite", &err)
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

// LossScale is the loss scale of a machine WithPrecision(Float16), and how it fared. It is part of
// the state of a training run, as what an optimiser remembers is.
type LossScale struct {
	Scale   float64 `json:"scale"`
	Good    int     `json:"good"`    // steps since the scale was last changed
	Skipped int     `json:"skipped"` // steps with a gradient that was not finite
}

// firstLossScale is PyTorch's.
const firstLossScale = 1 << 16

// LossScale returns the loss scale as of the last update; it is 1 in a machine that does not scale.
func (m *Machine) LossScale() LossScale {
	if m == nil || m.runner == nil {
		return LossScale{}
	}
	s := m.runner.Scale.Now
	return LossScale{Scale: float64(s.Scale), Good: int(s.Good), Skipped: int(s.Skipped)}
}

// SetLossScale continues with the loss scale of another machine, or of an earlier run. Gradients
// that the machine holds were made with the old one, and are dropped.
func (m *Machine) SetLossScale(s LossScale) (err error) {
	defer in("Machine.SetLossScale", &err)
	if err = usable(m); err != nil {
		return
	}
	scale := optimizer.LossScale{Scale: float32(s.Scale), Good: int32(s.Good),
		Skipped: int32(s.Skipped)}
	at := m.runner.Program.Scale
	switch {
	case at == nil:
		return errors.New("the machine does not scale: it has another precision than Float16, or " +
			"a graph without gradients")
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
	m.runner.Scale = run.Scale{Now: scale}
	return update.ClearSums(m.runner)
}

// GradientPrecision returns BFloat16 if the machine keeps the gradient of any parameter like that
// (see [WithGradientPrecision]), else Float32.
func (m *Machine) GradientPrecision() Precision {
	if m == nil || m.runner == nil {
		return Float32
	}
	for _, p := range m.config.Params {
		if g := m.runner.Program.Values[p.Deriv()]; g != nil && g.Type == gpu.BFloat16 {
			return BFloat16
		}
	}
	return Float32
}

// Rank is a machine's part in what the ranks of a group do together: see [Machine.Rank].
type Rank struct{ m *Machine }

// Rank is what a machine made [WithRanks] does together with those of the other ranks, once it has
// an optimiser. Its methods are called like those of the machine.
func (m *Machine) Rank() Rank { return Rank{m} }

// optimizer is that of all ranks.
func (r Rank) optimizer() (*update.Optimizer, error) {
	x, err := optimizerOf(r.m)
	if err == nil && !x.Shared() {
		err = errors.New("the machine is not one of several ranks: WithRanks makes it one")
	}
	return x, err
}

// Expect says, ahead of a run, in which round it is. It tells how many ranks contribute to it, and
// whether it is the first of a step. Where all do, the gradients leave beside the run, each as soon
// as it is there. It holds for one run. All ranks that contribute call it, or none.
func (r Rank) Expect(contributors int, first bool) (err error) {
	defer in("Rank.Expect", &err)
	x, err := r.optimizer()
	if err != nil {
		return err
	}
	return x.Expect(contributors, first)
}

// Contribute sends the gradients of the last run to the ranks that own them, where this rank is
// among the first contributors. It adds what comes to this rank's sums, which are begun anew with
// first. What has left beside the run (see [Rank.Expect]) is not sent again. All ranks call it
// after every round of runs, and [Rank.Step] or [Machine.Update] after the last one of a step.
func (r Rank) Contribute(contributors int, first bool) (err error) {
	defer in("Rank.Contribute", &err)
	x, err := r.optimizer()
	switch {
	case err != nil:
		return err
	case !r.m.runner.State.Ran() && r.m.config.ranks.Group.Rank() < contributors:
		return errNoGradients
	}
	return x.Contribute(contributors, first)
}

// Step is [Machine.Step] of all ranks, behind the last round of a step. A loss that is not finite
// at one of them leaves the parameters of all as they are. The loss is nil at a rank that did not
// contribute to that round. When the run is over, beside is called with the loss, 0 for none, while
// the update goes on. An error of it is that of the step, which does not wait for the norm then.
// From an error on it is not known what the optimiser remembers, nor the loss scale: it makes no
// other update, and its state is not to be had.
func (r Rank) Step(loss *gorgonia.Node, beside func(loss float64) error) (norm float64, err error) {
	defer in("Rank.Step", &err)
	if _, err := r.optimizer(); err != nil {
		return 0, err
	}
	if beside == nil {
		return 0, errors.New("what goes beside the update is nil")
	}
	var by *program.Array
	if loss != nil {
		if by, err = lossOf(r.m, loss); err != nil {
			return 0, err
		}
	}
	_, norm, err = updateBy(r.m, by, beside)
	return norm, err
}

// GatherState brings what the optimisers of all ranks remember into this rank's, whole. All ranks
// call it. [Machine.Download] leaves the optimiser alone there.
func (r Rank) GatherState() (err error) {
	defer in("Rank.GatherState", &err)
	x, err := r.optimizer()
	if err != nil {
		return err
	}
	return stateOf(x, x.GatheredMoment)
}

// DownloadOwn brings what this rank's GPU remembers into the optimiser, and returns the parts that
// it has. Elsewhere the optimiser's moments are zeros then. It waits for no other rank.
func (r Rank) DownloadOwn() (parts []optim.Part, err error) {
	defer in("Rank.DownloadOwn", &err)
	x, err := r.optimizer()
	if err != nil {
		return nil, err
	}
	for i, p := range x.Params {
		if from, to := x.Part(i); from < to {
			parts = append(parts, optim.Part{Name: p.Input.Node.Name(), From: from, To: to})
		}
	}
	return parts, stateOf(x, x.Own)
}
