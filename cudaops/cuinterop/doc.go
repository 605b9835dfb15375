// Package cuinterop connects cudaops to gorgonia.org/cu. A machine can use contexts, streams and device
// memory that a program created through that package, without a copy, and the program can use the
// context, the stream and the memory of a machine.
//
// The package needs cgo and CUDA's headers, so its functions exist only with the build tag cu or with
// Gorgonia's own tag, cuda. Package cudaops itself needs neither.
//
// # Building
//
// gorgonia.org/cu compiles against CUDA 12 without changes. CUDA 13 gave eight functions new signatures.
// For CUDA 13, the folder shim of this package contains a header that must precede the toolkit's header
// in the search path:
//
//	kasmina=$(go list -m -f '{{.Dir}}' github.com/kasmina-go/kasmina)
//	export CGO_CFLAGS="-I$kasmina/cudaops/cuinterop/shim -I/usr/local/cuda/include"
//	export CGO_LDFLAGS="-L/usr/local/cuda/lib64/stubs"
//	go test -tags cu github.com/kasmina-go/kasmina/cudaops/cuinterop
//
// With CUDA 12 the header changes nothing, so the same commands work. The stubs are needed for linking on
// a computer without a driver; when a program runs, it finds the driver's libcuda.so.1 by itself.
//
// # Ownership
//
// Each resource is destroyed by its creator, after its users have been closed: first the machines, then
// the devices, then the memory, the stream and the context that were given to them. A context, a stream
// or an address returned by a device or a machine is only borrowed. It is valid until Close, and the
// borrower must not destroy or free it.
//
// # Threads
//
// CUDA's current context belongs to an OS thread. Functions of cudaops may be called from any goroutine:
// each call makes the device's context current on its thread and does not restore the previous one.
//
// Functions of gorgonia.org/cu work in the current context. They need a goroutine that is locked to its
// thread by cu.CUContext.Lock or cu.Ctx.Do. If such a goroutine calls cudaops on a device with another
// context, it must make its own context current again with cu.SetCurrentContext.
//
// # Order
//
// A machine works on a stream that it creates, or on the stream given by [WithStream]. Other work on the
// machine's memory must be ordered with respect to that stream: enqueue it on the same stream, connect
// the streams with an event, or wait for the stream first.
package cuinterop
