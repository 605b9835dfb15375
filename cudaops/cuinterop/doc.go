// Package cuinterop joins cudaops with gorgonia.org/cu. Contexts, streams and device memory that a
// program holds through that package are used by a machine as they are, without a copy. Those of a
// machine are handed out. It needs cgo and CUDA's headers, so its functions exist only with the
// build tag cu (or Gorgonia's own, cuda); cudaops itself needs neither.
//
// # Building
//
// gorgonia.org/cu compiles against CUDA 12 as it is. CUDA 13 gave eight functions new signatures,
// for which the folder shim of this package has a header that stands before the toolkit's:
//
//	kasmina=$(go list -m -f '{{.Dir}}' github.com/kasmina-go/kasmina)
//	export CGO_CFLAGS="-I$kasmina/cudaops/cuinterop/shim -I/usr/local/cuda/include"
//	export CGO_LDFLAGS="-L/usr/local/cuda/lib64/stubs"
//	go test -tags cu github.com/kasmina-go/kasmina/cudaops/cuinterop
//
// On CUDA 12 the header changes nothing, so that the same lines serve. The stubs are for linking
// where no driver is installed; a program finds the driver's libcuda.so.1 itself.
//
// # Ownership
//
// Whoever made a thing destroys it, after those who use it have been closed. The order is: first
// machines, then devices, then the memory, the stream and the context that they were given. A
// context, a stream or an address that a device or a machine hands out is the lender's. It ends
// with Close, and must not be destroyed or freed.
//
// # Threads
//
// CUDA's current context belongs to an OS thread. Functions of cudaops may be called from any
// goroutine: each call makes the device's context current on its thread, and leaves it so.
// Functions of gorgonia.org/cu work in the context that is current. So they need a goroutine that
// is locked to its thread, as cu.CUContext.Lock or cu.Ctx.Do give it. Where such a goroutine calls
// cudaops on a device of another context, it must make its own current again with
// cu.SetCurrentContext.
//
// # Order
//
// A machine works on a stream of its own or on the one that [WithStream] gives it. What is done
// with its memory must be ordered by that stream. It is put on it, or tied to it by an event, or
// preceded by waiting for it.
package cuinterop
