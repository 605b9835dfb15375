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

// With Gorgonia's build tag cuda, every op of this module is a gorgonia.CUDADoer. Gorgonia's own
// CUDA machines call it with their memory. Here it is computed with the kernels of this package, in
// the context of the machine's engine. All that is allocated for it lives as long as that context,
// which Gorgonia destroys.
//
// Results are those of a [Machine] in float32. An op waits for the one before it, and its operands
// are copied on the device; for speed, run the graph on a Machine.

func init() { opbase.CUDA = onEngine }

// engines holds the devices of engines.
var engines struct {
	sync.Mutex
	of perEngine[*Device]
}

// perEngine is what belongs to an engine, by the engine. An op keeps the machines that run it.
type perEngine[V any] map[weak.Pointer[cuda.Engine]]V

// get returns what belongs to an engine, which is made when it is asked for first. It forgets what
// belonged to engines that are gone, and so is gone with their contexts.
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

// openOn makes a machine for an op on an engine.
func openOn(engine *cuda.Engine, o gorgonia.Op, in []gorgonia.Value) (*singleOp, error) {
	device, err := engines.of.get(engine, func() (*Device, error) {
		ctx := engine.Context().CUDAContext()
		// which is right only as long as the struct is nothing but the CUcontext
		var _ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(ctx)]struct{}{}
		return Open(WithContext(*(*uintptr)(unsafe.Pointer(&ctx))))
	})
	if err != nil {
		return nil, err
	}
	return newSingleOp(device, o, in)
}
