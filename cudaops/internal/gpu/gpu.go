// Package gpu says what a GPU's driver does: everything above it talks to a [Context] and never to
// a library. The package driver implements it with NVIDIA's libraries, and its package fake in
// memory, for tests where there is no GPU.
//
// All methods of a Context may be called from any goroutine at any time, except that Close must
// come last.
//
// Host memory. A copy between device memory and memory from AllocHost (pinned) is asynchronous. It
// returns at once, and the memory must stay untouched until the stream has passed it. A copy with
// any other Go memory returns when that memory may be reused. Inside a capture only pinned memory
// is allowed, since every replay reads it or writes it again.
package gpu

import (
	"fmt"
	"math/bits"
	"time"
	"unsafe"
)

// Driver is an implementation of CUDA: the one that Open binds, or a fake.
type Driver interface {
	// Version is the CUDA version that the driver supports: 1000·major + 10·minor.
	Version() int
	// Devices lists the GPUs that CUDA_VISIBLE_DEVICES leaves visible; a position in it is an
	// ordinal.
	Devices() []DeviceInfo
	// Retain returns the primary context of one of the Devices, which CUDA's runtime libraries in
	// the same process share.
	Retain(ordinal int) (Context, error)
	// Adopt uses a context (a CUcontext) that somebody else made; closing it leaves that context
	// alone.
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
	SharedPerBlock int // the most that a block may opt in to
}

// Capability is the compute capability as nvcc writes it: 90 for 9.0.
func (d DeviceInfo) Capability() int { return 10*d.Major + d.Minor }

// Ptr is an address in device memory; zero is null.
type Ptr uint64

// Offset is the address n bytes further on.
func (p Ptr) Offset(n int) Ptr { return p + Ptr(n) }

// Handles of the driver's objects. The zero Stream is the default stream. A Graph is a captured and
// instantiated sequence of work, ready to be launched again and again.
type (
	Stream uintptr
	Event  uintptr
	Module uintptr
	Graph  uintptr
)

// Context is a GPU's context: all that is done with a GPU is done through it. Every method that
// names a stream only enqueues work there, unless it says otherwise. Errors are *[Error], for which
// errors.Is finds the [Status].
type Context interface {
	Device() DeviceInfo
	// Handle is the CUcontext, for sharing with other libraries.
	Handle() uintptr
	// Do runs f on a thread on which the context is current.
	Do(f func() error) error
	// Observe sets who is given a stream's work from now on; nil for nobody. See [Observers].
	Observe(s Stream, o Observer)
	// Blas returns cuBLASLt on this context, loaded at the first call. The error is a
	// *NotFoundError when it is missing.
	Blas() (Blas, error)
	// Close lets go of the context. Device memory and other objects still alive are gone once
	// nobody else holds it.
	Close() error

	// Memory. Sizes are in bytes.

	// Alloc returns device memory, aligned to 256 bytes at least. Its content is undefined.
	Alloc(bytes int) (Ptr, error)
	Free(p Ptr) error
	// AllocHost returns pinned host memory outside the Go heap, which lives until FreeHost gets the
	// same slice.
	AllocHost(bytes int) ([]byte, error)
	FreeHost(b []byte) error
	// MemInfo is the device memory that is free and that there is, all processes considered.
	MemInfo() (free, total uint64, err error)

	CopyToDevice(dst Ptr, src []byte, s Stream) error
	CopyToHost(dst []byte, src Ptr, s Stream) error
	CopyOnDevice(dst, src Ptr, bytes int, s Stream) error
	Memset8(dst Ptr, v byte, n int, s Stream) error

	// Streams, which run their work in order, and events, which tell how far they are and time it.

	// NewStream returns a stream. The work of an urgent one goes before that of others where both
	// could run.
	NewStream(urgent bool) (Stream, error)
	DestroyStream(s Stream) error
	// SyncStream waits for all work of a stream.
	SyncStream(s Stream) error

	// NewEvent returns an event; only one with timing can be given to Elapsed.
	NewEvent(timing bool) (Event, error)
	DestroyEvent(e Event) error
	// Record marks the present end of a stream's work.
	Record(e Event, s Stream) error
	// Mark is Record inside a capture, such that every launch of the graph records the event anew.
	Mark(e Event, s Stream) error
	SyncEvent(e Event) error
	// WaitEvent has what the stream is given from now on wait for the event's last recording. Where
	// that is part of a capture, the stream becomes a part of it too, until the capture ends. By
	// then the stream that is captured must have waited for its work.
	WaitEvent(s Stream, e Event) error
	// Await is WaitEvent inside a capture, such that every launch of the graph waits for what was
	// then the event's last recording outside of it.
	Await(s Stream, e Event) error
	EventDone(e Event) (bool, error)
	// Elapsed is the time between two recorded events that have both passed, to about a
	// microsecond.
	Elapsed(start, end Event) (time.Duration, error)

	// Modules, their functions, and launching them.

	// LoadModule loads a fat binary, a cubin or PTX.
	LoadModule(image []byte) (Module, error)
	UnloadModule(m Module) error
	Function(m Module, name string) (*Function, error)
	// AllowShared raises the dynamic shared memory that a launch may have, 48 KiB before.
	AllowShared(f *Function, bytes int) error
	// Resident is the number of a launch's clusters, of its blocks where it has none, that run at
	// once on the whole GPU.
	Resident(f *Function, c LaunchConfig) (int, error)
	Launch(f *Function, c LaunchConfig, s Stream, a *Args) error
	// EncodeTiled makes the descriptor with which kernels copy tiles of a tensor (compute
	// capability 9.0 and later).
	EncodeTiled(t TiledTensor) (TensorMap, error)

	// Recording the work of a stream as a graph.

	BeginCapture(s Stream) error
	// EndCapture ends the capture, also when it failed, and instantiates the graph.
	EndCapture(s Stream) (Graph, error)
	LaunchGraph(g Graph, s Stream) error
	DestroyGraph(g Graph) error // nothing, for a zero one
}

// Bytes is the memory of a slice of numbers, or of structures of these, and View is its inverse:
// neither copies.
func Bytes[T any](s []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))),
		len(s)*int(unsafe.Sizeof(*new(T))))
}

// View is memory from AllocHost (aligned for every T) as a slice of as many numbers as fit.
func View[T Number](b []byte) []T {
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))),
		len(b)/int(unsafe.Sizeof(*new(T))))
}

// Number is what device memory holds.
type Number interface {
	~int | ~int8 | ~int16 | ~int32 | ~int64 |
		~uint8 | ~uint16 | ~uint32 | ~uint64 | ~float32 | ~float64
}

// Size writes a number of bytes for people: 1.50 GiB.
func Size(bytes uint64) string {
	if bytes < 1024 {
		return fmt.Sprintf("%d bytes", bytes)
	}
	unit := (bits.Len64(bytes) - 1) / 10
	return fmt.Sprintf("%.2f %ciB", float64(bytes)/float64(uint64(1)<<(10*unit)), "KMGTPE"[unit-1])
}
