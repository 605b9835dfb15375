//go:build cuda

package opbase

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/gorgonia/cuda"
)

// CUDA computes an op on an engine of Gorgonia's CUDA machine, which owns the memory of the inputs
// and the result. kept is storage that the function may reuse from call to call. All previous work of
// the engine has finished. CUDA reports whether it supports the op.
//
// cudaops sets it, because this package and the ops do not depend on CUDA: a program that imports
// cudaops computes ops with its kernels, and other programs on the CPU. Both use the same memory,
// which Gorgonia allocates so that both can access it.
var CUDA func(o gorgonia.Op, kept *any, engine *cuda.Engine, prealloc gorgonia.Value,
	in []gorgonia.Value) (bool, error)

// placement determines where Gorgonia's own machines run an op: here, on a GPU, because the build
// has Gorgonia's tag cuda.
type placement struct {
	op   gorgonia.Op
	kept any
}

func (p *placement) place(o gorgonia.Op) { p.op = o }

// name returns the name of the op, for error messages.
func (p *placement) name() string { return p.op.(interface{ Name() string }).Name() }

// CallsExtern reports that device code runs, so that Gorgonia allocates the result.
func (p *placement) CallsExtern() bool { return true }

// CUDADo makes every op a gorgonia.CUDADoer.
func (p *placement) CUDADo(extern gorgonia.External, dev gorgonia.Device, prealloc gorgonia.Value,
	in ...gorgonia.Value) (gorgonia.Value, error) {
	if prealloc == nil {
		return nil, fmt.Errorf("%s: Gorgonia has allocated no memory for the result", p.name())
	}

	machine, ok := extern.(gorgonia.CUDAMachine)
	if !ok || int(dev) < 0 || int(dev) >= len(machine.Engines()) {
		return nil, fmt.Errorf("%s: placed on GPU %d of a %T, want one of a gorgonia.CUDAMachine",
			p.name(), dev, extern)
	}

	engine := &machine.Engines()[dev]
	engine.Context().Synchronize() // enqueued after the computation of the inputs
	if err := engine.DoWork(); err != nil {
		return nil, fmt.Errorf("%s: %w", p.name(), err)
	}

	if CUDA != nil {
		if done, err := CUDA(p.op, &p.kept, engine, prealloc, in); err != nil {
			return nil, fmt.Errorf("%s: %w", p.name(), err)
		} else if done {
			return prealloc, nil
		}
	}

	return p.op.(gorgonia.UsePreallocDoer).UsePreallocDo(prealloc, in...)
}
