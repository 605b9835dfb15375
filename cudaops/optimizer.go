package cudaops

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/params"
	"github.com/kasmina-go/kasmina/optim"
)

// ErrNonFinite is wrapped by the error of an update whose gradients hold NaN or infinity. It has changed nothing.
var ErrNonFinite = errors.New("the gradients are not finite")

// ruled is an optimiser that says what it does with each parameter, as those of the package optim do.
type ruled interface {
	optim.Optimizer
	Rule(name string, shape []int) optim.Rule
}

// optimizer updates a machine's parameters on the device.
type optimizer struct {
	rules    ruled
	states   []*paramState
	adamw    *kernels.Table
	muon     *kernels.Table
	control  gpu.Ptr // kernels.Control
	staging  []byte  // the same, pinned
	squares  gpu.Ptr // of each table's chunks, one table behind the other, and of the loss; then Muon's workspace
	looked   bool    // they are those of the last update's gradients, and no run has been asked for since
	settings kernels.Control
	done     gpu.Event // the control block is back
	steps    int       // updates on the device
	owned    []gpu.Ptr
	loss     []byte    // pinned, of a step
	ran      gpu.Event // the run before the update is done

	recorded map[gpu.Ptr]*recording // by the loss that the update looks at; 0 for none

	newtonSchulz []func() error
	muonSquares  *array         // which all iterations work in
	renew        []func() error // copies of parameters that the update does not write
}

// paramState is a parameter and what the optimiser remembers of it, on the device.
type paramState struct {
	input   *input
	grad    *array
	rule    optim.Rule
	moments []*array // AdamW: exp_avg and exp_avg_sq; Muon: momentum_buffer
	step    int64    // updates before those that the device counts
}

// SetOptimizer puts an optimiser of the package optim, with what it remembers so far, on the device, where
// [Machine.Update] applies it to the machine's parameters. maxNorm limits the global norm of the gradients; 0 means no limit.
// An optimiser that the machine had before is let go of, with what it remembered there, and after an error it has none.
func (m *Machine) SetOptimizer(o optim.Optimizer, maxNorm float64) error {
	if err := m.setOptimizer(o, maxNorm); err != nil {
		return fmt.Errorf("cudaops.Machine.SetOptimizer: %w", err)
	}
	return nil
}

func (m *Machine) setOptimizer(o optim.Optimizer, maxNorm float64) (err error) {
	rules, ok := o.(ruled)
	switch {
	case m.closed:
		return errClosed
	case ok && isNil(o):
		return fmt.Errorf("the optimiser is a nil %T", o)
	case !ok:
		return fmt.Errorf("a %T has no kernels, want optim.AdamW or optim.Muon", o)
	case !(maxNorm >= 0) || math.IsInf(maxNorm, 0):
		return fmt.Errorf("maxNorm is %v, want a finite number of at least 0", maxNorm)
	}
	defer func() { m.expect(m.momentsToCome()) }()
	if old := m.optimizer; old != nil {
		m.optimizer = nil
		if err := joined(m.device.ctx.SyncStream(m.stream), old.close(m)); err != nil {
			return err
		}
	}
	x := &optimizer{rules: rules, settings: kernels.Control{MaxNorm: maxNorm, GradScale: 1, SkipNonFinite: true}, recorded: map[gpu.Ptr]*recording{}}
	m.optimizer = x
	defer func() {
		if err != nil {
			m.optimizer = nil
			err = joined(err, m.device.ctx.SyncStream(m.stream), x.close(m))
		}
	}()
	for _, in := range m.program.inputs {
		if g := m.gradientIn(m.program, in); g != nil {
			p := &paramState{input: in, grad: g, rule: rules.Rule(in.node.Name(), in.node.Shape())}
			if sum := m.program.sums[in.node]; sum != nil {
				p.grad = sum
			}
			x.states = append(x.states, p)
		}
	}
	if len(x.states) == 0 {
		return errors.New("no parameter has a gradient: name them with WithParams and derive them with gorgonia.Grad")
	}
	if err := m.loadState(x); err != nil {
		return err
	}
	if err := m.buildTables(x); err != nil {
		return err
	}
	if x.control, err = x.alloc(m, kernels.ControlBytes, "the optimiser"); err != nil {
		return err
	}
	chunks := x.sums()
	if x.muon != nil {
		chunks += x.muon.Chunks
	}
	if x.squares, err = x.alloc(m, 4*chunks, "the optimiser"); err != nil {
		return err
	}
	if x.staging, err = m.device.ctx.AllocHost(kernels.ControlBytes); err != nil {
		return err
	}
	clear(x.staging)
	if x.loss, err = m.device.ctx.AllocHost(4); err != nil {
		return err
	}
	if x.ran, err = m.device.ctx.NewEvent(false); err != nil {
		return err
	}
	x.done, err = m.device.ctx.NewEvent(false)
	return err
}

func isNil(o optim.Optimizer) bool {
	v := reflect.ValueOf(o)
	return v.Kind() == reflect.Pointer && v.IsNil()
}

// updates reports whether the optimiser changes an input.
func (x *optimizer) updates(in *input) bool {
	return slices.ContainsFunc(x.states, func(p *paramState) bool { return p.input == in })
}

// bytes is what an update has to move: it reads gradients for their norm, and then these, parameters and moments, and writes
// the last two and the parameters' copies. Those of float8, which are made of the others, it does not count. Without an optimiser it
// is 0.
func (x *optimizer) bytes() (n float64) {
	if x == nil {
		return 0
	}
	for _, p := range x.states {
		n += 2 * float64(p.grad.extent())
		for _, a := range append([]*array{p.input.array}, p.moments[:]...) {
			if a != nil {
				n += 2 * float64(a.extent())
			}
		}
		for _, c := range p.input.copies {
			n += float64(c.extent())
		}
	}
	return n
}

// alloc takes device memory that close gives back.
func (x *optimizer) alloc(m *Machine, bytes int, what string) (gpu.Ptr, error) {
	p, err := m.alloc(bytes, what)
	if err == nil {
		x.owned = append(x.owned, p)
	}
	return p, err
}

// newArray is an array in memory of its own.
func (x *optimizer) newArray(m *Machine, e elem, what string, shape ...int) (*array, error) {
	a := &array{block: &block{resident: true}, elem: e, shape: shape}
	a.Bytes = max(1, a.len()*e.size())
	var err error
	a.base, err = x.alloc(m, a.Bytes, what)
	return a, err
}

// tables are those of AdamW's and of Muon's parameters, where there are any.
func (x *optimizer) tables() []*kernels.Table {
	return slices.DeleteFunc([]*kernels.Table{x.adamw, x.muon}, func(t *kernels.Table) bool { return t == nil })
}

// sums is how many sums of squares an update adds up at most: of all chunks, and of the loss.
func (x *optimizer) sums() int {
	n := 1
	for _, t := range x.tables() {
		n += t.Chunks
	}
	return n
}

// stateNames are what package optim calls the moments.
func (p *paramState) names() []string {
	if p.rule.Muon {
		return []string{"momentum_buffer"}
	}
	return []string{"exp_avg", "exp_avg_sq"}
}

// loadState copies what the optimiser remembers to the device.
func (m *Machine) loadState(x *optimizer) error {
	known := map[string]optim.Tensor{}
	for _, t := range x.rules.State() {
		known[t.Name] = t
	}
	for _, p := range x.states {
		name := p.input.node.Name()
		if t, ok := known[name+".step"]; ok {
			p.step = t.Data.([]int64)[0]
		}
		for _, moment := range p.names() {
			a, err := x.newArray(m, float32s, "the optimiser's state", p.input.array.shape...)
			if err != nil {
				return err
			}
			p.moments = append(p.moments, a)
			t, ok := known[name+"."+moment]
			if !ok {
				err = m.device.ctx.Memset8(a.ptr(), 0, a.Bytes, m.stream)
			} else {
				err = m.device.ctx.CopyToDevice(a.ptr(), gpu.Bytes(t.Data.([]float32)), m.stream)
			}
			if err != nil {
				return err
			}
		}
	}
	return m.device.ctx.SyncStream(m.stream)
}

// buildTables lays out the parameters for the kernels.
func (m *Machine) buildTables(x *optimizer) error {
	var adamw, muon []kernels.OptimTensor
	var matrices []*paramState // of muon
	for _, p := range x.states {
		r := p.rule
		t := kernels.OptimTensor{Param: p.input.array.ptr(), Grad: p.grad.ptr(), GradType: p.grad.elem.dtype(), First: p.moments[0].ptr(),
			Size: p.grad.len(), LRScale: r.LRScale, Decay: r.Decay, Beta1: r.Beta1, Beta2: r.Beta2, Step: p.step}
		for _, s := range p.input.copies {
			if t.Copy == 0 && s.at%vectorBytes == 0 {
				t.Copy, t.CopyType = s.ptr(), s.elem.dtype() // written along with the parameter
			} else {
				x.renew = append(x.renew, s.renew)
			}
		}
		if !r.Muon {
			x.settings.Eps = r.Eps
			t.Second = p.moments[1].ptr()
			adamw = append(adamw, t)
			continue
		}
		t.ShapeScale = r.ShapeScale
		muon, matrices = append(muon, t), append(matrices, p)
	}
	err := m.orthogonalise(x, muon, matrices)
	if err != nil {
		return err
	}
	if len(adamw) > 0 {
		if x.adamw, err = m.k.NewTable(adamw); err != nil {
			return err
		}
	}
	if len(muon) > 0 {
		x.muon, err = m.k.NewTable(muon)
	}
	return err
}

// Update applies the optimiser, at its present learning rate, to the parameters and the gradients of the last run. It waits
// for the device and returns the global norm of the gradients before clipping. If the norm is not finite, no parameter changes
// and the error wraps [ErrNonFinite], and [Machine.NonFinite] says where that shows first; but WithPrecision(Float16) it is no
// error while the loss scale is above 1, since the next step has a smaller one (see [Machine.LossScale]). After an error of the
// device the update may have been made in part.
func (m *Machine) Update() (norm float64, err error) {
	norm, refused, err := m.update(nil)
	if refused {
		err = joined(refusal(norm), err)
	}
	if err != nil {
		return norm, fmt.Errorf("cudaops.Machine.Update: %w", err)
	}
	return norm, nil
}

// refusal is the error of an update that was not made for its norm.
func refusal(norm float64) error {
	return fmt.Errorf("%w: their norm is %v", ErrNonFinite, float32(norm))
}

// Step is [Machine.Value] of a loss, a node of one float32 that is kept, and [Machine.Update] in one: the device does not wait
// between the run and the update. If the loss is not finite no parameter changes, which is no error; then the norm is not finite
// either, and gathered gradients are dropped, but kept WithPrecision(Float16). The errors are those of Value and Update.
func (m *Machine) Step(loss *gorgonia.Node) (value, norm float64, err error) {
	if value, norm, err = m.step(loss); err != nil {
		return value, norm, fmt.Errorf("cudaops.Machine.Step: %w", err)
	}
	return value, norm, nil
}

func (m *Machine) step(loss *gorgonia.Node) (value, norm float64, err error) {
	a, err := m.lasting(loss)
	if err != nil {
		return 0, 0, err
	}
	if a.elem != float32s || a.len() != 1 || m.program.scaling != nil && m.program.scaling.carried[loss] {
		return 0, 0, fmt.Errorf("%s is no loss, want a number", describe(loss))
	}
	by := a
	if m.program.scale != nil { // which is not to change for a loss that is not finite
		if value, err = m.lossValue(loss); err != nil {
			return 0, 0, err
		}
		if value-value != 0 {
			return value, math.NaN(), m.settle()
		}
		by = nil
	}
	norm, refused, err := m.update(by)
	if by != nil && m.optimizer != nil {
		value = float64(gpu.View[float32](m.optimizer.loss)[0])
	}
	if refused && value-value == 0 {
		err = joined(refusal(norm), err)
	}
	return value, norm, err
}

func (m *Machine) lossValue(loss *gorgonia.Node) (float64, error) {
	v, err := m.value(loss)
	if err != nil {
		return 0, err
	}
	x, err := params.Memory(v)
	if err != nil {
		return 0, err
	}
	return float64(x.([]float32)[0]), nil
}

// update is Update, and with a loss Step. It was refused if a gradient or the loss is not finite, of
// which err says nothing.
func (m *Machine) update(loss *array) (norm float64, refused bool, err error) {
	if err := m.updatable(); err != nil {
		return 0, false, err
	}
	x := m.optimizer
	if m.program.scale != nil && m.carried != m.scale.Scale {
		return 0, false, errors.New("the loss scale is not that of the last run: run the machine again")
	}
	if err := m.sendUpdate(x, loss); err != nil {
		return 0, false, err
	}
	if loss != nil {
		if err := m.device.ctx.SyncEvent(x.ran); err != nil {
			return 0, false, err
		}
		m.read = true
	}
	var settled error
	if m.read { // else a later run settles
		settled = m.settle()
	}
	if err := m.device.ctx.SyncEvent(x.done); err != nil {
		return 0, false, err
	}
	done := kernels.DecodeControl(x.staging)
	if m.program.scale != nil {
		m.scale = done.Next
	}
	if !done.Skipped {
		x.steps++
	}
	return float64(done.Norm), done.Skipped && !(m.carried > 1), settled
}

// sendUpdate enqueues the update, and what brings its result and the loss back.
func (m *Machine) sendUpdate(x *optimizer, loss *array) error {
	defer m.profiler.finish()
	defer m.profiler.call("Update")()
	ctx := m.device.ctx
	x.settings.LR = x.rules.LR()
	if want := x.settings.Bytes(); !bytes.HasPrefix(x.staging, want[:kernels.ControlSettings]) {
		copy(x.staging, want)
		if err := ctx.CopyToDevice(x.control, x.staging, m.stream); err != nil {
			clear(x.staging)
			return err
		}
	}
	if loss != nil {
		if err := ctx.Record(x.ran, m.stream); err != nil {
			return err
		}
	}
	if err := m.enqueueUpdate(x, loss); err != nil {
		return err
	}
	m.gathered, x.looked = false, true // also where launchUpdate was captured before
	if err := ctx.CopyToHost(x.staging, x.control, m.stream); err != nil {
		return err
	}
	if loss != nil {
		if err := ctx.CopyToHost(x.loss, loss.ptr(), m.stream); err != nil {
			return err
		}
	}
	return ctx.Record(x.done, m.stream)
}

// enqueueUpdate launches the update: as it is the first time, which loads the kernels, and then as a graph.
func (m *Machine) enqueueUpdate(x *optimizer, loss *array) error {
	var key gpu.Ptr
	if loss != nil {
		key = loss.ptr()
	}
	r := x.recorded[key]
	if r == nil {
		r = new(recording)
		x.recorded[key] = r
	}
	launch := func() error { return m.launchUpdate(x, key) }
	run := func() error {
		if !r.loaded {
			err := launch()
			r.loaded = err == nil
			return err
		}
		if r.graph == nil {
			var err error
			if r.graph, err = m.capture(launch); err != nil {
				return err
			}
		}
		return m.device.ctx.LaunchGraph(r.graph, m.stream)
	}
	return m.profiler.around(r.loaded, func() error { return m.monitor.updating(run) }, func() error {
		m.profiler.doing(markedTask{op: "Update", bytes: x.bytes(), counts: true})
		return launch()
	})
}

// launchUpdate launches the update's kernels. Where there is a loss, 0·loss stands among the squares of the gradients: 0, which
// leaves their sum as it is, or NaN, at which the update is not made.
func (m *Machine) launchUpdate(x *optimizer, loss gpu.Ptr) error {
	at, err := m.launchSquares(x)
	if err != nil {
		return err
	}
	if loss != 0 {
		if err := m.k.Unary(m.stream, kernels.MulScalar, x.squares.Offset(4*at), loss, 0, 1, gpu.Float32); err != nil {
			return err
		}
		at++
	}
	var scale gpu.Ptr
	if m.program.scale != nil {
		scale = m.program.scale.ptr()
	}
	if err := m.k.GradNorm(m.stream, x.control, x.squares, at, scale); err != nil {
		return err
	}
	if x.adamw != nil {
		if err := m.k.AdamW(m.stream, x.control, x.adamw); err != nil {
			return err
		}
	}
	if x.muon != nil {
		if err := m.launchMuon(x); err != nil {
			return err
		}
	}
	return inTurn(func() error { return inTurn(x.renew...) }, func() error { return m.quantizeAgain(x.updates) }, m.clearSums)
}

// launchSquares launches the sums of the gradients' squares, and returns how many there are.
func (m *Machine) launchSquares(x *optimizer) (n int, err error) {
	for _, t := range x.tables() {
		if err := m.k.GradSquares(m.stream, x.squares.Offset(4*n), t); err != nil {
			return 0, err
		}
		n += t.Chunks
	}
	return n, nil
}

// updatable returns an error where there can be no gradients for an optimiser.
func (m *Machine) updatable() error {
	switch {
	case m.closed:
		return errClosed
	case m.optimizer == nil:
		return errors.New("the machine has no optimiser: give it one with SetOptimizer")
	case !m.ran:
		return errors.New("the machine has not run, so there are no gradients")
	}
	return nil
}

// Forget makes zero what the machine's optimiser remembers on the device of the elements from ≤ i < to, in row-major order, of
// a parameter, beside the count of its steps.
func (m *Machine) Forget(param *gorgonia.Node, from, to int) error {
	if err := m.forgetMoments(param, from, to); err != nil {
		return fmt.Errorf("cudaops.Machine.Forget: %w", err)
	}
	return nil
}

func (m *Machine) forgetMoments(param *gorgonia.Node, from, to int) error {
	switch {
	case m.closed:
		return errClosed
	case m.optimizer == nil:
		return errors.New("the machine has no optimiser: give it one with SetOptimizer")
	}
	if param == nil {
		return errors.New("the parameter is nil")
	}
	i := slices.IndexFunc(m.optimizer.states, func(p *paramState) bool { return p.input.node == param })
	if i < 0 {
		return fmt.Errorf("the optimiser has no parameter %s", describe(param))
	}
	for _, a := range m.optimizer.states[i].moments {
		if from < 0 || to < from || to > a.len() {
			return fmt.Errorf("elements %d to %d of %s, which has %d", from, to, describe(param), a.len())
		}
		if err := m.device.ctx.Memset8(a.ptr().Offset(from*a.elem.size()), 0, (to-from)*a.elem.size(), m.stream); err != nil {
			return err
		}
	}
	return nil
}

// DropGradients forgets the gradients that a machine made WithAccumulation has gathered since the last update.
func (m *Machine) DropGradients() error {
	err := errClosed
	if !m.closed {
		err = m.clearSums()
	}
	if err != nil {
		return fmt.Errorf("cudaops.Machine.DropGradients: %w", err)
	}
	return nil
}

// clearSums sets gathered gradients to zero.
func (m *Machine) clearSums() error {
	m.gathered = false
	for _, s := range m.program.sums {
		if err := m.device.ctx.Memset8(s.ptr(), 0, s.Bytes, m.stream); err != nil {
			return err
		}
	}
	return nil
}

func (m *Machine) launchMuon(x *optimizer) error {
	if err := m.k.MuonDirection(m.stream, x.control, x.squares.Offset(4*x.sums()), x.muon, x.nesterov()); err != nil {
		return err
	}
	for _, run := range x.newtonSchulz {
		if err := run(); err != nil {
			return err
		}
	}
	return m.k.MuonApply(m.stream, x.control, x.muon)
}

func (x *optimizer) nesterov() bool {
	return slices.ContainsFunc(x.states, func(p *paramState) bool { return p.rule.Muon && p.rule.Nesterov })
}

func (x *optimizer) close(m *Machine) error {
	ctx := m.device.ctx
	var errs []error
	for _, p := range x.owned {
		errs = append(errs, m.free(p))
	}
	for _, t := range x.tables() {
		errs = append(errs, t.Free())
	}
	for _, r := range x.recorded {
		if r.graph != nil {
			errs = append(errs, ctx.DestroyGraph(r.graph))
		}
	}
	for _, b := range [][]byte{x.staging, x.loss} {
		if b != nil {
			errs = append(errs, ctx.FreeHost(b))
		}
	}
	for _, e := range []gpu.Event{x.ran, x.done} {
		if e != 0 {
			errs = append(errs, ctx.DestroyEvent(e))
		}
	}
	return joined(errs...)
}
