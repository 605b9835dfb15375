// Package gpu defines the interface to a GPU driver. All higher layers use a [Context] and never call a
// CUDA library themselves. Package driver implements the interface with NVIDIA's libraries, and package
// driver/fake implements it in memory, for tests on machines without a GPU.
//
// All methods of a Context may be called from any goroutine at any time, except that Close must come
// last.
//
// # Host memory
//
// A copy between device memory and pinned memory, which AllocHost returns, is asynchronous: it returns
// immediately, and the host memory must not be touched until the stream has completed the copy. A copy
// that involves other Go memory returns when that memory may be reused. During a capture only pinned
// memory is allowed, because every replay accesses it again.
package gpu

import (
	"fmt"
	"math/bits"
	"time"
	"unsafe"
)

// Driver is an implementation of CUDA: either NVIDIA's driver or a fake.
type Driver interface {
	// Version returns the CUDA version that the driver supports, as 1000·major + 10·minor.
	Version() int
	// Devices lists the GPUs made visible by CUDA_VISIBLE_DEVICES. An ordinal is an index into this list.
	Devices() []DeviceInfo
	// Retain returns the primary context of a device. CUDA's runtime libraries in the same process share
	// this context.
	Retain(ordinal int) (Context, error)
	// Adopt uses an existing context, given as a CUcontext. Closing the result doesn't destroy that
	// context.
	Adopt(handle uintptr) (Context, error)
}

// DeviceInfo describes a GPU. Memory sizes are in bytes.
type DeviceInfo struct {
	Ordinal        int
	Name           string
	Major, Minor   int // compute capability
	Memory         uint64
	SMs            int
	L2             int
	SharedPerBlock int // maximum that a block can opt in to
}

// Capability returns the compute capability as nvcc writes it: 90 for 9.0.
func (d DeviceInfo) Capability() int { return 10*d.Major + d.Minor }

// Overlaps reports whether the blocks of a kernel can form clusters, and kernels can start before their
// predecessors have ended. The kernels' machine code for compute capabilities 9.0 and 10 waits for the
// predecessor itself; the PTX that other GPUs run does not.
func (d DeviceInfo) Overlaps() bool { return d.Capability() == 90 || d.Major == 10 }

// Ptr is an address in device memory; zero is null.
type Ptr uint64

// Offset returns the address n bytes after p.
func (p Ptr) Offset(n int) Ptr { return p + Ptr(n) }

// Handles of driver objects. The zero Stream is the default stream. A Graph is a captured and
// instantiated sequence of work that can be launched repeatedly.
type (
	Stream uintptr
	Event  uintptr
	Module uintptr
	Graph  uintptr
)

// Context is a CUDA context, through which all operations on a GPU are performed. A method with a stream
// parameter only enqueues work on the stream unless documented otherwise. Errors have type *[Error] and
// wrap a [Status], so that errors.Is can test for the status.
type Context interface {
	Device() DeviceInfo
	// Handle returns the CUcontext, for sharing with other libraries.
	Handle() uintptr
	// Do runs f on an OS thread on which the context is current.
	Do(f func() error) error
	// Observe sets the observer of a stream's work; nil removes it. See [Observers].
	Observe(s Stream, o Observer)
	// Blas returns cuBLASLt for this context, loading it at the first call. If the library can't be
	// found, the error is a *NotFoundError.
	Blas() (Blas, error)
	// Close releases the context. Once its last user has released it, the remaining device memory and
	// other objects are gone.
	Close() error

	// Memory. All sizes are in bytes.

	// Alloc returns device memory aligned to at least 256 bytes. Its contents are undefined.
	Alloc(bytes int) (Ptr, error)
	Free(p Ptr) error
	// AllocHost returns pinned host memory outside the Go heap. It lives until the same slice is passed
	// to FreeHost.
	AllocHost(bytes int) ([]byte, error)
	FreeHost(b []byte) error
	// PinnedAddress returns the address at which kernels access pinned memory. b is a slice that
	// AllocHost returned, or a part of one.
	PinnedAddress(b []byte) (Ptr, error)
	// MemInfo returns the free and the total device memory, taking all processes into account.
	MemInfo() (free, total uint64, err error)

	CopyToDevice(dst Ptr, src []byte, s Stream) error
	CopyToHost(dst []byte, src Ptr, s Stream) error
	CopyOnDevice(dst, src Ptr, bytes int, s Stream) error
	Memset8(dst Ptr, v byte, n int, s Stream) error

	// Streams, which execute their work in order, and events, which report progress and measure time.

	// NewStream returns a stream. Work of an urgent stream takes precedence over work of other streams.
	NewStream(urgent bool) (Stream, error)
	DestroyStream(s Stream) error
	// SyncStream waits until all work of a stream is complete.
	SyncStream(s Stream) error

	// NewEvent returns an event. Elapsed accepts only events with timing.
	NewEvent(timing bool) (Event, error)
	DestroyEvent(e Event) error
	// Record marks the current end of a stream's work.
	Record(e Event, s Stream) error
	// Mark is like Record, but within a capture. Every launch of the graph records the event again.
	Mark(e Event, s Stream) error
	SyncEvent(e Event) error
	// WaitEvent makes work subsequently enqueued on the stream wait for the event's last recording. If
	// that recording is part of a capture, the stream joins the capture until it ends. Before the end,
	// the captured stream must wait for the work of all streams that joined.
	WaitEvent(s Stream, e Event) error
	// Await is like WaitEvent, but within a capture. Every launch of the graph waits for the event's last
	// recording outside of the capture, as of the launch.
	Await(s Stream, e Event) error
	EventDone(e Event) (bool, error)
	// Elapsed returns the time between two events that have both occurred, with a resolution of about a
	// microsecond.
	Elapsed(start, end Event) (time.Duration, error)

	// Modules, functions, and launches.

	// LoadModule loads a fat binary, a cubin or PTX.
	LoadModule(image []byte) (Module, error)
	UnloadModule(m Module) error
	Function(m Module, name string) (*Function, error)
	// AllowShared raises a function's limit of dynamic shared memory, initially 48 KiB.
	AllowShared(f *Function, bytes int) error
	// PreferShared makes multiprocessors that run a function divide their memory into as much shared memory
	// and as little cache as possible. Blocks of two kernels only run on the same multiprocessor if both
	// kernels divide it in the same way.
	PreferShared(f *Function) error
	// Resident returns the number of a launch's clusters, or of its blocks if it has no clusters, that
	// the whole GPU can execute at once.
	Resident(f *Function, c LaunchConfig) (int, error)
	// Launch enqueues a kernel. A cooperative launch with more blocks than the whole GPU can execute at
	// once fails with the status CooperativeTooLarge.
	Launch(f *Function, c LaunchConfig, s Stream, a *Args) error
	// EncodeTiled creates the descriptor that kernels use to copy tiles of a tensor. It requires compute
	// capability 9.0.
	EncodeTiled(t TiledTensor) (TensorMap, error)

	// Captures, which record the work of a stream as a graph.

	BeginCapture(s Stream) error
	// EndCapture ends the capture, even if it has failed, and instantiates the graph.
	EndCapture(s Stream) (Graph, error)
	LaunchGraph(g Graph, s Stream) error
	DestroyGraph(g Graph) error // no-op if g is zero
}

// Bytes returns the memory of a slice of numbers, or of structures of numbers, without copying it.
func Bytes[T any](s []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))),
		len(s)*int(unsafe.Sizeof(*new(T))))
}

// View returns memory from AllocHost, which is aligned for every T, as a slice of as many numbers as fit.
// It doesn't copy.
func View[T Number](b []byte) []T {
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))),
		len(b)/int(unsafe.Sizeof(*new(T))))
}

// Number is an element type of device memory.
type Number interface {
	~int | ~int8 | ~int16 | ~int32 | ~int64 |
		~uint8 | ~uint16 | ~uint32 | ~uint64 | ~float32 | ~float64
}

// Size formats a number of bytes for display, as in "1.50 GiB".
func Size(bytes uint64) string {
	if bytes < 1024 {
		return fmt.Sprintf("%d bytes", bytes)
	}
	unit := (bits.Len64(bytes) - 1) / 10
	return fmt.Sprintf("%.2f %ciB", float64(bytes)/float64(uint64(1)<<(10*unit)), "KMGTPE"[unit-1])
}
