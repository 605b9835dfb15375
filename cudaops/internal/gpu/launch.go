package gpu

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"
	"unsafe"
)

// Function is a kernel of a module.
type Function struct {
	Name   string
	Handle uintptr
	Params []Param // known only to fakes
}

// Param describes a parameter of a kernel or an argument for it: its offset within the argument buffer,
// its size in bytes, and its kind.
type Param struct {
	Offset, Size int
	Kind         ParamKind
}

// fits reports whether argument a fits parameter p. Unknown kinds fit any kind.
func (p Param) fits(a Param) bool {
	return p.Offset == a.Offset && p.Size == a.Size &&
		(p.Kind == a.Kind || p.Kind == UnknownKind || a.Kind == UnknownKind)
}

// ParamKind distinguishes parameters of equal size.
type ParamKind byte

// The kinds of parameters.
const (
	UnknownKind ParamKind = iota
	Integer               // and addresses
	Float
	Structure
)

var kindLetters = [...]string{"?", "i", "f", "s"}

// String returns the letter for the kind.
func (k ParamKind) String() string { return kindLetters[k] }

// KindOf returns the kind for a letter, or UnknownKind.
func KindOf(letter string) ParamKind {
	return ParamKind(max(0, slices.Index(kindLetters[:], letter)))
}

// Dim is a number of blocks or threads along three axes. A zero counts as 1.
type Dim struct{ X, Y, Z int }

// Count returns the product of the dimensions.
func (d Dim) Count() int {
	d = d.Ones()
	return d.X * d.Y * d.Z
}

func (d Dim) String() string {
	d = d.Ones()
	return fmt.Sprintf("%dx%dx%d", d.X, d.Y, d.Z)
}

// Ones returns the dimensions with zeros replaced by 1.
func (d Dim) Ones() Dim { return Dim{cmp.Or(d.X, 1), cmp.Or(d.Y, 1), cmp.Or(d.Z, 1)} }

// Uint32s returns the dimensions in the driver's format.
func (d Dim) Uint32s() [3]uint32 {
	d = d.Ones()
	return [3]uint32{uint32(d.X), uint32(d.Y), uint32(d.Z)}
}

// LaunchConfig describes the grid of a launch.
type LaunchConfig struct {
	Grid, Block Dim
	Shared      int // dynamic shared memory, in bytes
	Cluster     Dim // blocks per cluster; zero for no clusters
	// Overlap allows the kernel to start before its predecessor in the stream has finished. The kernel
	// must then execute griddepcontrol.wait before it accesses the predecessor's results.
	Overlap bool
	// MaxShared divides the multiprocessors as PreferShared does, so that blocks of overlapping kernels fit on
	// the same multiprocessor.
	MaxShared bool
	// Cooperative guarantees that all blocks run at the same time, so that they can wait for each other.
	// A launch with too many blocks for the GPU fails.
	Cooperative bool
}

func (c LaunchConfig) String() string {
	s := fmt.Sprintf("grid %v, block %v, %d bytes of dynamic shared memory", c.Grid, c.Block,
		c.Shared)
	if (c.Cluster != Dim{}) {
		s += fmt.Sprintf(", cluster %v", c.Cluster)
	}
	if c.Cooperative {
		s += ", cooperative"
	}
	return s
}

// Args packs a kernel's arguments in the layout of its C parameters. The zero value is ready for use.
// Launch copies the packed arguments, so Args may be modified immediately afterwards.
type Args struct {
	buf    []byte
	params []Param
}

// Packed returns the packed arguments, valid until the next change.
func (a *Args) Packed() []byte { return a.buf }

// Offsets returns the offset of each argument in the packed arguments.
func (a *Args) Offsets() (all []int) {
	for _, p := range a.params {
		all = append(all, p.Offset)
	}
	return all
}

// Add appends a number or pointer, aligned to its size.
func Add[T Number](a *Args, v T) {
	kind := Integer
	switch any(v).(type) {
	case float32, float64:
		kind = Float
	}
	a.add(Bytes([]T{v}), int(unsafe.Sizeof(v)), kind)
}

// Struct appends a structure passed by value, with the given C alignment.
func (a *Args) Struct(b []byte, align int) { a.add(b, align, Structure) }

func (a *Args) add(b []byte, align int, kind ParamKind) {
	for len(a.buf)%align != 0 {
		a.buf = append(a.buf, 0)
	}
	a.params = append(a.params, Param{len(a.buf), len(b), kind})
	a.buf = append(a.buf, b...)
}

// Check compares the arguments with the kernel's parameters. A real GPU doesn't check them and would read
// garbage, so tests launch every kernel on a fake that takes the parameters from the kernel's binary.
func (f *Function) Check(a *Args) error {
	if f.Params == nil || slices.EqualFunc(f.Params, a.params, Param.fits) {
		return nil
	}
	return NewError("cuLaunchKernel("+f.Name+")", InvalidValue, "", fmt.Sprintf("arguments %+v "+
		"given, the kernel takes %+v", a.params, f.Params))
}

// TensorMap is a CUtensorMap: 128 opaque bytes.
type TensorMap [128]byte

// TiledTensor describes a tensor map: a tensor of up to five dimensions, innermost first, divided into
// boxes. The rows of a box have 16, 32, 64 or 128 bytes. In shared memory, 16-byte chunks are permuted
// (swizzled) within spans of this size, so that a column is spread across different banks.
type TiledTensor struct {
	Type    DType
	Address Ptr      // multiple of 16
	Dims    []uint64 // elements
	// bytes between consecutive indices of each dimension except the innermost; multiples of 16
	Strides []uint64
	Box     []uint32 // elements, at most 256 per dimension
}

// Swizzle returns the CUtensorMapSwizzle, from 0 to 3.
func (t TiledTensor) Swizzle() int { return bits.Len(uint(t.Box[0]) * uint(t.Type.Size()) / 32) }

// Check returns a descriptive error for an invalid description. The driver itself would only report
// INVALID_VALUE.
func (t TiledTensor) Check() error {
	rank := len(t.Dims)
	ok := rank >= 1 && rank <= 5 && len(t.Strides) == rank-1 && len(t.Box) == rank &&
		t.Address > 0 && t.Address%16 == 0
	for i := 0; ok && i < rank; i++ {
		ok = t.Dims[i] >= 1 && t.Dims[i] <= 1<<32 && t.Box[i] >= 1 && t.Box[i] <= 256 &&
			(i == 0 || t.Strides[i-1]%16 == 0 && t.Strides[i-1] < 1<<40)
	}

	if !ok || int(t.Box[0])*t.Type.Size() != 16<<t.Swizzle() || t.Swizzle() > 3 {
		return NewError("cuTensorMapEncodeTiled", InvalidValue, "", fmt.Sprintf("%+v: want 1 to 5 "+
			"dimensions of 1 to 2^32 in boxes of 1 to 256, the address and strides below 2^40 "+
			"multiples of 16, and rows of boxes of 16, 32, 64 or 128 bytes", t))
	}

	return nil
}
