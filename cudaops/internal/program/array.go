package program

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/quant"
)

// Array is the value of a node, or part of a value: elements in row-major order.
type Array struct {
	*Buffer     // nil for a packed result, and for a value that exists only within another value
	At      int // offset into the buffer in bytes
	Type    gpu.DType
	Shape   []int
	Stride  int // elements between the starts of consecutive rows of a matrix; 0 if rows are contiguous
	// Parts are the tensors of a packed result, in order. A packed result has no elements itself, since
	// its parts may have different types.
	Parts []*Array
	// Packed holds the matrix if it is a frozen weight in float8 or NF4. The array itself has no elements,
	// and its type does not matter.
	Packed *Packed
}

// Packed is a matrix of frozen weights in float8 or NF4. Its arrays are resident, and nil until a call needs
// them.
type Packed struct {
	Matrix        *quant.Matrix
	Codes, Scales *Array
	Nested, Table *Array    // codes of the scales and their codebook; nil for float8
	Largest       []float32 // Matrix.LargestOfRows, once a call needs them

	// Parts holds the matrices if several are stacked. All other fields are then empty.
	Parts []*Array
}

// Len returns the number of elements.
func (a *Array) Len() int { return opbase.Size(a.Shape) }

// Extent returns the size of the elements in bytes.
func (a *Array) Extent() int { return a.Len() * a.Type.Size() }

// Span returns the number of bytes from the first element through the last, including gaps between rows.
func (a *Array) Span() int {
	if a.Stride == 0 || a.Len() == 0 {
		return a.Extent()
	}
	return ((a.Shape[0]-1)*a.Stride + a.Shape[1]) * a.Type.Size()
}

// Ptr returns the device address. It is valid once memory is allocated.
func (a *Array) Ptr() gpu.Ptr { return a.Base.Offset(a.At) }

// StandIn returns a placeholder with the alignment that the array's address will have, for use before
// memory is allocated.
func (a *Array) StandIn() gpu.Ptr { return gpu.Ptr(Alignment).Offset(a.At) }

// RowStride returns the number of elements between the starts of consecutive rows of a matrix.
func (a *Array) RowStride() int {
	if a.Stride > 0 || len(a.Shape) < 2 {
		return a.Stride
	}
	return a.Shape[1]
}

// View returns a view of the array with another shape, starting at the given element.
func (a *Array) View(element int, shape ...int) *Array {
	return &Array{Buffer: a.Buffer, At: a.At + element*a.Type.Size(), Type: a.Type, Shape: shape}
}

// Columns returns a view of columns from through from+n-1 of a matrix.
func (a *Array) Columns(from, n int) *Array {
	return &Array{Buffer: a.Buffer, At: a.At + from*a.Type.Size(), Type: a.Type,
		Shape: []int{a.Shape[0], n}, Stride: a.Shape[1]}
}
