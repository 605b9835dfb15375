package fake

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"
	"unsafe"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Kernel does in Go what a kernel does on the GPU, for the whole grid at once. It takes its arguments from the launch in
// the order of its parameters. It must not call the context.
type Kernel func(*Launch)

// Launch is one run of a kernel.
type Launch struct {
	gpu.LaunchConfig
	// Took is how far the run moves the clock; zero means a microsecond.
	Took time.Duration

	c    *Context
	args []byte
	at   int
}

// fault is what a kernel panics with inside this package.
type fault struct {
	status gpu.Status
	why    string
}

// Fault ends the kernel as a fault on the GPU would.
func (l *Launch) Fault(s gpu.Status, why string) { panic(fault{s, why}) }

func (c *Context) run(kernel Kernel, call string, config gpu.LaunchConfig, args []byte) (err error) {
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
		case fault:
			err = gpu.NewError(call, r.status, r.why, "")
		default:
			panic(r)
		}
	}()
	kernel(l)
	return nil
}

// Struct takes an argument of n bytes, passed by value with that C alignment.
func (l *Launch) Struct(n, align int) []byte {
	l.at = (l.at + align - 1) / align * align
	if l.at+n > len(l.args) {
		l.Fault(gpu.LaunchFailed, "the kernel takes more arguments than the launch gives")
	}
	l.at += n
	return l.args[l.at-n : l.at]
}

// Uint32 takes an unsigned int.
func (l *Launch) Uint32() uint32 { return binary.LittleEndian.Uint32(l.Struct(4, 4)) }

// Int32 takes an int.
func (l *Launch) Int32() int { return int(int32(l.Uint32())) }

// Uint64 takes an unsigned long long.
func (l *Launch) Uint64() uint64 { return binary.LittleEndian.Uint64(l.Struct(8, 8)) }

// Int64 takes a long long.
func (l *Launch) Int64() int64 { return int64(l.Uint64()) }

// Float32 takes a float.
func (l *Launch) Float32() float32 { return math.Float32frombits(l.Uint32()) }

// Ptr takes a pointer.
func (l *Launch) Ptr() gpu.Ptr { return gpu.Ptr(l.Uint64()) }

// Slice is n numbers of device memory. Memory that is not there, or not aligned, is a fault.
func Slice[T gpu.Number](l *Launch, p gpu.Ptr, n int) []T {
	if n == 0 {
		return nil
	}
	size := int(unsafe.Sizeof(*new(T)))
	if p%gpu.Ptr(size) != 0 {
		l.Fault(gpu.MisalignedAddress, fmt.Sprintf("%#x is not a multiple of %d", uint64(p), size))
	}
	b, why := l.c.resolve(p, n*size)
	if why != "" {
		l.Fault(gpu.IllegalAddress, why)
	}
	return gpu.View[T](b)
}
