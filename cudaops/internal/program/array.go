package program

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// Array is the value of a node, or a part of one: elements in row-major order.
type Array struct {
	*Buffer     // nil for a packed result, and for a value that exists within another one only
	At      int // bytes into the buffer
	Type    gpu.DType
	Shape   []int
	Stride  int // elements from one row of a matrix to the next; 0 for rows without gaps
	// Parts are the tensors of a packed result, in order. Their types may differ, so it has no
	// elements of its own.
	Parts []*Array
}

// Len is the number of elements.
func (a *Array) Len() int { return opbase.Size(a.Shape) }

// Extent is the bytes of the elements.
func (a *Array) Extent() int { return a.Len() * a.Type.Size() }

// Span is the bytes from the first element to behind the last, gaps included.
func (a *Array) Span() int {
	if a.Stride == 0 || a.Len() == 0 {
		return a.Extent()
	}
	return ((a.Shape[0]-1)*a.Stride + a.Shape[1]) * a.Type.Size()
}

// Ptr is where the array lies, once the machine has memory.
func (a *Array) Ptr() gpu.Ptr { return a.Base.Offset(a.At) }

// StandIn is an address that is aligned as the array's will be, before there is memory.
func (a *Array) StandIn() gpu.Ptr { return gpu.Ptr(Alignment).Offset(a.At) }

// RowStride is the elements from one row of a matrix to the next.
func (a *Array) RowStride() int {
	if a.Stride > 0 || len(a.Shape) < 2 {
		return a.Stride
	}
	return a.Shape[1]
}

// View is elements of the array in another shape, from the given element on.
func (a *Array) View(element int, shape ...int) *Array {
	return &Array{Buffer: a.Buffer, At: a.At + element*a.Type.Size(), Type: a.Type, Shape: shape}
}

// Columns is n columns of a matrix, from the given one on.
func (a *Array) Columns(from, n int) *Array {
	return &Array{Buffer: a.Buffer, At: a.At + from*a.Type.Size(), Type: a.Type,
		Shape: []int{a.Shape[0], n}, Stride: a.Shape[1]}
}
