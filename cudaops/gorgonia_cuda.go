//go:build cuda

package cudaops

import (
	"maps"
	"sync"
	"unsafe"
	"weak"

	"gorgonia.org/gorgonia"
	"gorgonia.org/gorgonia/cuda"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// With Gorgonia's build tag cuda, every op of this module is a gorgonia.CUDADoer, which Gorgonia's own
// CUDA machines call with their memory. The op uses the kernels of this package, in the context of the
// machine's engine. Everything that is allocated for the op lives as long as that context, which Gorgonia
// destroys.
//
// A [Machine] in float32 computes the same results. An op waits for the one before it, and its operands
// are copied on the device. For speed, run the graph on a Machine.

func init() { opbase.CUDA = onEngine }

// engines holds the device of each engine.
var engines struct {
	sync.Mutex
	of perEngine[*Device]
}

// perEngine maps an engine to a value. Each op has a map of the machines that run it.
type perEngine[V any] map[weak.Pointer[cuda.Engine]]V

// get returns the value of an engine, and creates it on first use. It also drops the values of engines
// that no longer exist, which were freed with the engines' contexts.
func (p *perEngine[V]) get(engine *cuda.Engine, create func() (V, error)) (V, error) {
	key := weak.Make(engine)
	if v, ok := (*p)[key]; ok {
		return v, nil
	}

	maps.DeleteFunc(*p, func(e weak.Pointer[cuda.Engine], _ V) bool { return e.Value() == nil })
	v, err := create()
	if err != nil {
		return v, err
	}

	if *p == nil {
		*p = perEngine[V]{}
	}

	(*p)[key] = v
	return v, nil
}

func onEngine(o gorgonia.Op, kept *any, engine *cuda.Engine, prealloc gorgonia.Value,
	in []gorgonia.Value) (bool, error) {
	for _, v := range append(in[:len(in):len(in)], prealloc) {
		if dt := v.Dtype(); dt != tensor.Float32 && dt != tensor.Int {
			return false, nil
		}
	}

	engines.Lock()
	defer engines.Unlock()
	machines, _ := (*kept).(perEngine[*singleOp])
	l, err := machines.get(engine, func() (*singleOp, error) { return openOn(engine, o, in) })
	if err != nil {
		return false, err
	}

	*kept = machines
	operands := make([]gpu.Ptr, len(in))
	for i, v := range in {
		operands[i] = gpu.Ptr(v.Uintptr())
	}

	return true, l.run(operands, gpu.Ptr(prealloc.Uintptr()))
}

// openOn makes a machine that runs an op on an engine.
func openOn(engine *cuda.Engine, o gorgonia.Op, in []gorgonia.Value) (*singleOp, error) {
	device, err := engines.of.get(engine, func() (*Device, error) {
		ctx := engine.Context().CUDAContext()
		// This is right only as long as the struct consists of the CUcontext alone.
		var _ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(ctx)]struct{}{}
		return Open(WithContext(*(*uintptr)(unsafe.Pointer(&ctx))))
	})
	if err != nil {
		return nil, err
	}
	return newSingleOp(device, o, in)
}
