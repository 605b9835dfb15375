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
	Params []Param // its parameters, if a fake knows them
}

// Param is a parameter of a kernel, or the argument for one: its place among the others, in bytes,
// and its kind.
type Param struct {
	Offset, Size int
	Kind         ParamKind
}

// fits reports whether an argument fits a parameter: unknown kinds fit all.
func (p Param) fits(a Param) bool {
	return p.Offset == a.Offset && p.Size == a.Size &&
		(p.Kind == a.Kind || p.Kind == UnknownKind || a.Kind == UnknownKind)
}

// ParamKind tells numbers apart that are passed alike.
type ParamKind byte

// The kinds of parameters.
const (
	UnknownKind ParamKind = iota
	Integer               // and addresses
	Float
	Structure
)

var kindLetters = [...]string{"?", "i", "f", "s"}

// String returns the letter that stands for the kind.
func (k ParamKind) String() string { return kindLetters[k] }

// KindOf returns the kind of a letter, UnknownKind if it has none.
func KindOf(letter string) ParamKind {
	return ParamKind(max(0, slices.Index(kindLetters[:], letter)))
}

// Dim counts blocks or threads along three axes; a zero counts as 1.
type Dim struct{ X, Y, Z int }

// Count is the product of the three.
func (d Dim) Count() int {
	d = d.Ones()
	return d.X * d.Y * d.Z
}

func (d Dim) String() string {
	d = d.Ones()
	return fmt.Sprintf("%dx%dx%d", d.X, d.Y, d.Z)
}

// Ones is the dimensions with 1 where they are zero.
func (d Dim) Ones() Dim { return Dim{cmp.Or(d.X, 1), cmp.Or(d.Y, 1), cmp.Or(d.Z, 1)} }

// Uint32s is the dimensions as the driver takes them.
func (d Dim) Uint32s() [3]uint32 {
	d = d.Ones()
	return [3]uint32{uint32(d.X), uint32(d.Y), uint32(d.Z)}
}

// LaunchConfig is the shape of a launch.
type LaunchConfig struct {
	Grid, Block Dim
	Shared      int // dynamic shared memory, in bytes
	Cluster     Dim // blocks that share a cluster; zero for none
	// Overlap lets the kernel start before its predecessor in the stream has ended; it must then
	// itself wait (griddepcontrol.wait) before touching what the predecessor wrote.
	Overlap bool
}

func (c LaunchConfig) String() string {
	s := fmt.Sprintf("grid %v, block %v, %d bytes of dynamic shared memory", c.Grid, c.Block,
		c.Shared)
	if (c.Cluster != Dim{}) {
		s += fmt.Sprintf(", cluster %v", c.Cluster)
	}
	return s
}

// Args packs a kernel's arguments as C lays out its parameters. A zero Args is ready. Launch copies
// the bytes, so it may be changed right afterwards.
type Args struct {
	buf    []byte
	params []Param
}

// Packed is the arguments' bytes, valid until the next change.
func (a *Args) Packed() []byte { return a.buf }

// Add appends a number or a pointer, at a multiple of its own size.
func Add[T Number](a *Args, v T) {
	kind := Integer
	switch any(v).(type) {
	case float32, float64:
		kind = Float
	}
	a.add(Bytes([]T{v}), int(unsafe.Sizeof(v)), kind)
}

// Struct appends a structure passed by value, whose C alignment is align.
func (a *Args) Struct(b []byte, align int) { a.add(b, align, Structure) }

func (a *Args) add(b []byte, align int, kind ParamKind) {
	for len(a.buf)%align != 0 {
		a.buf = append(a.buf, 0)
	}
	a.params = append(a.params, Param{len(a.buf), len(b), kind})
	a.buf = append(a.buf, b...)
}

// Check compares the arguments with the kernel's own parameters: a mismatch would be garbage on a
// GPU, which does not look. Tests launch every kernel on a fake that knows them from its binary.
func (f *Function) Check(a *Args) error {
	if f.Params == nil || slices.EqualFunc(f.Params, a.params, Param.fits) {
		return nil
	}
	return NewError("cuLaunchKernel("+f.Name+")", InvalidValue, "", fmt.Sprintf("arguments %+v "+
		"given, the kernel takes %+v", a.params, f.Params))
}

// TensorMap is a CUtensorMap: 128 opaque bytes.
type TensorMap [128]byte

// TiledTensor is what a tensor map describes: a tensor of up to five dimensions, innermost first,
// cut into boxes. A box's rows have 16, 32, 64 or 128 bytes. In shared memory chunks of 16 bytes
// are permuted within so many, so that columns do not fall on the same banks.
type TiledTensor struct {
	Type    DType
	Address Ptr      // a multiple of 16
	Dims    []uint64 // elements
	// bytes from one index to the next, for all dimensions but the innermost; multiples of 16
	Strides []uint64
	Box     []uint32 // elements, at most 256 each
}

// Swizzle is the CUtensorMapSwizzle, 0 to 3.
func (t TiledTensor) Swizzle() int { return bits.Len(uint(t.Box[0]) * uint(t.Type.Size()) / 32) }

// Check reports what is wrong with the description, where the driver would only say INVALID_VALUE.
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
