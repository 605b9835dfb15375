//go:build cu || cuda

package cuinterop

import (
	"unsafe"

	"gorgonia.org/cu"
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops"
)

// The handles of gorgonia.org/cu are structs with one unexported C pointer. toUintptr and fromUintptr are
// correct only as long as the structs have no other field, so these declarations do not compile if the size
// of a handle differs from the size of a pointer.
var (
	_ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(cu.CUContext{})]struct{}{}
	_ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(cu.Stream{})]struct{}{}
)

type handle interface{ cu.CUContext | cu.Stream }

// toUintptr returns the C pointer in a handle.
func toUintptr[H handle](h H) uintptr { return *(*uintptr)(unsafe.Pointer(&h)) }

// fromUintptr returns a handle for a C pointer.
func fromUintptr[H handle](pointer uintptr) (h H) {
	*(*uintptr)(unsafe.Pointer(&h)) = pointer
	return h
}

// Adopt opens a GPU in an existing context, which must outlive the Device; see [cudaops.WithContext]. The
// context of a *cu.Ctx is its CUDAContext().
func Adopt(ctx cu.CUContext, opts ...cudaops.DeviceOption) (*cudaops.Device, error) {
	// The full slice expression keeps append from writing to the caller's array.
	return cudaops.Open(append(opts[:len(opts):len(opts)],
		cudaops.WithContext(toUintptr(ctx)))...)
}

// Context returns the device's context. The caller must not destroy it.
func Context(d *cudaops.Device) cu.CUContext { return fromUintptr[cu.CUContext](d.Context()) }

// WithStream makes a machine work on a stream that the program created in the device's context: see
// [cudaops.WithStream]. The default stream cu.NoStream is an error, because its work cannot be captured.
func WithStream(s cu.Stream) cudaops.MachineOption {
	return cudaops.WithStream(toUintptr(s))
}

// Stream returns the stream on which the machine works. The caller must not destroy it.
func Stream(m *cudaops.Machine) cu.Stream { return fromUintptr[cu.Stream](m.Stream()) }

// Memory returns the device address of a node's value and its size in bytes; see
// [cudaops.Machine.Address].
func Memory(m *cudaops.Machine, n *gorgonia.Node) (p cu.DevicePtr, bytes int64, err error) {
	at, size, err := m.Address(n)
	return cu.DevicePtr(at), int64(size), err
}

// Bind makes a node's value use device memory of the caller; see [cudaops.Machine.Bind].
func Bind(m *cudaops.Machine, n *gorgonia.Node, p cu.DevicePtr, bytes int64) error {
	return m.Bind(n, p.Uintptr(), int(bytes))
}
