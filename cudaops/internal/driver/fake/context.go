package fake

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Context is a fake context.
type Context struct {
	driver *Driver
	info   gpu.DeviceInfo
	handle uintptr

	gpu.Observers
	pinned gpu.Pinned

	mu          sync.Mutex
	lost        error // error returned by every call after a fault or Close
	blocks      []*block
	top         gpu.Ptr // address of the next block
	free        uint64  // free device memory in bytes
	pinnedBytes int
	hosts       [][]byte // pinned memory
	clock       time.Duration
	next        uintptr // last handle assigned
	streams     map[gpu.Stream]*stream
	events      map[gpu.Event]*event
	modules     map[gpu.Module]module
	shared      map[uintptr]int // limit of dynamic shared memory, by function
	graphs      map[gpu.Graph]*capture

	// Trace lists the calls that enqueued work, in order. Work replayed by a graph is not listed again.
	// Trace may be read or cleared only while no call is in progress.
	Trace []Op
}

func newContext(d *Driver, info gpu.DeviceInfo, handle uintptr) *Context {
	c := &Context{driver: d, info: info, handle: handle, top: firstAddress, free: info.Memory,
		streams: map[gpu.Stream]*stream{}, events: map[gpu.Event]*event{},
		modules: map[gpu.Module]module{}, shared: map[uintptr]int{},
		graphs: map[gpu.Graph]*capture{}}
	c.streams[0] = &stream{c: c}
	return c
}

// refused returns an error without the name of the call, which the caller adds.
func refused(code error, detail string) *gpu.Error { return gpu.NewError("", code, "", detail) }

// named sets the call in an error that doesn't have one.
func named(call string, err error) error {
	var e *gpu.Error
	if !errors.As(err, &e) || e.Call != "" {
		return err
	}
	of := *e
	of.Call = call
	return &of
}

// locked performs a call under the lock, unless the context is lost or a failure is scheduled.
func (c *Context) locked(call string, do func() error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.lost
	if due := c.driver.injected(call); err == nil && due != nil {
		if err = due; due.Sticky() {
			c.lost = due
		}
	}
	if err == nil {
		err = do()
	}

	return named(call, err)
}

// watched performs a call that enqueues work, through the stream's observer.
func (c *Context) watched(w gpu.Work, s gpu.Stream, call string, do func() error) error {
	return c.Watch(s, w, func() error {
		return withObject(c, call, c.streams, s, func(*stream) error { return do() })
	})
}

// lockedResult is like locked, for a call with a result.
func lockedResult[T any](c *Context, call string, do func() (T, error)) (v T, err error) {
	err = c.locked(call, func() error {
		v, err = do()
		return err
	})
	return v, err
}

// register registers a new object and returns its handle.
func register[H ~uintptr, T any](c *Context, call string, all map[H]T, object T) (H, error) {
	return lockedResult(c, call, func() (H, error) {
		c.next++
		all[H(c.next)] = object
		return H(c.next), nil
	})
}

// withObject performs a call that takes an object.
func withObject[H ~uintptr, T any](c *Context, call string, all map[H]T, h H, do func(T) error) error {
	return c.locked(call, func() error {
		object, err := lookup(all, h)
		if err != nil {
			return err
		}
		return do(object)
	})
}

// lookup returns the object for a handle.
func lookup[H ~uintptr, T any](all map[H]T, h H) (object T, err error) {
	object, ok := all[h]
	if !ok {
		err = refused(gpu.InvalidHandle, fmt.Sprintf("no %T %d", h, h))
	}
	return object, err
}

// remove removes an object.
func remove[H ~uintptr, T any](c *Context, call string, all map[H]T, h H) error {
	return withObject(c, call, all, h, func(T) error {
		delete(all, h)
		return nil
	})
}

func (c *Context) Device() gpu.DeviceInfo  { return c.info }
func (c *Context) Handle() uintptr         { return c.handle }
func (c *Context) Do(f func() error) error { return f() }

// Close closes the context and returns an error if objects are still alive, unless the context was lost.
func (c *Context) Close() error {
	left := c.Leaks()
	c.mu.Lock()
	defer c.mu.Unlock()
	lost := c.lost
	c.lost = refused(gpu.ContextIsDestroyed, "the context is closed")
	if len(left) > 0 && lost == nil {
		return errors.New("fake driver: still alive at Close: " + strings.Join(left, ", "))
	}
	return nil
}

// module lists the kernels of an image, if Config.Images is set.
type module map[string][]gpu.Param

// LoadModule accepts any image that Config.Images can read, or any image if that is nil.
func (c *Context) LoadModule(image []byte) (m gpu.Module, err error) {
	const call = "cuModuleLoadData"
	var kernels module
	if list := c.driver.config.Images; list != nil {
		if kernels, err = list(image, c.info.Capability()); err != nil {
			return 0, named(call, refused(gpu.InvalidImage, err.Error()))
		}
	}
	return register(c, call, c.modules, kernels)
}

func (c *Context) UnloadModule(m gpu.Module) error {
	return remove(c, "cuModuleUnload", c.modules, m)
}

// Function returns a kernel that is registered or listed in the module.
func (c *Context) Function(m gpu.Module, name string) (f *gpu.Function, err error) {
	err = withObject(c, "cuModuleGetFunction", c.modules, m, func(kernels module) error {
		params, ok := kernels[name]
		config := c.driver.config
		if all := config.Kernels == nil && config.Images == nil; !ok && !all &&
			config.Kernels[name] == nil {
			return refused(gpu.NotFound, "kernel "+name)
		}
		c.next++
		f = &gpu.Function{Name: name, Handle: c.next, Params: params}
		c.shared[c.next] = 48 << 10
		return nil
	})

	return f, err
}

// AllowShared records the limit of dynamic shared memory.
func (c *Context) AllowShared(f *gpu.Function, bytes int) error {
	return c.locked("cuFuncSetAttribute", func() error {
		if bytes < 0 || bytes > c.info.SharedPerBlock {
			return refused(gpu.InvalidValue, fmt.Sprintf(
				"%d bytes of shared memory, a block has %d", bytes, c.info.SharedPerBlock))
		}
		c.shared[f.Handle] = bytes
		return nil
	})
}

// PreferShared has no effect.
func (c *Context) PreferShared(*gpu.Function) error {
	return c.locked("cuFuncSetAttribute", func() error { return nil })
}

const threadsPerSM = 1536 // the minimum of all supported GPUs

// Resident considers threads and shared memory, where each block reserves an additional 1 KiB.
func (c *Context) Resident(_ *gpu.Function, l gpu.LaunchConfig) (int, error) {
	return lockedResult(c, "cuOccupancyMaxActiveBlocksPerMultiprocessor", func() (int, error) {
		return c.resident(l), nil
	})
}

func (c *Context) resident(l gpu.LaunchConfig) int {
	shared := c.info.SharedPerBlock + 1024
	blocks := min(threadsPerSM/l.Block.Count(), shared/(l.Shared+1024), 32)
	return blocks * c.info.SMs / l.Cluster.Count()
}

// Launch checks the launch against the GPU's limits and enqueues the Go function.
func (c *Context) Launch(f *gpu.Function, l gpu.LaunchConfig, s gpu.Stream, a *gpu.Args) error {
	return c.watched(gpu.Work{Name: f.Name}, s, "cuLaunchKernel", func() error {
		if err := f.Check(a); err != nil {
			return err
		}
		if !c.launchable(f, l) {
			return refused(gpu.InvalidValue, "kernel "+f.Name+" or the GPU does not allow "+l.String())
		}
		if l.Cooperative && l.Grid.Count()/l.Cluster.Count() > c.resident(l) {
			return refused(gpu.CooperativeTooLarge, "kernel "+f.Name+", "+l.String())
		}
		kernel := c.driver.config.Kernels[f.Name]
		args := append([]byte(nil), a.Packed()...)
		c.issue(s, Op{Call: "cuLaunchKernel", Name: f.Name, Config: l, Args: args},
			func() error { return c.run(kernel, l, args) })
		return nil
	})
}

// launchable reports whether a launch is within the limits of the kernel and the GPU.
func (c *Context) launchable(f *gpu.Function, l gpu.LaunchConfig) bool {
	shared, known := c.shared[f.Handle]
	grid, block, cluster := l.Grid.Ones(), l.Block.Ones(), l.Cluster.Ones()
	clusters := c.info.Major >= 9 && cluster.Count() <= 8 && grid.X%cluster.X == 0 &&
		grid.Y%cluster.Y == 0 && grid.Z%cluster.Z == 0
	return known && min(grid.X, grid.Y, grid.Z, block.X, block.Y, block.Z) > 0 &&
		max(grid.Y, grid.Z) <= 65535 && block.Count() <= 1024 && block.Z <= 64 &&
		l.Shared >= 0 && l.Shared <= shared && (l.Cluster == gpu.Dim{} || clusters)
}

// EncodeTiled checks the description, and that the tensor lies within one allocation. The descriptor
// contains the tensor's address.
func (c *Context) EncodeTiled(t gpu.TiledTensor) (gpu.TensorMap, error) {
	return lockedResult(c, "cuTensorMapEncodeTiled", func() (m gpu.TensorMap, err error) {
		if err := t.Check(); err != nil {
			return m, err
		}
		if c.info.Capability() < 90 {
			return m, refused(gpu.NotSupported, "tensor maps need compute capability 9.0")
		}
		extent := int(t.Dims[0]) * t.Type.Size()
		for i, stride := range t.Strides {
			extent += int(t.Dims[i+1]-1) * int(stride)
		}
		gpu.View[gpu.Ptr](m[:])[0] = t.Address
		_, _, err = c.find(t.Address, extent, gpu.InvalidValue)
		return m, err
	})
}

// Kernel is a GPU kernel implemented in Go, for the whole grid at once. It reads its arguments from
// the launch, in the order of its parameters. It must not call methods of the context.
type Kernel func(*Launch)

// Launch is one execution of a kernel.
type Launch struct {
	gpu.LaunchConfig
	// Took is the simulated duration; zero means a microsecond.
	Took time.Duration

	c    *Context
	args []byte
	at   int
}

// run executes a kernel. If the kernel panics with a *gpu.Error, run returns it as a fault.
func (c *Context) run(kernel Kernel, config gpu.LaunchConfig, args []byte) (err error) {
	if kernel == nil {
		return nil
	}

	l := &Launch{LaunchConfig: config, c: c, args: args}
	defer func() {
		switch r := recover().(type) {
		case nil:
			if l.Took > 0 {
				c.clock += l.Took - time.Microsecond
			}
		case *gpu.Error:
			err = r
		default:
			panic(r)
		}
	}()

	kernel(l)
	return nil
}

// Arg returns the next argument, a number or pointer.
func Arg[T gpu.Number](l *Launch) T {
	size := int(unsafe.Sizeof(*new(T)))
	l.at = (l.at + size - 1) / size * size
	l.at += size
	return gpu.View[T](l.args[l.at-size : l.at])[0]
}

// Slice returns n numbers in device memory. An invalid or misaligned address is a fault.
func Slice[T gpu.Number](l *Launch, p gpu.Ptr, n int) []T {
	if n == 0 {
		return nil
	}

	size := int(unsafe.Sizeof(*new(T)))
	if p%gpu.Ptr(size) != 0 {
		panic(refused(gpu.MisalignedAddress, fmt.Sprintf("%#x is not a multiple of %d", uint64(p),
			size)))
	}

	b, err := l.c.resolve(p, n*size, gpu.IllegalAddress)
	if err != nil {
		panic(err)
	}

	return gpu.View[T](b)
}

// checkRange panics like Slice if the memory is invalid, but doesn't access it.
func (l *Launch) checkRange(p gpu.Ptr, n int) {
	if n == 0 {
		return
	}
	if _, _, err := l.c.find(p, n, gpu.IllegalAddress); err != nil {
		panic(err)
	}
}
