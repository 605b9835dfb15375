// Package driver implements package gpu with NVIDIA's libraries. Open binds the driver at run time and,
// on demand, cuBLASLt. It needs no cgo, CUDA toolkit or build tags.
//
// # Threads
//
// CUDA maintains a current context for each OS thread, but goroutines move between threads. Every call
// therefore locks its goroutine to the thread, makes the context current, performs the call, and unlocks.
// Setting the context costs about as much as one trivial driver call, far less than handing the call to a
// dedicated thread and waiting for it. Moreover, a blocking call doesn't delay other goroutines.
package driver

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// context is a gpu.Context of the real driver.
type context struct {
	*cuda
	handle  uintptr
	info    gpu.DeviceInfo
	release func() error
	closed  atomic.Bool
	pinned  gpu.Pinned
	gpu.Observers

	blasLock sync.Mutex // also held by Close, which destroys blas
	blas     *cublasLt
}

// Do runs f with the context current. The goroutine stays locked to its thread for the duration, since
// the current context is a property of the thread.
func (c *context) Do(f func() error) error {
	if c.closed.Load() {
		return gpu.NewError("cuCtxSetCurrent", gpu.ContextIsDestroyed, "", "the context is closed")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if r := c.CtxSetCurrent.call(c.handle); r != 0 {
		return c.check(&c.CtxSetCurrent, r)
	}
	return f()
}

// call calls a driver function with the context current. See [proc.call] for the directive.
//
//go:uintptrescapes
func (c *context) call(p *proc, args ...uintptr) error {
	return c.Do(func() error { return c.check(p, p.call(args...)) })
}

func (c *context) Device() gpu.DeviceInfo { return c.info }
func (c *context) Handle() uintptr        { return c.handle }

// Close releases the context once. Concurrent calls wait until it is released.
func (c *context) Close() error {
	c.blasLock.Lock()
	defer c.blasLock.Unlock()
	if c.closed.Load() {
		return nil
	}

	var err error
	if c.blas != nil {
		err = c.blas.close()
	}

	c.closed.Store(true)
	return errors.Join(err, c.release())
}

func (c *context) Alloc(bytes int) (gpu.Ptr, error) {
	var p gpu.Ptr
	err := c.call(&c.MemAlloc, uintptr(unsafe.Pointer(&p)), uintptr(bytes))
	if errors.Is(err, gpu.OutOfMemory) {
		if free, total, infoErr := c.MemInfo(); infoErr == nil {
			return 0, gpu.NewOutOfMemory(bytes, free, total)
		}
	}
	return p, err
}

func (c *context) Free(p gpu.Ptr) error {
	if p == 0 {
		return nil
	}
	return c.call(&c.MemFree, uintptr(p))
}

func (c *context) AllocHost(bytes int) ([]byte, error) {
	const portable = 1 // pinned for all contexts
	if bytes <= 0 {
		return nil, gpu.NewError("cuMemHostAlloc", gpu.InvalidValue, "",
			fmt.Sprintf("%d bytes requested", bytes))
	}

	var p *byte
	if err := c.call(&c.MemHostAlloc, uintptr(unsafe.Pointer(&p)), uintptr(bytes),
		portable); err != nil {
		return nil, fmt.Errorf("%s of pinned host memory: %w", gpu.Size(uint64(bytes)), err)
	}

	b := unsafe.Slice(p, bytes)
	c.pinned.Add(b)
	return b, nil
}

func (c *context) FreeHost(b []byte) error {
	if err := c.pinned.Remove(b); err != nil {
		return err
	}
	return c.call(&c.MemFreeHost, uintptr(unsafe.Pointer(&b[0])))
}

// PinnedAddress relies on unified addressing, which every supported platform has: host and device use the
// same addresses.
func (c *context) PinnedAddress(b []byte) (gpu.Ptr, error) {
	if len(b) == 0 || !c.pinned.Has(b) {
		return 0, gpu.NewError("cuMemHostGetDevicePointer", gpu.InvalidValue, "",
			fmt.Sprintf("%d bytes that AllocHost did not return", len(b)))
	}
	return gpu.Ptr(uintptr(unsafe.Pointer(&b[0]))), nil
}

func (c *context) MemInfo() (free, total uint64, err error) {
	err = c.call(&c.MemGetInfo, uintptr(unsafe.Pointer(&free)), uintptr(unsafe.Pointer(&total)))
	return free, total, err
}

func (c *context) CopyToDevice(dst gpu.Ptr, src []byte, s gpu.Stream) error {
	return c.enqueue("copy to the device", len(src), src, s, &c.MemcpyHtoDAsync, uintptr(dst),
		uintptr(unsafe.Pointer(unsafe.SliceData(src))), uintptr(len(src)), uintptr(s))
}

func (c *context) CopyToHost(dst []byte, src gpu.Ptr, s gpu.Stream) error {
	return c.enqueue("copy to the host", len(dst), dst, s, &c.MemcpyDtoHAsync,
		uintptr(unsafe.Pointer(unsafe.SliceData(dst))), uintptr(src), uintptr(len(dst)), uintptr(s))
}

func (c *context) CopyOnDevice(dst, src gpu.Ptr, bytes int, s gpu.Stream) error {
	return c.enqueue("copy on the device", bytes, nil, s, &c.MemcpyDtoDAsync, uintptr(dst),
		uintptr(src), uintptr(bytes), uintptr(s))
}

func (c *context) Memset8(dst gpu.Ptr, v byte, n int, s gpu.Stream) error {
	return c.enqueue("memset", n, nil, s, &c.MemsetD8Async, uintptr(dst), uintptr(v), uintptr(n),
		uintptr(s))
}

// enqueue enqueues n bytes of work on a stream. If the host memory is ordinary Go memory, enqueue waits
// for the copy: only on some machines does CUDA guarantee that it has finished with such memory when the
// call returns, and the garbage collector may free it. See [proc.call] for the directive.
//
//go:uintptrescapes
func (c *context) enqueue(what string, n int, host []byte, s gpu.Stream, p *proc,
	args ...uintptr) error {
	if n < 0 { // the driver would interpret it as a huge length
		return gpu.NewError(p.name, gpu.InvalidValue, "", fmt.Sprintf("negative length %d", n))
	}

	if n == 0 {
		return nil
	}

	return c.Watch(s, gpu.Work{Name: what}, func() error {
		if err := c.call(p, args...); err != nil || host == nil || c.pinned.Has(host) {
			return err
		}
		return c.SyncStream(s)
	})
}

func (c *context) NewStream(urgent bool) (s gpu.Stream, err error) {
	const nonBlocking = 1 // independent of the default stream, which other libraries may use
	var least, priority int32
	if urgent {
		err = c.call(&c.StreamPriority, uintptr(unsafe.Pointer(&least)),
			uintptr(unsafe.Pointer(&priority)))
	}
	if err == nil {
		err = c.call(&c.StreamCreate, uintptr(unsafe.Pointer(&s)), nonBlocking, uintptr(priority))
	}
	return s, err
}

func (c *context) DestroyStream(s gpu.Stream) error { return c.call(&c.StreamDestroy, uintptr(s)) }
func (c *context) SyncStream(s gpu.Stream) error    { return c.call(&c.StreamSync, uintptr(s)) }

func (c *context) NewEvent(timing bool) (gpu.Event, error) {
	flags := uintptr(2) // disable timing, which makes the event cheaper
	if timing {
		flags = 0
	}
	var e gpu.Event
	err := c.call(&c.EventCreate, uintptr(unsafe.Pointer(&e)), flags)
	return e, err
}

func (c *context) DestroyEvent(e gpu.Event) error { return c.call(&c.EventDestroy, uintptr(e)) }
func (c *context) SyncEvent(e gpu.Event) error    { return c.call(&c.EventSynchronize, uintptr(e)) }

func (c *context) EventDone(e gpu.Event) (bool, error) {
	err := c.call(&c.EventQuery, uintptr(e))
	if errors.Is(err, gpu.NotReady) {
		return false, nil
	}
	return err == nil, err
}

func (c *context) Record(e gpu.Event, s gpu.Stream) error {
	return c.call(&c.EventRecord, uintptr(e), uintptr(s))
}

func (c *context) Await(s gpu.Stream, e gpu.Event) error {
	const external = 1
	return c.call(&c.StreamWaitEvent, uintptr(s), uintptr(e), external)
}

func (c *context) WaitEvent(s gpu.Stream, e gpu.Event) error {
	return c.call(&c.StreamWaitEvent, uintptr(s), uintptr(e), 0)
}

func (c *context) Mark(e gpu.Event, s gpu.Stream) error {
	const external = 1
	return c.call(&c.EventRecordFlags, uintptr(e), uintptr(s), external)
}

func (c *context) Elapsed(start, end gpu.Event) (time.Duration, error) {
	var ms float32
	err := c.call(&c.EventElapsedTime, uintptr(unsafe.Pointer(&ms)), uintptr(start), uintptr(end))
	return time.Duration(float64(ms) * float64(time.Millisecond)), err
}
