package driver

import (
	"bytes"
	"errors"
	"math"
	"runtime"
	"sync"
	"unsafe"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// jit is the option block of a module load: it asks for the compiler's error log.
type jit struct {
	options [2]uint32
	values  [2]uintptr
	log     [16 << 10]byte
}

func (c *context) LoadModule(image []byte) (gpu.Module, error) {
	if len(image) == 0 {
		return 0, gpu.NewError("cuModuleLoadDataEx", gpu.InvalidImage, "", "the image is empty")
	}
	// The copy is aligned to 8 bytes, as fat binaries must be, and ends in a zero, as PTX must.
	aligned := make([]uint64, len(image)/8+1)
	copy(gpu.Bytes(aligned), image)
	const errorLogBuffer, errorLogBufferBytes = 5, 6
	j := new(jit)
	j.options = [2]uint32{errorLogBuffer, errorLogBufferBytes}
	j.values = [2]uintptr{uintptr(unsafe.Pointer(&j.log)), unsafe.Sizeof(j.log)}
	var m gpu.Module
	err := c.call(&c.ModuleLoadDataEx, uintptr(unsafe.Pointer(&m)),
		uintptr(unsafe.Pointer(&aligned[0])),
		uintptr(len(j.options)), uintptr(unsafe.Pointer(&j.options)),
		uintptr(unsafe.Pointer(&j.values)))
	var e *gpu.Error
	if errors.As(err, &e) {
		log, _, _ := bytes.Cut(j.log[:], []byte{0})
		e.Detail = string(bytes.TrimSpace(log))
	}
	return m, err
}

func (c *context) UnloadModule(m gpu.Module) error { return c.call(&c.ModuleUnload, uintptr(m)) }

func (c *context) Function(m gpu.Module, name string) (*gpu.Function, error) {
	f := &gpu.Function{Name: name}
	cname := append([]byte(name), 0)
	err := c.call(&c.ModuleGetFunction, uintptr(unsafe.Pointer(&f.Handle)), uintptr(m),
		uintptr(unsafe.Pointer(&cname[0])))
	if err != nil {
		var e *gpu.Error
		if errors.As(err, &e) {
			e.Detail = "kernel " + name
		}
		return nil, err
	}
	f.Params, err = c.params(f.Handle)
	return f, err
}

// params asks for the layout of a kernel's parameters. Before CUDA 13.2 their number is known only
// from the first refusal, which compute-sanitizer lists as an API error unless it is told
// --report-api-errors no.
func (c *context) params(function uintptr) ([]gpu.Param, error) {
	if c.FuncGetParamInfo.addr == 0 {
		return nil, nil
	}
	count := math.MaxInt
	counted := c.FuncGetParamCount.addr != 0
	if counted {
		if err := c.call(&c.FuncGetParamCount, function,
			uintptr(unsafe.Pointer(&count))); err != nil {
			return nil, err
		}
	}
	params := []gpu.Param{}
	for i := range count {
		var p gpu.Param
		err := c.call(&c.FuncGetParamInfo, function, uintptr(i), uintptr(unsafe.Pointer(&p.Offset)),
			uintptr(unsafe.Pointer(&p.Size)))
		if !counted && errors.Is(err, gpu.InvalidValue) {
			break
		}
		if err != nil {
			return nil, err
		}
		params = append(params, p)
	}
	return params, nil
}

func (c *context) AllowShared(f *gpu.Function, bytes int) error {
	const maxDynamicShared = 8
	return c.call(&c.FuncSetAttribute, f.Handle, maxDynamicShared, uintptr(bytes))
}

func (c *context) Occupancy(f *gpu.Function, threads, shared int) (int, error) {
	var n int32
	err := c.call(&c.cudaAPI.Occupancy, uintptr(unsafe.Pointer(&n)), f.Handle,
		uintptr(threads), uintptr(shared))
	return int(n), err
}

// launchFrame is everything that one launch passes by address, so that it is on the heap in one
// piece.
type launchFrame struct {
	extra  [5]uintptr // {PARAM_BUFFER_POINTER, args, PARAM_BUFFER_SIZE, &size, END}
	size   uintptr
	args   []byte
	config launchConfig
	attrs  [2]launchAttribute
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
	value [16]uint32
}

var launchFrames = sync.Pool{New: func() any { return new(launchFrame) }}

func (c *context) Launch(f *gpu.Function, l gpu.LaunchConfig, s gpu.Stream, a *gpu.Args) error {
	if err := f.Check(a); err != nil {
		return err
	}
	frame := launchFrames.Get().(*launchFrame)
	defer launchFrames.Put(frame)
	frame.args = append(frame.args[:0], a.Packed()...)
	frame.size = uintptr(len(frame.args))
	frame.extra = [5]uintptr{1, uintptr(unsafe.Pointer(unsafe.SliceData(frame.args))), 2,
		uintptr(unsafe.Pointer(&frame.size)), 0}
	grid, block := l.Grid.Ones(), l.Block.Ones()
	var err error
	if l.Extended() {
		err = c.launchEx(f, l, s, frame)
	} else {
		err = c.call(&c.LaunchKernel, f.Handle, uintptr(grid.X), uintptr(grid.Y),
			uintptr(grid.Z), uintptr(block.X),
			uintptr(block.Y), uintptr(block.Z), uintptr(l.Shared), uintptr(s), 0,
			uintptr(unsafe.Pointer(&frame.extra)))
	}
	runtime.KeepAlive(frame)
	if err != nil {
		var e *gpu.Error
		if errors.As(err, &e) {
			e.Call += "(" + f.Name + ")"
			e.Detail += l.String()
		}
		return err
	}
	c.ledger.Add(s, gpu.Stats{Launches: 1})
	return nil
}

func (c *context) launchEx(f *gpu.Function, l gpu.LaunchConfig, s gpu.Stream,
	frame *launchFrame) error {
	frame.set(l, s)
	return c.call(&c.LaunchKernelEx, uintptr(unsafe.Pointer(&frame.config)), f.Handle, 0,
		uintptr(unsafe.Pointer(&frame.extra)))
}

func (c *context) OccupancyClusters(f *gpu.Function, l gpu.LaunchConfig) (int, error) {
	frame := launchFrames.Get().(*launchFrame)
	defer launchFrames.Put(frame)
	frame.set(l, 0)
	var n int32
	err := c.call(&c.cudaAPI.OccupancyClusters, uintptr(unsafe.Pointer(&n)), f.Handle,
		uintptr(unsafe.Pointer(&frame.config)))
	runtime.KeepAlive(frame)
	return int(n), err
}

// set describes a launch.
func (frame *launchFrame) set(l gpu.LaunchConfig, s gpu.Stream) {
	const cluster, overlap = 4, 6
	n := 0
	add := func(id uint32, value ...uint32) {
		frame.attrs[n] = launchAttribute{id: id}
		copy(frame.attrs[n].value[:], value)
		n++
	}
	if (l.Cluster != gpu.Dim{}) {
		d := l.Cluster.Uint32s()
		add(cluster, d[:]...)
	}
	if l.Overlap {
		add(overlap, 1)
	}
	frame.config = launchConfig{l.Grid.Uint32s(), l.Block.Uint32s(), uint32(l.Shared), s,
		&frame.attrs[0], uint32(n)}
}

func (c *context) EncodeTiled(t gpu.TiledTensor) (gpu.TensorMap, error) {
	if err := t.Check(); err != nil {
		return gpu.TensorMap{}, err
	}
	// The driver wants the descriptor at a multiple of 64 bytes.
	buf := make([]byte, len(gpu.TensorMap{})+64)
	at := int(-uintptr(unsafe.Pointer(&buf[0])) % 64)
	steps := [5]uint32{1, 1, 1, 1, 1}
	strides := append(append([]uint64{}, t.Strides...), 0) // never empty, so that it has an address
	err := c.call(&c.TensorMapEncode, uintptr(unsafe.Pointer(&buf[at])),
		tensorMapTypes[t.Type], uintptr(len(t.Dims)),
		uintptr(t.Address), uintptr(unsafe.Pointer(&t.Dims[0])),
		uintptr(unsafe.Pointer(&strides[0])),
		uintptr(unsafe.Pointer(&t.Box[0])), uintptr(unsafe.Pointer(&steps)), 0, uintptr(t.Swizzle),
		gpu.L2Promotions[t.Promotion], 0)
	return gpu.TensorMap(buf[at : at+128]), err
}

var tensorMapTypes = map[gpu.DType]uintptr{gpu.Float32: 7, gpu.Float16: 6,
	gpu.BFloat16: 9, gpu.Float8E4M3: 0}

func (c *context) BeginCapture(s gpu.Stream) error {
	const relaxed = 2 // the other modes tie a capture to one thread
	if err := c.call(&c.StreamBeginCapture, uintptr(s), relaxed); err != nil {
		return err
	}
	c.ledger.BeginCapture(s)
	return nil
}

func (c *context) EndCapture(s gpu.Stream) (*gpu.Graph, error) {
	work, surplus := c.ledger.EndCapture(s)
	g := &gpu.Graph{Work: work}
	var graph, nodes uintptr
	if err := c.call(&c.StreamEndCapture, uintptr(s), uintptr(unsafe.Pointer(&graph))); err != nil {
		return nil, err
	}
	for _, node := range surplus {
		c.takeOut(graph, node)
	}
	err := c.call(&c.GraphGetNodes, graph, 0, uintptr(unsafe.Pointer(&nodes)))
	if err == nil {
		err = c.call(&c.GraphInstantiate, uintptr(unsafe.Pointer(&g.Handle)), graph, 0)
	}
	g.Nodes = int(nodes)
	if err := errors.Join(err, c.call(&c.cudaAPI.GraphDestroy, graph)); err != nil {
		return nil, err
	}
	g.Work.GraphLaunches++
	return g, nil
}

func (c *context) LaunchGraph(g *gpu.Graph, s gpu.Stream) error {
	if err := c.call(&c.GraphLaunch, g.Handle, uintptr(s)); err != nil {
		return err
	}
	c.ledger.Add(s, g.Work)
	return nil
}

func (c *context) DestroyGraph(g *gpu.Graph) error { return c.call(&c.GraphExecDestroy, g.Handle) }
