package fake

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Context is a fake context.
type Context struct {
	driver *Driver
	info   gpu.DeviceInfo
	handle uintptr

	mu      sync.Mutex
	ledger  gpu.Ledger
	closed  bool
	lost    *gpu.Error // the fault after which every call fails
	blocks  []*block
	clock   time.Duration
	next    uintptr // the last handle given out
	streams map[gpu.Stream]*stream
	events  map[gpu.Event]*event
	modules map[gpu.Module]bool
	shared  map[uintptr]int // of a function: the most dynamic shared memory it may use
	graphs  map[uintptr]*capture
	plans   int
	trace   []Op
}

func newContext(d *Driver, info gpu.DeviceInfo, handle uintptr) *Context {
	c := &Context{driver: d, info: info, handle: handle, streams: map[gpu.Stream]*stream{},
		events: map[gpu.Event]*event{}, modules: map[gpu.Module]bool{}, shared: map[uintptr]int{},
		graphs: map[uintptr]*capture{}}
	c.streams[0] = &stream{c: c}
	return c
}

// begin starts every call: it fails when the context is closed or lost, or when a failure is due.
func (c *Context) begin(call string) error {
	if c.closed {
		return gpu.NewError(call, gpu.ContextIsDestroyed, "", "the context is closed")
	}
	if c.lost != nil {
		return c.lostError(call)
	}
	if err := c.driver.injected(call); err != nil {
		if err.Sticky() {
			c.lost = err
		}
		return err
	}
	return nil
}

func (c *Context) lostError(call string) error {
	e := *c.lost
	e.Call = call
	return &e
}

func (c *Context) handleFor() uintptr {
	c.next++
	return c.next
}

// Device is the configured description.
func (c *Context) Device() gpu.DeviceInfo { return c.info }

// Handle is a number that Adopt knows.
func (c *Context) Handle() uintptr { return c.handle }

// Stats counts as a real context does.
func (c *Context) Stats() gpu.Stats { return c.ledger.Stats() }

// Close closes the context and reports what was left alive, unless that was lost with the context.
func (c *Context) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	if left := c.leaks(); len(left) > 0 && c.lost == nil {
		return errors.New("fake driver: still alive at Close: " + strings.Join(left, ", "))
	}
	return nil
}

// LoadModule takes any image: kernels are found among those registered.
func (c *Context) LoadModule(image []byte) (gpu.Module, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.begin("cuModuleLoadDataEx"); err != nil {
		return 0, err
	}
	if len(image) == 0 {
		return 0, gpu.NewError("cuModuleLoadDataEx", gpu.InvalidImage, "", "the image is empty")
	}
	m := gpu.Module(c.handleFor())
	c.modules[m] = true
	return m, nil
}

// UnloadModule forgets a module.
func (c *Context) UnloadModule(m gpu.Module) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.begin("cuModuleUnload"); err != nil {
		return err
	}
	if !c.modules[m] {
		return gpu.NewError("cuModuleUnload", gpu.InvalidHandle, "", "")
	}
	delete(c.modules, m)
	return nil
}

// Function finds a registered kernel.
func (c *Context) Function(m gpu.Module, name string) (*gpu.Function, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.begin("cuModuleGetFunction"); err != nil {
		return nil, err
	}
	if !c.modules[m] {
		return nil, gpu.NewError("cuModuleGetFunction", gpu.InvalidHandle, "", "")
	}
	if c.driver.config.Kernels[name] == nil && !c.driver.config.AnyKernel {
		return nil, gpu.NewError("cuModuleGetFunction", gpu.NotFound, "named symbol not found", "kernel "+name)
	}
	f := &gpu.Function{Name: name, Handle: c.handleFor()}
	c.shared[f.Handle] = 48 << 10
	return f, nil
}

// FunctionAttribute gives plausible figures.
func (c *Context) FunctionAttribute(f *gpu.Function, a gpu.FunctionAttribute) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.begin("cuFuncGetAttribute"); err != nil {
		return 0, err
	}
	switch a {
	case gpu.MaxThreadsPerBlock:
		return 1024, nil
	case gpu.Registers:
		return 32, nil
	case gpu.BinaryVersion:
		return c.info.Capability(), nil
	case gpu.MaxDynamicShared:
		return c.shared[f.Handle], nil
	}
	return 0, nil
}

// SetFunctionAttribute keeps the limit of dynamic shared memory and accepts the rest.
func (c *Context) SetFunctionAttribute(f *gpu.Function, a gpu.FunctionAttribute, v int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.begin("cuFuncSetAttribute"); err != nil {
		return err
	}
	if a == gpu.MaxDynamicShared {
		if v < 0 || v > c.info.SharedPerBlock {
			return gpu.NewError("cuFuncSetAttribute", gpu.InvalidValue, "", fmt.Sprintf(
				"%d bytes of shared memory, a block has %d", v, c.info.SharedPerBlock))
		}
		c.shared[f.Handle] = v
	}
	return nil
}

// Occupancy counts by threads and shared memory.
func (c *Context) Occupancy(_ *gpu.Function, threads, shared int) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.begin("cuOccupancyMaxActiveBlocksPerMultiprocessor"); err != nil {
		return 0, err
	}
	return min(c.info.ThreadsPerSM/max(threads, 1), c.info.SharedPerSM/(shared+1024), 32), nil
}

// OccupancyClusters counts by threads and shared memory.
func (c *Context) OccupancyClusters(_ *gpu.Function, l gpu.LaunchConfig) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.begin("cuOccupancyMaxActiveClusters"); err != nil {
		return 0, err
	}
	perSM := min(c.info.ThreadsPerSM/l.Block.Count(), c.info.SharedPerSM/(l.Shared+1024), 32)
	return perSM * c.info.SMs / l.Cluster.Count(), nil
}

// Launch checks the shape against the GPU's limits and enqueues the Go function.
func (c *Context) Launch(f *gpu.Function, l gpu.LaunchConfig, s gpu.Stream, a *gpu.Args) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	call := "cuLaunchKernel(" + f.Name + ")"
	if err := c.begin("cuLaunchKernel"); err != nil {
		return err
	}
	if err := f.Check(a); err != nil {
		return err
	}
	if why := c.unlaunchable(f, l); why != "" {
		return gpu.NewError(call, gpu.InvalidValue, "invalid argument", why+": "+l.String())
	}
	kernel := c.driver.config.Kernels[f.Name]
	args := append([]byte(nil), a.Packed()...)
	return c.issue(Op{Call: "cuLaunchKernel", Name: f.Name, Stream: s, Config: l, Args: args},
		gpu.Stats{Launches: 1}, func() error { return c.run(kernel, call, l, args) })
}

func (c *Context) unlaunchable(f *gpu.Function, l gpu.LaunchConfig) string {
	limit, known := c.shared[f.Handle]
	cluster := l.Cluster
	switch {
	case !known:
		return "the function is not from this context"
	case min(l.Grid.X, l.Grid.Y, l.Grid.Z, l.Block.X, l.Block.Y, l.Block.Z) < 0:
		return "a negative number of blocks or threads"
	case l.Grid.Y > 65535 || l.Grid.Z > 65535:
		return "more than 65535 blocks along y or z"
	case l.Block.Count() > 1024 || l.Block.Z > 64:
		return "more than 1024 threads in a block, or 64 along z"
	case l.Shared < 0 || l.Shared > limit:
		return fmt.Sprintf("more dynamic shared memory than the %d bytes allowed to the kernel", limit)
	case cluster == gpu.Dim{}:
		return ""
	case c.info.Major < 9 || cluster.Count() > 8:
		return "clusters of up to 8 blocks need compute capability 9.0"
	case max(l.Grid.X, 1)%max(cluster.X, 1) != 0 || max(l.Grid.Y, 1)%max(cluster.Y, 1) != 0 ||
		max(l.Grid.Z, 1)%max(cluster.Z, 1) != 0:
		return "the grid is not a multiple of the cluster"
	}
	return ""
}

// EncodeTiled checks the description and that the tensor lies in one allocation; the descriptor holds its address.
func (c *Context) EncodeTiled(t gpu.TiledTensor) (gpu.TensorMap, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	const call = "cuTensorMapEncodeTiled"
	var m gpu.TensorMap
	if err := c.begin(call); err != nil {
		return m, err
	}
	if c.info.Major < 9 {
		return m, gpu.NewError(call, gpu.NotSupported, "", "tensor maps need compute capability 9.0")
	}
	if err := t.Check(); err != nil {
		return m, err
	}
	extent := int(t.Dims[0]) * t.Type.Size()
	for i, stride := range t.Strides {
		extent += int(t.Dims[i+1]-1) * int(stride)
	}
	if _, why := c.resolve(t.Address, extent); why != "" {
		return m, gpu.NewError(call, gpu.InvalidValue, "", why)
	}
	binary.LittleEndian.PutUint64(m[:], uint64(t.Address))
	return m, nil
}
