//go:build cuda

package cudaops

import (
	"sync"
	"weak"

	"gorgonia.org/gorgonia"
	"gorgonia.org/gorgonia/cuda"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/cuhandle"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// With Gorgonia's build tag cuda, every op of this module is a gorgonia.CUDADoer. Gorgonia's own
// CUDA machines call it with their memory. Here it is computed with the kernels of this package, in
// the context of the machine's engine. All that is allocated for it lives as long as that context,
// which Gorgonia destroys.
//
// Results are those of a [Machine] in float32. An op waits for the one before it, and its operands
// are copied on the device; for speed, run the graph on a Machine.

func init() { opbase.CUDA = onEngine }

// engines holds what the ops on an engine share. Entries of engines that are gone are dropped.
var engines struct {
	sync.Mutex
	of map[weak.Pointer[cuda.Engine]]*singleOps
}

// placed is what is kept of an op: its machine on each engine that has run it.
type placed map[weak.Pointer[cuda.Engine]]*singleOp

func onEngine(o gorgonia.Op, kept *any, engine *cuda.Engine, prealloc gorgonia.Value,
	in []gorgonia.Value) (bool, error) {
	for _, v := range append(in[:len(in):len(in)], prealloc) {
		if dt := v.Dtype(); dt != tensor.Float32 && dt != tensor.Int {
			return false, nil
		}
	}
	engines.Lock()
	defer engines.Unlock()
	l, err := singleOpOn(engine, o, kept, in)
	if err != nil {
		return false, err
	}
	operands := make([]gpu.Ptr, len(in))
	for i, v := range in {
		operands[i] = gpu.Ptr(v.Uintptr())
	}
	return true, l.run(operands, gpu.Ptr(prealloc.Uintptr()))
}

// singleOpOn returns the op's machine on an engine.
func singleOpOn(engine *cuda.Engine, o gorgonia.Op, kept *any, in []gorgonia.Value) (*singleOp,
	error) {
	key := weak.Make(engine)
	machines, _ := (*kept).(placed)
	if machines == nil {
		machines = placed{}
		*kept = machines
	}
	if l := machines[key]; l != nil {
		return l, nil
	}
	dropGone(machines)
	ops, err := singleOpsOn(key, engine)
	if err != nil {
		return nil, err
	}
	operands := make([]singleOperand, len(in))
	for i, v := range in {
		operands[i] = singleOperand{v.Dtype(), v.Shape().Clone()}
	}
	l, err := ops.open(o, operands)
	if err == nil {
		machines[key] = l
	}
	return l, err
}

func singleOpsOn(key weak.Pointer[cuda.Engine], engine *cuda.Engine) (*singleOps, error) {
	if ops := engines.of[key]; ops != nil {
		return ops, nil
	}
	if engines.of == nil {
		engines.of = map[weak.Pointer[cuda.Engine]]*singleOps{}
	}
	dropGone(engines.of)
	device, err := Open(WithContext(cuhandle.OfContext(engine.Context().CUDAContext())))
	if err != nil {
		return nil, err
	}
	ops, err := newSingleOps(device)
	if err == nil {
		engines.of[key] = ops
	}
	return ops, err
}

// dropGone forgets what belonged to engines that are gone, and so is gone with their contexts.
func dropGone[V any](of map[weak.Pointer[cuda.Engine]]V) {
	for e := range of {
		if e.Value() == nil {
			delete(of, e)
		}
	}
}
