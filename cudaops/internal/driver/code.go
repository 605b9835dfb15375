package driver

import (
	"errors"
	"sync"
	"unsafe"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

func (c *context) LoadModule(image []byte) (gpu.Module, error) {
	// The copy is aligned to 8 bytes, as fat binaries require, and null-terminated, as PTX requires.
	aligned := make([]uint64, len(image)/8+1)
	copy(gpu.Bytes(aligned), image)
	var m gpu.Module
	err := c.call(&c.ModuleLoadData, uintptr(unsafe.Pointer(&m)),
		uintptr(unsafe.Pointer(&aligned[0])))
	return m, err
}

func (c *context) UnloadModule(m gpu.Module) error { return c.call(&c.ModuleUnload, uintptr(m)) }

func (c *context) Function(m gpu.Module, name string) (*gpu.Function, error) {
	f := &gpu.Function{Name: name}
	cname := append([]byte(name), 0)
	err := c.call(&c.ModuleGetFunction, uintptr(unsafe.Pointer(&f.Handle)), uintptr(m),
		uintptr(unsafe.Pointer(&cname[0])))
	return f, inDetail(err, "kernel "+name)
}

// inDetail adds the detail to err if err is a gpu.Error.
func inDetail(err error, detail string) error {
	var e *gpu.Error
	if errors.As(err, &e) {
		e.Detail += detail
	}
	return err
}

func (c *context) AllowShared(f *gpu.Function, bytes int) error {
	const maxDynamicShared = 8
	return c.call(&c.FuncSetAttribute, f.Handle, maxDynamicShared, uintptr(bytes))
}

func (c *context) PreferShared(f *gpu.Function) error {
	const preferredCarveout, percent = 9, 100
	return c.call(&c.FuncSetAttribute, f.Handle, preferredCarveout, percent)
}

// launchFrame combines everything that a launch passes by address, in a single heap object.
type launchFrame struct {
	extra  [5]uintptr // {PARAM_BUFFER_POINTER, args, PARAM_BUFFER_SIZE, &size, END}
	size   uintptr
	args   []byte
	params []uintptr // the address of each parameter in args
	config launchConfig
	attrs  [3]launchAttribute
}

// launchConfig is CUlaunchConfig.
type launchConfig struct {
	grid, block [3]uint32
	shared      uint32
	stream      gpu.Stream
	attrs       *launchAttribute
	numAttrs    uint32
}

// launchAttribute is CUlaunchAttribute.
type launchAttribute struct {
	id    uint32
	_     uint32
	value [3]uint32
	_     [13]uint32
}

var launchFrames = sync.Pool{New: func() any { return new(launchFrame) }}

func (c *context) Launch(f *gpu.Function, l gpu.LaunchConfig, s gpu.Stream, a *gpu.Args) error {
	frame := launchFrames.Get().(*launchFrame)
	defer launchFrames.Put(frame) // the frame must not move until the call returns
	frame.args = append(frame.args[:0], a.Packed()...)
	frame.size = uintptr(len(frame.args))
	frame.extra = [5]uintptr{1, uintptr(unsafe.Pointer(unsafe.SliceData(frame.args))), 2,
		uintptr(unsafe.Pointer(&frame.size)), 0}
	frame.set(l, s)
	err := c.Watch(s, gpu.Work{Name: f.Name}, func() error {
		if !l.Cooperative {
			return c.call(&c.LaunchKernel, uintptr(unsafe.Pointer(&frame.config)), f.Handle, 0,
				uintptr(unsafe.Pointer(&frame.extra)))
		}

		// Stream capture rejects cooperative launches that pass their parameters in a buffer.
		frame.params = frame.params[:0]
		for _, offset := range a.Offsets() {
			frame.params = append(frame.params, uintptr(unsafe.Pointer(&frame.args[offset])))
		}
		return c.call(&c.LaunchKernel, uintptr(unsafe.Pointer(&frame.config)), f.Handle,
			uintptr(unsafe.Pointer(unsafe.SliceData(frame.params))), 0)
	})
	if err != nil {
		return inDetail(err, "kernel "+f.Name+", "+l.String())
	}

	return nil
}

func (c *context) Resident(f *gpu.Function, l gpu.LaunchConfig) (int, error) {
	var n int32
	if (l.Cluster == gpu.Dim{}) {
		err := c.call(&c.Occupancy, uintptr(unsafe.Pointer(&n)), f.Handle,
			uintptr(l.Block.Count()), uintptr(l.Shared))
		return int(n) * c.info.SMs, err
	}

	frame := launchFrames.Get().(*launchFrame)
	defer launchFrames.Put(frame)
	frame.set(l, 0)
	err := c.call(&c.OccupancyClusters, uintptr(unsafe.Pointer(&n)), f.Handle,
		uintptr(unsafe.Pointer(&frame.config)))
	return int(n), err
}

// set stores the configuration of a launch.
func (frame *launchFrame) set(l gpu.LaunchConfig, s gpu.Stream) {
	const cooperative, cluster, overlap = 2, 4, 6
	attrs := frame.attrs[:0]
	if (l.Cluster != gpu.Dim{}) {
		attrs = append(attrs, launchAttribute{id: cluster, value: l.Cluster.Uint32s()})
	}
	if l.Overlap {
		attrs = append(attrs, launchAttribute{id: overlap, value: [3]uint32{1}})
	}
	if l.Cooperative {
		attrs = append(attrs, launchAttribute{id: cooperative, value: [3]uint32{1}})
	}
	frame.config = launchConfig{l.Grid.Uint32s(), l.Block.Uint32s(), uint32(l.Shared), s,
		&frame.attrs[0], uint32(len(attrs))}
}

func (c *context) EncodeTiled(t gpu.TiledTensor) (gpu.TensorMap, error) {
	if err := t.Check(); err != nil {
		return gpu.TensorMap{}, err
	}

	// The driver requires the descriptor to be aligned to 64 bytes.
	buf := make([]byte, len(gpu.TensorMap{})+64)
	at := int(-uintptr(unsafe.Pointer(&buf[0])) % 64)
	const l2Reads256 = 3 // L2 promotes reads to 256 bytes
	steps := [5]uint32{1, 1, 1, 1, 1}
	strides := append(append([]uint64{}, t.Strides...), 0) // never empty, so that it has an address
	err := c.call(&c.TensorMapEncode, uintptr(unsafe.Pointer(&buf[at])),
		tensorMapTypes[t.Type], uintptr(len(t.Dims)),
		uintptr(t.Address), uintptr(unsafe.Pointer(&t.Dims[0])),
		uintptr(unsafe.Pointer(&strides[0])),
		uintptr(unsafe.Pointer(&t.Box[0])), uintptr(unsafe.Pointer(&steps)), 0,
		uintptr(t.Swizzle()), l2Reads256, 0)

	return gpu.TensorMap(buf[at : at+128]), err
}

var tensorMapTypes = map[gpu.DType]uintptr{gpu.Float32: 7, gpu.Float16: 6,
	gpu.BFloat16: 9, gpu.Float8E4M3: 0}

func (c *context) BeginCapture(s gpu.Stream) error {
	const relaxed = 2 // other modes restrict a capture to one thread
	return c.call(&c.StreamBeginCapture, uintptr(s), relaxed)
}

func (c *context) EndCapture(s gpu.Stream) (g gpu.Graph, err error) {
	var graph uintptr
	if err := c.call(&c.StreamEndCapture, uintptr(s), uintptr(unsafe.Pointer(&graph))); err != nil {
		return 0, err
	}
	err = errors.Join(c.call(&c.GraphInstantiate, uintptr(unsafe.Pointer(&g)), graph, 0),
		c.call(&c.cudaAPI.GraphDestroy, graph))
	return g, err
}

func (c *context) LaunchGraph(g gpu.Graph, s gpu.Stream) error {
	return c.call(&c.GraphLaunch, uintptr(g), uintptr(s))
}

func (c *context) DestroyGraph(g gpu.Graph) error {
	if g == 0 {
		return nil
	}
	return c.call(&c.GraphExecDestroy, uintptr(g))
}
