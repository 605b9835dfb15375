// Package safetensors reads and writes model files in the safetensors format
// (Hugging Face), safely enough for checkpoints.
//
//	file   = length (uint64, little-endian) ‖ header (length bytes) ‖ data
//	header = {"__metadata__": {string: string}, NAME: {"dtype": D, "shape": [...], "data_offsets": [begin, end]}, ...}
//
// Offsets count from the start of data; the tensors fill data without gaps or overlaps. All numbers
// are little-endian.
//
// [Save] replaces a file atomically, so that either the old or the new file is complete even if the
// process is killed. [Open] trusts nothing it reads, and checks every size against the file before
// allocating memory for it.
//
// # Integrity
//
// Save adds two metadata entries that other readers ignore:
//
//	"kasmina.digest": "crc32c"
//	"kasmina.crc32c": eight hex digits for the length and header, then eight for each tensor in data order
//
// The header's own checksum is computed with its eight digits read as zeros. CRC32C suffices because
// it protects against faulty disks rather than forgers. It detects every error burst of up to 32 bits
// and all but a fraction of 2⁻³² of other errors, and processors compute it faster than memory
// delivers the bytes. The checksum of each tensor locates the corruption. Because the entries
// announce each other, corruption of one of them cannot make the file look like one without
// checksums.
//
// Files from other writers, which lack both entries, are checked only structurally; [File.HasDigest]
// distinguishes them. A tool that changes tensors and copies the metadata must drop the two entries.
package safetensors

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"unsafe"
)

var (
	// ErrCorrupt reports a file that is corrupted, truncated, malicious or not a safetensors file at
	// all.
	ErrCorrupt = errors.New("corrupt safetensors file")
	// ErrInvalid reports tensors or metadata that cannot be saved.
	ErrInvalid = errors.New("invalid tensor")
	// ErrUnsupported reports a tensor of a type that the format defines but this package cannot
	// read.
	ErrUnsupported = errors.New("unsupported tensor type")
	// ErrNotFound reports that a file does not contain a tensor.
	ErrNotFound = errors.New("tensor not found")
)

// DType is an element type, spelled as in the format.
type DType string

// Element types. F16, BF16 and the 8-bit floats are represented by their bits.
const (
	F64    DType = "F64"
	F32    DType = "F32"
	F16    DType = "F16"
	BF16   DType = "BF16"
	F8E4M3 DType = "F8_E4M3"
	F8E5M2 DType = "F8_E5M2"
	I64    DType = "I64"
	I32    DType = "I32"
	I16    DType = "I16"
	I8     DType = "I8"
	U64    DType = "U64"
	U32    DType = "U32"
	U16    DType = "U16"
	U8     DType = "U8"
	Bool   DType = "BOOL"
)

// sliceTypes lists the Go representation of each element type. New chooses the first entry with the
// type of its data.
var sliceTypes = []struct {
	dtype DType
	slice reflect.Type
}{
	{F64, reflect.TypeFor[[]float64]()},
	{F32, reflect.TypeFor[[]float32]()},
	{I64, reflect.TypeFor[[]int64]()},
	{I32, reflect.TypeFor[[]int32]()},
	{I16, reflect.TypeFor[[]int16]()},
	{I8, reflect.TypeFor[[]int8]()},
	{U64, reflect.TypeFor[[]uint64]()},
	{U32, reflect.TypeFor[[]uint32]()},
	{U16, reflect.TypeFor[[]uint16]()},
	{U8, reflect.TypeFor[[]uint8]()},
	{Bool, reflect.TypeFor[[]bool]()},
	{F16, reflect.TypeFor[[]uint16]()},
	{BF16, reflect.TypeFor[[]uint16]()},
	{F8E4M3, reflect.TypeFor[[]uint8]()},
	{F8E5M2, reflect.TypeFor[[]uint8]()},
}

// sliceType returns the Go slice type that represents d, or nil if d is unknown.
func (d DType) sliceType() reflect.Type {
	for _, t := range sliceTypes {
		if t.dtype == d {
			return t.slice
		}
	}
	return nil
}

// unsupported holds the number of bits per element of the types that the format defines but this
// package cannot read. A file with such tensors can be opened, and its other tensors can be read.
var unsupported = map[DType]int{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8,
	"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "C64": 64}

// bits returns the number of bits per element, or 0 for a type that the format does not define.
func (d DType) bits() int {
	if n, ok := unsupported[d]; ok {
		return n
	}
	return 8 * d.Size()
}

// Size returns the number of bytes per element, or 0 for a type that this package cannot read.
func (d DType) Size() int {
	if t := d.sliceType(); t != nil {
		return int(t.Elem().Size())
	}
	return 0
}

// Tensor is a named array in row-major order. An empty Shape means a scalar with one element.
type Tensor struct {
	Name  string
	DType DType
	Shape []int
	// Data is a slice of the type that represents DType: []float64 for F64, []uint16 for BF16,
	// []bool for Bool, and so on.
	Data any
}

// New returns a tensor that uses data without copying it. It infers the element type: []uint16
// means U16 and []uint8 means U8, so set DType afterwards for F16, BF16 and the 8-bit floats.
func New(name string, shape []int, data any) (Tensor, error) {
	t := Tensor{Name: name, Shape: slices.Clone(shape), Data: data}
	for _, s := range sliceTypes {
		if s.slice == reflect.TypeOf(data) {
			t.DType = s.dtype
			return t, t.check()
		}
	}
	return Tensor{}, fmt.Errorf("safetensors: New: tensor %q: data is %T, expected a slice of a "+
		"fixed-size number or bool: %w", name, data, ErrInvalid)
}

// check returns an error unless type, shape and data match.
func (t *Tensor) check() error {
	fail := func(format string, args ...any) error {
		return fmt.Errorf("safetensors: tensor %q: %s: %w", t.Name, fmt.Sprintf(format, args...),
			ErrInvalid)
	}
	want := t.DType.sliceType()
	if want == nil {
		return fail("unknown dtype %q", t.DType)
	}

	if reflect.TypeOf(t.Data) != want {
		return fail("dtype %s needs data of type %v, got %T", t.DType, want, t.Data)
	}

	n, err := elements(t.Shape)
	if err != nil {
		return fail("%v", err)
	}

	if got := reflect.ValueOf(t.Data).Len(); got != n {
		return fail("shape %v has %d elements, data has %d", t.Shape, n, got)
	}

	return nil
}

// elements returns the product of shape. It returns an error for negative dimensions, and if the
// number of bytes at eight bytes per element would overflow an int.
func elements(shape []int) (int, error) {
	n := 1
	for _, d := range shape {
		if d < 0 {
			return 0, fmt.Errorf("negative dimension in shape %v", shape)
		}
		if d == 0 {
			n = 0
		}
	}

	for _, d := range shape {
		if n > 0 && n > math.MaxInt/8/d {
			return 0, fmt.Errorf("shape %v has too many elements", shape)
		}
		n *= d
	}

	return n, nil
}

// Memory returns the memory of a slice of numbers or bools.
func Memory(data any) []byte { return bytesOf(data) }

// bytesOf returns the memory of a slice of numbers or bools.
func bytesOf(data any) []byte {
	v := reflect.ValueOf(data)
	return unsafe.Slice((*byte)(v.UnsafePointer()), v.Len()*int(v.Type().Elem().Size()))
}

// hostIsLittleEndian is a variable so that tests can exercise the other case.
var hostIsLittleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// swapBytes reverses the bytes of every element in b.
func swapBytes(b []byte, size int) {
	for ; len(b) >= size; b = b[size:] {
		slices.Reverse(b[:size])
	}
}
