package autodiff

import (
	"fmt"
	"slices"
	"sync"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// inner runs a graph within an op. Its machine is compiled at the first run and kept; its memory is
// not.
type inner struct {
	inputs, outputs gorgonia.Nodes

	mu sync.Mutex
	vm *cpuops.Machine
}

// do runs the graph on in, which holds at least the inputs, and writes the outputs one behind the
// other to out.
func (r *inner) do(in opbase.Args, eval bool, out any) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.vm == nil {
		opts := []cpuops.Option{cpuops.WithOutputs(r.outputs...)}
		if eval {
			opts = append(opts, cpuops.WithEvalMode())
		}
		var err error
		if r.vm, err = cpuops.NewMachine(r.outputs[0].Graph(), opts...); err != nil {
			return err
		}
	}
	defer r.release()
	for i, n := range r.inputs {
		if err := gorgonia.Let(n, opbase.ValueOf(in[i], n.Shape())); err != nil {
			return fmt.Errorf("input %d: %w", i, err)
		}
	}
	if err := r.vm.RunAll(); err != nil {
		return err
	}
	for _, n := range r.outputs {
		flat, err := opbase.Flat(n.Value())
		if err != nil {
			return err
		}
		size := opbase.Size(n.Shape())
		switch dst := out.(type) {
		case []float32:
			copy(dst[:size], flat.([]float32))
			out = dst[size:]
		case []float64:
			copy(dst[:size], flat.([]float64))
			out = dst[size:]
		}
	}
	return nil
}

// release gives the memory of the run up, and what inputs hold of the outer graph.
func (r *inner) release() {
	r.vm.Release()
	for _, n := range append(slices.Clone(r.inputs), r.outputs...) {
		// A number takes the tensor's place, since Gorgonia has no way to bind nothing. Its
		// unbinding would hand memory that outer values share to the next user.
		_ = gorgonia.UnsafeLet(n, 0.0)
	}
}

// setTraining sets the mode of the ops within.
func (r *inner) setTraining(training bool) error {
	for _, n := range r.outputs[0].Graph().AllNodes() {
		if op, ok := n.Op().(gorgonia.TrainModeOp); ok {
			if err := op.SetTraining(training); err != nil {
				return err
			}
		}
	}
	return nil
}
