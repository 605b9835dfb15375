// Package cpuops runs Gorgonia graphs on a CPU. [Machine] is a gorgonia.VM that plans a graph's
// memory in advance and allocates almost nothing at run time.
//
// Gorgonia's own tape machine runs the same graphs with the same results, but it allocates every
// intermediate value in every run and keeps all of them until the run ends. In a Machine, by
// contrast, values that are not needed at the same time share memory.
package cpuops

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/memory"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/variantrule"
)

// Machine runs a graph on the CPU. A program can use cpuops.NewMachine(g) in place of
// gorgonia.NewTapeMachine(g).
//
// Ops of this module and Gorgonia's elementwise arithmetic work in planned memory. Any other op is
// computed by its own Do method, and its result is copied to planned memory. The memory of values
// that are no longer needed is reused for later ones.
//
// Some values are kept and bound to their nodes until the next run overwrites them: outputs (see
// [WithOutputs]), nodes that no other node reads, and the gradients of parameters (see [WithParams]).
//
// A Machine is not safe for concurrent use by multiple goroutines. Two machines on the same graph must
// not run at the same time.
type Machine struct {
	graph   *gorgonia.ExprGraph
	config  config
	program *program
	params  []gorgonia.ValueGrad
	monitor *monitor // nil without WithMonitor
	planned bool     // memory that ops keep for their gradients is planned
	ran     bool     // kept values are valid, all from the same run
	closed  bool
}

type config struct {
	graph.Asked
	eval    bool
	monitor int
	weights *Weights
	rules   variantrule.Rules

	matrices map[*gorgonia.Node]*gemm.Compact // by input
}

// Option configures [NewMachine].
type Option func(*config) error

// WithParams declares inputs to be parameters. Their gradients accumulate over runs until they are
// reset to zero, as Gorgonia's solvers and the optimizers in package optim do. [Machine.ValueGrads]
// returns the sums. WithParams replaces the BindDualValues of Gorgonia's tape machine.
func WithParams(params ...*gorgonia.Node) Option {
	return func(c *config) error { return c.AddParams(params...) }
}

// WithOutputs keeps the values of nodes after a run. Nodes that no other node reads are always kept.
func WithOutputs(outputs ...*gorgonia.Node) Option {
	return func(c *config) error { return c.AddOutputs(outputs...) }
}

// WithEvalMode turns off training mode for ops that behave differently in training, such as dropout.
func WithEvalMode() Option {
	return func(c *config) error {
		c.eval = true
		return nil
	}
}

// NewMachine compiles a graph and plans its memory, which the first run allocates. On Linux, it
// returns an error if the plan needs more memory than the computer has; without this check, Go would
// abort the program.
func NewMachine(g *gorgonia.ExprGraph, opts ...Option) (*Machine, error) {
	m := &Machine{graph: g}
	for _, opt := range opts {
		if err := opt(&m.config); err != nil {
			return nil, fmt.Errorf("cpuops.NewMachine: %w", err)
		}
	}

	var err error
	if m.config.rules, err = m.config.rules.WithEnvironment(); err != nil {
		return nil, fmt.Errorf("cpuops.NewMachine: %w", err)
	}

	if err := m.config.Within(g); err != nil {
		return nil, fmt.Errorf("cpuops.NewMachine: %w", err)
	}

	for _, n := range g.AllNodes() {
		if o, ok := n.Op().(gorgonia.TrainModeOp); ok {
			if err := o.SetTraining(!m.config.eval); err != nil {
				return nil, fmt.Errorf("cpuops.NewMachine: %s: %w", graph.Describe(n), err)
			}
		}
	}

	if m.program, err = compile(g, m.config); err != nil {
		return nil, fmt.Errorf("cpuops.NewMachine: %w", err)
	}

	if err := memory.Check("the values of a run take", uint64(m.program.bytes)); err != nil {
		return nil, fmt.Errorf(
			"cpuops.NewMachine: %w; smaller batches or shorter sequences need less", err)
	}

	for _, p := range m.config.Params {
		param := &param{Node: p}
		if sum := m.program.sums[p]; sum != nil {
			param.grad = sum.value
		}
		m.params = append(m.params, param)
	}

	if every := m.config.monitor; every > 0 {
		m.monitor = newMonitor(every, len(m.program.steps))
	}

	return m, nil
}

// param is a parameter together with the sum of its gradients.
type param struct {
	*gorgonia.Node
	grad gorgonia.Value
}

// Grad returns the sum of the gradients, or nil if the graph has no gradient of the parameter.
func (p *param) Grad() (gorgonia.Value, error) { return p.grad, nil }

// ValueGrads returns the parameters (see [WithParams]) with the sums of their gradients, for a solver's
// Step. It replaces gorgonia.NodesToValueGrads.
func (m *Machine) ValueGrads() []gorgonia.ValueGrad { return slices.Clone(m.params) }

// RunAll is Run without cancellation. It makes Machine a gorgonia.VM.
func (m *Machine) RunAll() error { return m.Run(context.Background()) }

// Run computes the graph. Every input must have a value, from gorgonia.Let or from the node's
// creation.
//
// If ctx is canceled, Run returns context.Cause(ctx). It checks ctx between ops and within matrix
// products, attention and SiLUMLP, but not within their gradients.
//
// After an error or a cancellation, the sums of gradients are restored to their values from before
// the failed run, and the machine can run again.
func (m *Machine) Run(ctx context.Context) error {
	if err := m.run(ctx); err != nil {
		return fmt.Errorf("cpuops.Machine.Run: %w", err)
	}
	return nil
}

func (m *Machine) run(ctx context.Context) error {
	if err := m.open(); err != nil {
		return err
	}

	p := m.program
	if err := m.link(p.allocate()); err != nil {
		return err
	}

	m.ran = false
	p.lendAux()
	defer p.reclaimAux()
	defer func() { p.finish(m.ran) }() // after a panic too
	sampling := m.monitor.due()
	stop, release := stopOf(ctx)
	defer release()
	for i := range p.steps {
		s := &p.steps[i]
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		s.stop = stop
		var from time.Time
		if sampling {
			from = time.Now()
		}
		if err := s.run(s); err != nil {
			return fmt.Errorf("%s: %w", s.describe(), err)
		}
		if stop.Asked() {
			return context.Cause(ctx)
		}
		if sampling {
			m.monitor.latest[i] = time.Since(from)
		}
	}

	if sampling {
		m.monitor.addSample()
	}

	if !m.planned {
		p.adoptAux()
		m.planned = true
	}

	if err := m.publish(); err != nil {
		return err
	}

	m.ran = true
	return nil
}

// stopOf returns a Stop that makes kernels return early when the context is canceled, or nil if the
// context cannot be canceled.
func stopOf(ctx context.Context) (stop *cpu.Stop, release func() bool) {
	if ctx.Done() == nil {
		return nil, func() bool { return true }
	}
	stop = new(cpu.Stop)
	return stop, context.AfterFunc(ctx, stop.Ask)
}

// open returns an error if the machine cannot run.
func (m *Machine) open() error {
	if m.closed {
		return errors.New("the machine is closed")
	}
	return nil
}

// link updates the operands of steps and the memory of views, for inputs with a new value since the last
// run and, if moved is true, for all values.
func (m *Machine) link(moved bool) error {
	changed := moved
	for _, in := range m.program.inputs {
		v := in.node.Value()
		if v == nil {
			return fmt.Errorf("%s has no value: bind one with gorgonia.Let",
				graph.Describe(in.node))
		}
		if v == in.bound && in.shares {
			continue
		}
		if v.Dtype() != in.dt || opbase.Size(v.Shape()) != opbase.Size(in.shape) {
			return fmt.Errorf("%s has a value of type %v and shape %v",
				graph.Describe(in.node), v.Dtype(), v.Shape())
		}
		flat, err := opbase.Flat(v)
		if err != nil {
			return fmt.Errorf("%s: %w", graph.Describe(in.node), err)
		}
		d, dense := v.(*tensor.Dense)
		in.bound, in.flat = v, flat
		in.shares = dense && !d.IsMaterializable() && !(d.DataOrder().IsColMajor() && d.Dims() > 1)
		changed = true
	}

	if !changed {
		return nil
	}

	for _, v := range m.program.views {
		if root, at := v.root(); root.isInput || moved {
			v.shown = nil
			v.flat = cut(root.flat, at, opbase.Size(v.shape))
		}
	}

	for i := range m.program.steps {
		s := &m.program.steps[i]
		for j, v := range s.in {
			s.args[j] = v.flat
		}
	}

	return nil
}

// publish binds kept values to their nodes.
func (m *Machine) publish() error {
	for _, v := range m.program.kept {
		v.show()
		if v.node.Value() == v.shown {
			continue
		}
		if err := gorgonia.UnsafeLet(v.node, v.shown); err != nil {
			return fmt.Errorf("%s: %w", graph.Describe(v.node), err)
		}
	}
	return nil
}

// Value returns a copy of a node's value. The node must be an input, an output (see [WithOutputs]), or a
// node that no other node reads. The memory of all other nodes is reused during a run.
func (m *Machine) Value(n *gorgonia.Node) (gorgonia.Value, error) {
	v, ok := m.program.values[n]
	switch {
	case n == nil || !ok:
		return nil, errors.New(
			"cpuops.Machine.Value: the node is not part of the graph that the machine runs")
	case v.node == n && v.isInput:
		if n.Value() == nil {
			return nil, fmt.Errorf(
				"cpuops.Machine.Value: %s has no value: bind one with gorgonia.Let",
				graph.Describe(n))
		}
		return gorgonia.CloneValue(n.Value())
	case !slices.Contains(m.program.kept, v):
		return nil, fmt.Errorf("cpuops.Machine.Value: %s is not kept: name it with WithOutputs",
			graph.Describe(n))
	case !m.ran:
		return nil, errors.New(
			"cpuops.Machine.Value: the machine has not run, or its last run has failed")
	}

	v.show()
	return gorgonia.CloneValue(v.shown)
}

// Read returns the elements of an output (see [WithOutputs]) in the machine's memory, as a []float32,
// []float64 or []int. The next run overwrites them.
func (m *Machine) Read(n *gorgonia.Node) (any, error) {
	if err := m.open(); err != nil {
		return nil, fmt.Errorf("cpuops.Machine.Read: %w", err)
	}

	v := m.program.values[n]
	switch {
	case v == nil || v.isInput || !slices.Contains(m.program.kept, v):
		return nil, errors.New("cpuops.Machine.Read: the node is not an output: name it with WithOutputs")
	case !m.ran:
		return nil, errors.New("cpuops.Machine.Read: the machine has not run, or its last run has failed")
	case v.loose != nil:
		return v.loose.Data(), nil
	}
	return v.flat, nil
}

// Memory returns the number of bytes that runs need in addition to the inputs, for values, for the
// memory that ops keep for their gradients, for sums of gradients, and for copies of non-zero sums
// that a run adds to. The size of the ops' memory is known only after the first run, and copies are
// made when first needed.
func (m *Machine) Memory() int {
	return m.program.memory()
}

// Release returns the memory of runs to a pool shared by all machines, from which the next run takes
// it again. This helps if a graph runs only occasionally, such as one inside an op of another graph.
// Kept values become invalid.
func (m *Machine) Release() {
	if m.program != nil {
		m.program.release()
	}
	m.ran = false
}

// ErrNoBFloat16 means that the CPU cannot multiply in bfloat16.
var ErrNoBFloat16 = gemm.ErrNoBFloat16

// UseBFloat16 sets, for the whole process, whether large products of float32 matrices round their
// operands to bfloat16. Sums and everything else stay in float32. Results with and without rounding
// differ.
//
// Rounding requires a CPU with AVX512-BF16. On any other CPU, UseBFloat16 returns [ErrNoBFloat16] and
// changes nothing.
func UseBFloat16(on bool) error {
	if err := gemm.UseBFloat16(on); err != nil {
		return fmt.Errorf("cpuops.UseBFloat16: %w", err)
	}
	return nil
}

// Reset does nothing, because a machine can always run again. It is part of gorgonia.VM.
func (m *Machine) Reset() {}

// Close releases the machine's memory. Values bound to nodes stay valid.
func (m *Machine) Close() error {
	if !m.closed && m.program != nil {
		m.closed = true
		giveArena(m.program.auxArena) // nodes may still be bound to the other arena
		*m.program = program{}
	}
	return nil
}
