//go:build cu || cuda

// Package cuhandle turns the handles of gorgonia.org/cu, structs with one unexported C pointer,
// into numbers and back.
package cuhandle

import (
	"unsafe"

	"gorgonia.org/cu"
)

// The conversions below are right only as long as the structs are nothing but the pointer.
var (
	_ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(cu.CUContext{})]struct{}{}
	_ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(cu.Stream{})]struct{}{}
)

// OfContext is a context's CUcontext.
func OfContext(c cu.CUContext) uintptr { return *(*uintptr)(unsafe.Pointer(&c)) }

// OfStream is a stream's CUstream.
func OfStream(s cu.Stream) uintptr { return *(*uintptr)(unsafe.Pointer(&s)) }

// Context is the context of a CUcontext.
func Context(handle uintptr) (c cu.CUContext) {
	*(*uintptr)(unsafe.Pointer(&c)) = handle
	return c
}

// Stream is the stream of a CUstream.
func Stream(handle uintptr) (s cu.Stream) {
	*(*uintptr)(unsafe.Pointer(&s)) = handle
	return s
}
