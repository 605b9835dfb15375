//go:build cuda

package opbase

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/gorgonia/cuda"
)

// CUDA computes an op on an engine of Gorgonia's CUDA machine, in whose memory inputs and result
// lie. kept is what it may keep of the op from call to call. The engine's work is done. It reports
// whether it could.
//
// cudaops sets it, since this package and the ops know nothing of CUDA. A program that imports
// cudaops computes them with its kernels, another one on the CPU. Both use the same memory, which
// Gorgonia allocates such that both can reach it.
var CUDA func(o gorgonia.Op, kept *any, engine *cuda.Engine, prealloc gorgonia.Value,
	in []gorgonia.Value) (bool, error)

// placement is where Gorgonia's own machines run an op: on a GPU, in a build with Gorgonia's tag
// cuda.
type placement struct {
	op   gorgonia.Op
	kept any
}

func (p *placement) place(o gorgonia.Op) { p.op = o }

// CallsExtern reports that device code runs, for which Gorgonia allocates the result.
func (p *placement) CallsExtern() bool { return true }

// CUDADo makes every op a gorgonia.CUDADoer.
func (p *placement) CUDADo(extern gorgonia.External, dev gorgonia.Device, prealloc gorgonia.Value,
	in ...gorgonia.Value) (gorgonia.Value, error) {
	if prealloc == nil {
		return nil, fmt.Errorf("%v: Gorgonia has allocated no memory for the result", p.op)
	}
	machine, ok := extern.(gorgonia.CUDAMachine)
	if !ok || int(dev) < 0 || int(dev) >= len(machine.Engines()) {
		return nil, fmt.Errorf("%v: placed on GPU %d of a %T, want one of a gorgonia.CUDAMachine",
			p.op, dev, extern)
	}
	engine := &machine.Engines()[dev]
	engine.Context().Synchronize() // enqueued behind what makes the inputs
	if err := engine.DoWork(); err != nil {
		return nil, fmt.Errorf("%v: %w", p.op, err)
	}
	if CUDA != nil {
		if done, err := CUDA(p.op, &p.kept, engine, prealloc, in); err != nil {
			return nil, fmt.Errorf("%v: %w", p.op, err)
		} else if done {
			return prealloc, nil
		}
	}
	return p.op.(gorgonia.UsePreallocDoer).UsePreallocDo(prealloc, in...)
}
