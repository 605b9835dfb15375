//go:build cu || cuda

package cuinterop

import (
	"unsafe"

	"gorgonia.org/cu"
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops"
)

// The handles of gorgonia.org/cu are structs with one unexported C pointer. The conversions below
// are right only as long as they are nothing but that.
var (
	_ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(cu.CUContext{})]struct{}{}
	_ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(cu.Stream{})]struct{}{}
)

type handle interface{ cu.CUContext | cu.Stream }

func number[H handle](h H) uintptr { return *(*uintptr)(unsafe.Pointer(&h)) }

func of[H handle](number uintptr) (h H) {
	*(*uintptr)(unsafe.Pointer(&h)) = number
	return h
}

// Adopt takes a GPU into use in a context that the program made, which must outlive the Device; see
// [cudaops.WithContext]. The context of a *cu.Ctx is its CUDAContext().
func Adopt(ctx cu.CUContext, opts ...cudaops.DeviceOption) (*cudaops.Device, error) {
	return cudaops.Open(append(opts[:len(opts):len(opts)],
		cudaops.WithContext(number(ctx)))...)
}

// Context is the context in which the device's work is done. It must not be destroyed.
func Context(d *cudaops.Device) cu.CUContext { return of[cu.CUContext](d.Context()) }

// WithStream makes a machine put its work on a stream that the program made in the device's
// context: see [cudaops.WithStream]. The default stream cu.NoStream, whose work cannot be captured,
// is an error.
func WithStream(s cu.Stream) cudaops.MachineOption {
	return cudaops.WithStream(number(s))
}

// Stream is the stream that the machine's work is on. It must not be destroyed.
func Stream(m *cudaops.Machine) cu.Stream { return of[cu.Stream](m.Stream()) }

// Memory is where a node's value lies on the device, and the bytes it takes; see
// [cudaops.Machine.Address].
func Memory(m *cudaops.Machine, n *gorgonia.Node) (p cu.DevicePtr, bytes int64, err error) {
	at, size, err := m.Address(n)
	return cu.DevicePtr(at), int64(size), err
}

// Bind makes a node's value lie in device memory that the program holds; see
// [cudaops.Machine.Bind].
func Bind(m *cudaops.Machine, n *gorgonia.Node, p cu.DevicePtr, bytes int64) error {
	return m.Bind(n, p.Uintptr(), int(bytes))
}
