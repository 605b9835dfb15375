package autodiff

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// inner runs a graph inside an op. The machine is compiled in the first run and kept, whereas each
// run's memory is released.
type inner struct {
	inputs, outputs gorgonia.Nodes

	mu sync.Mutex
	vm *cpuops.Machine

	matrices map[*gorgonia.Node]*gemm.Compact // inputs in compact form that vm reads
}

// do runs the graph on the input values in, at least one per graph input, and writes the concatenated
// outputs to out.
func (r *inner) do(in opbase.Args, eval bool, out any) error {
	r.mu.Lock()
	defer r.mu.Unlock()

	matrices := map[*gorgonia.Node]*gemm.Compact{}
	for i, n := range r.inputs {
		if w := in.CompactWeights(i); w != nil {
			matrices[n] = w
		}
	}

	if r.vm == nil || !maps.Equal(matrices, r.matrices) {
		opts := []cpuops.Option{cpuops.WithOutputs(r.outputs...), cpuops.WithMatrices(matrices)}
		if r.vm != nil {
			if err := r.vm.Close(); err != nil {
				return err
			}
		}
		r.matrices = matrices
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
		if matrices[n] != nil {
			continue
		}
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

// release frees the memory of the run and the references of the inputs to values of the outer
// graph.
func (r *inner) release() {
	r.vm.Release()
	for _, n := range append(slices.Clone(r.inputs), r.outputs...) {
		// Gorgonia cannot unbind a value without giving its memory, which outer values share, to
		// the next user. A number takes the tensor's place instead.
		_ = gorgonia.UnsafeLet(n, 0.0)
	}
}

// readsCompact reports whether all ops of the graph that read input i can read it in compact form.
func (r *inner) readsCompact(i int) bool {
	return i < len(r.inputs) && len(r.outputs) > 0 && cpuops.CanBeCompact(r.outputs[0].Graph(), r.inputs[i])
}

// setTraining sets the mode of the ops in the graph.
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
