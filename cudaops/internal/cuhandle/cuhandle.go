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

type handle interface{ cu.CUContext | cu.Stream }

// Number is a handle's C pointer: the CUcontext or CUstream.
func Number[H handle](h H) uintptr { return *(*uintptr)(unsafe.Pointer(&h)) }

// Of is the handle of a C pointer.
func Of[H handle](number uintptr) (h H) {
	*(*uintptr)(unsafe.Pointer(&h)) = number
	return h
}
