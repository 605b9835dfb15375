package runtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// ErrInjected is wrapped by every error that a Fault causes.
var ErrInjected = errors.New("injected failure")

// The operations that can fail. An operation of an engine, an optimizer or a file returns ErrInjected
// instead of doing its work. "cancel" and "stop" end the run during a call that succeeds.
var (
	engineOps = []string{"engine", "engine", "engine", "Gradients", "Update", "Loss", "Push", "Pull",
		"Figures", "Close", "Decoder", "Forget"}
	optimizerOps = []string{"SetState", "SetState", "SetState", "SetState", "SetState", "Declare", "SetLR", "Step"}
	diskOps      = []string{"ReadTokens", "checkpoint file", "checkpoint folder", "record"}
	callbackOps  = []string{"callback StepEnd", "callback EpochEnd", "callback Reshaped",
		"callback Noted", "callback RunStart", "callback RunEnd", "callback Saved",
		"callback EvalEnd", "panic StepEnd", "panic Decide"}
	partOps   = []string{"part StartRun", "part PrepareStep", "part FinishStep", "part Save", "part Load"}
	cancelOps = []string{"cancel StepEnd", "cancel Gradients", "cancel Gradients", "cancel Loss",
		"stop StepEnd", duringSample}
)

// faultOps returns the operations that can fail on a machine. Repeated operations are chosen more
// often.
func faultOps(l Limits) []string {
	all := slices.Concat(engineOps, diskOps, callbackOps, partOps, cancelOps)
	if l.Optimizer {
		all = append(all, optimizerOps...)
	}
	if l.Ranks > 1 {
		all = append(all, "rank Gradients", "rank StepEnd", "rank Pull")
	}
	return append(all, l.Faults...)
}

// resumable reports whether an operation can fail while a checkpoint is read.
func resumable(op string) bool {
	return slices.Contains([]string{"engine", "Push", "SetState", "Declare", "Close", "Pull", "part Load"}, op)
}

// lasting reports whether an operation may keep failing. These are operations that the trainer also needs to
// restore the state from before a failure.
func lasting(op string) bool {
	return slices.Contains([]string{"engine", "Push", "Pull", "Forget", "Loss", "SetState", "Declare", "SetLR"}, op)
}

// injector counts operations and makes one call fail, or all calls from one on.
type injector struct {
	mu     sync.Mutex
	counts map[string]int
	op     string // operation that fails
	at     int    // number of the failing call, from 1; 0 for none
	fired  bool
	silent bool
	lasts  bool  // later calls fail as well
	wraps  error // a second error that the failure wraps, or nil
	cancel func()
	stop   func()

	// stages returns the stages of all seeds. They are recorded after the orders of a step have been
	// given, which is before a failure in the preparation of the next step, and after the failure at each
	// update before that step ends. The last of these updates comes after the preparation, even if a twin
	// has caught up in between.
	stages                  func() [][]state.Stage
	settled, failed, passed [][]state.Stage
	preparing               bool // the step in which the call failed has not ended
	step                    int  // last step before the failure
	now                     func() int
	dropped                 []dropped // commands that without removes
	omitted                 int       // number of commands that without has removed
}

// dropped is a command of a controller after an epoch that was rejected because of a failure.
type dropped struct {
	epoch int
	text  string
}

// without returns the commands of a controller after an epoch, except the dropped ones.
func (i *injector) without(epoch int, all []state.Command) []state.Command {
	left := slices.DeleteFunc(slices.Clone(all), func(c state.Command) bool {
		return slices.Contains(i.dropped, dropped{epoch, c.String()})
	})
	i.omitted += len(all) - len(left)
	return left
}

// settle records the stages of all seeds. From now on, only the trainer changes them.
func (i *injector) settle() {
	stages := i.stages()
	i.mu.Lock()
	defer i.mu.Unlock()
	i.settled = stages
}

func newInjector() *injector { return &injector{counts: map[string]int{}} }

// arm makes the at-th call of the fault's operation from now fail.
func (i *injector) arm(f *Fault, at int) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.counts = map[string]int{}
	i.op, i.at, i.fired, i.lasts, i.wraps = f.Op, at, false, f.Lasting, f.wraps()
}

// startCounting counts calls from now on, none of which fails.
func (i *injector) startCounting() { i.arm(&Fault{}, 0) }

func (i *injector) disarm() (fired bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.at = 0
	return i.fired
}

// silence ignores all calls until the returned function is called.
func (i *injector) silence() (end func()) {
	set := func(silent bool) {
		i.mu.Lock()
		defer i.mu.Unlock()
		i.silent = silent
	}
	set(true)
	return func() { set(false) }
}

func (i *injector) count(op string) int {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.counts[op]
}

// due counts a call of an operation and reports whether the call must fail.
func (i *injector) due(op string) bool {
	if i == nil {
		return false
	}

	i.mu.Lock()
	defer i.mu.Unlock()
	if i.silent {
		return false
	}

	i.counts[op]++
	if i.at == 0 || i.op != op || i.counts[op] < i.at {
		return false
	}
	if i.counts[op] > i.at {
		return i.lasts
	}

	i.fired = true
	i.step, i.failed, i.passed, i.preparing = i.now(), i.settled, nil, i.settled != nil
	return true
}

// moves returns the transitions that the trainer made because of the failure while it prepared the step.
func (i *injector) moves() (all []move) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for layer, seeds := range i.passed {
		for seed, to := range seeds {
			if from := i.failed[layer][seed]; from != to {
				all = append(all, move{i.step, layer, seed, from, to})
			}
		}
	}
	return all
}

// call counts a call of an operation. It returns an error if the call must fail, and cancels or stops
// the run if the fault requires it.
func (i *injector) call(op string) error {
	if i == nil {
		return nil
	}

	i.note(op)
	if i.due("cancel " + op) {
		i.cancel()
	}

	if i.due("stop " + op) {
		i.stop()
	}

	if i.due("panic " + op) {
		panic(i.failure("panic " + op))
	}

	if i.due(op) {
		return i.failure(op)
	}

	return nil
}

// note records the stages of all seeds at the updates after a failure. When a step makes its update, its
// preparation is complete. Gradient computations are no such sign, because directed planting computes gradients
// of its own during the preparation.
func (i *injector) note(op string) {
	if op != "Update" {
		return
	}

	i.mu.Lock()
	defer i.mu.Unlock()
	if i.preparing {
		i.passed = i.stages()
	}
}

// unsettle discards the recorded stages after a step, because orders are about to change them.
func (i *injector) unsettle() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.settled, i.preparing = nil, false
}

func (i *injector) failure(op string) error {
	if i.wraps != nil {
		return fmt.Errorf("%s: %w: %w", op, ErrInjected, i.wraps)
	}
	return fmt.Errorf("%s: %w", op, ErrInjected)
}

// cpuEngine is the interface of the CPU engine.
type cpuEngine interface {
	llm.Sensor
	llm.Listener
	llm.PreferenceMeter
}

// faulty wraps the engine of the CPU so that calls can fail.
type faulty struct {
	cpuEngine
	in *injector
}

func (f faulty) Gradients(b data.Batch) (float64, error) {
	if err := f.in.call("Gradients"); err != nil {
		return 0, err
	}
	return f.cpuEngine.Gradients(b)
}

func (f faulty) Update() (float64, error) {
	if err := f.in.call("Update"); err != nil {
		return 0, err
	}
	return f.cpuEngine.Update()
}

func (f faulty) Loss(b data.Batch) (float64, error) {
	if err := f.in.call("Loss"); err != nil {
		return 0, err
	}
	return f.cpuEngine.Loss(b)
}

func (f faulty) LogProbs(ctx context.Context, b data.Batch) ([]float64, error) {
	if err := f.in.call("LogProbs"); err != nil {
		return nil, err
	}
	return f.cpuEngine.LogProbs(ctx, b)
}

func (f faulty) Push(params ...string) error {
	if err := f.in.call("Push"); err != nil {
		return err
	}
	return f.cpuEngine.Push(params...)
}

func (f faulty) Pull(params ...string) error {
	if err := f.in.call("Pull"); err != nil {
		return err
	}
	return f.cpuEngine.Pull(params...)
}

func (f faulty) Forget(ranges ...llm.ParamRange) error {
	if err := f.in.call("Forget"); err != nil {
		return err
	}
	return f.cpuEngine.Forget(ranges...)
}

func (f faulty) Figures() ([]llm.SeedFigures, error) {
	if err := f.in.call("Figures"); err != nil {
		return nil, err
	}
	return f.cpuEngine.Figures()
}

func (f faulty) Decoder() (func(context.Context, []int) (any, error), error) {
	if err := f.in.call("Decoder"); err != nil {
		return nil, err
	}
	return f.cpuEngine.Decoder()
}

// Close releases all resources even if it fails.
func (f faulty) Close() error { return errors.Join(f.cpuEngine.Close(), f.in.call("Close")) }

// parallelEngine is the interface of the engine of a rank on the CPU.
type parallelEngine interface {
	llm.Parallel
	llm.PreferenceMeter
	Figures() ([]llm.SeedFigures, error)
}

// faultyRank wraps the engine of a rank so that computing gradients and copying parameters to the host can fail.
type faultyRank struct {
	parallelEngine
	in *injector
}

func (f faultyRank) Batches(n int, next func() (data.Batch, error)) ([]float64, error) {
	return f.parallelEngine.Batches(n, func() (data.Batch, error) {
		if err := f.in.call("rank Gradients"); err != nil {
			return data.Batch{}, err
		}
		return next()
	})
}

func (f faultyRank) Pull(params ...string) error {
	if err := f.in.call("rank Pull"); err != nil {
		return err
	}
	return f.parallelEngine.Pull(params...)
}

// faultyAdamW and faultyMuon wrap optimizers so that calls can fail.
type (
	faultyAdamW struct {
		*optim.AdamW
		in *injector
	}
	faultyMuon struct {
		*optim.Muon
		in *injector
	}
)

func (f *faultyAdamW) SetState(s []optim.Tensor) error {
	if err := f.in.call("SetState"); err != nil {
		return err
	}
	return f.AdamW.SetState(s)
}

func (f *faultyAdamW) Declare(p []gorgonia.ValueGrad) error {
	if err := f.in.call("Declare"); err != nil {
		return err
	}
	return f.AdamW.Declare(p)
}

func (f *faultyAdamW) SetLR(lr float64) error {
	if err := f.in.call("SetLR"); err != nil {
		return err
	}
	return f.AdamW.SetLR(lr)
}

func (f *faultyAdamW) Step(p []gorgonia.ValueGrad) error {
	if err := f.in.call("Step"); err != nil {
		return err
	}
	return f.AdamW.Step(p)
}

func (f *faultyMuon) SetState(s []optim.Tensor) error {
	if err := f.in.call("SetState"); err != nil {
		return err
	}
	return f.Muon.SetState(s)
}

func (f *faultyMuon) Declare(p []gorgonia.ValueGrad) error {
	if err := f.in.call("Declare"); err != nil {
		return err
	}
	return f.Muon.Declare(p)
}

func (f *faultyMuon) SetLR(lr float64) error {
	if err := f.in.call("SetLR"); err != nil {
		return err
	}
	return f.Muon.SetLR(lr)
}

func (f *faultyMuon) Step(p []gorgonia.ValueGrad) error {
	if err := f.in.call("Step"); err != nil {
		return err
	}
	return f.Muon.Step(p)
}

// faultyWriter wraps a file so that writes can fail.
type faultyWriter struct {
	io.Writer
	in *injector
}

func (f faultyWriter) Write(p []byte) (int, error) {
	if err := f.in.call("record"); err != nil {
		return 0, err
	}
	return f.Writer.Write(p)
}

// opOfCallback returns the operation of a callback that receives an event.
func opOfCallback(k llm.EventKind) string { return "callback " + k.String() }

// isOf reports whether the first word of an operation's name is word.
func isOf(op, word string) bool { return strings.HasPrefix(op, word+" ") }
