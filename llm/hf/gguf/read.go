package gguf

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"

	"github.com/kasmina-go/kasmina/internal/regular"
)

// Description describes the header of a GGUF file, whether or not Save wrote it.
type Description struct {
	Fields  []Field
	Tensors []Tensor
}

// Field is a metadata field, formatted as text. An array is represented by its length.
type Field struct{ Name, Value string }

// Tensor describes a tensor. Type is a number if this package does not know its name. Shape lists the
// rows of a matrix first, as elsewhere in this module.
type Tensor struct {
	Name, Type string
	Shape      []int

	dtype  Type
	offset uint64 // from the first byte of data
}

const (
	maxHead   = 64 << 20 // bytes; a vocabulary takes a few million
	maxText   = 1 << 20
	maxDims   = 8
	maxFields = 1 << 16

	leastField  = 8 + 4 + 1     // bytes
	leastTensor = 8 + 4 + 4 + 8 // bytes
)

// Describe reads the header of a GGUF file. The header must not exceed 64 MiB.
func Describe(path string) (*Description, error) {
	file, size, err := regular.Open(path)
	if err != nil {
		return nil, fmt.Errorf("gguf: %w", err)
	}
	defer file.Close()

	h := &head{r: bufio.NewReader(file), left: min(size, maxHead), longer: size > maxHead}
	d := &Description{}
	h.read(func(name string, value any) { d.Fields = append(d.Fields, Field{name, textOf(value)}) },
		func(t Tensor) { d.Tensors = append(d.Tensors, t) })
	if h.err != nil {
		return nil, fmt.Errorf("gguf: %s: %w", path, h.err)
	}

	return d, nil
}

// textOf formats a metadata value.
func textOf(value any) string {
	switch v := value.(type) {
	case string:
		return v
	case array:
		return fmt.Sprintf("%d elements", v.n)
	case float32:
		return strconv.FormatFloat(float64(v), 'g', -1, 32)
	}
	return fmt.Sprint(value)
}

// An array is a metadata value. Its elements are values of one type if the head keeps them, and nil otherwise.
type array struct {
	n        uint64
	elements []any
}

// head reads a header. After an error, which err holds, it returns zeros.
type head struct {
	r      *bufio.Reader
	left   int64 // bytes remaining of the header's maximum size
	longer bool  // the file is longer than maxHead
	keep   bool  // arrays have their elements
	digits [8]byte
	err    error
}

var (
	errShort = errors.New("it is cut short")
	errLong  = fmt.Errorf("its head has more than %d bytes", maxHead)
)

// has reports whether the file can still contain n elements of the given size in bytes.
func (h *head) has(n uint64, bytes int) bool {
	if n <= uint64(h.left)/uint64(bytes) {
		return h.err == nil
	}
	if h.err == nil {
		h.err = errShort
		if h.longer {
			h.err = errLong
		}
	}
	return false
}

func (h *head) fail(format string, args ...any) {
	if h.err == nil {
		h.err = fmt.Errorf(format, args...)
	}
}

// read passes the metadata and the tensors to the functions.
func (h *head) read(field func(name string, value any), tensor func(Tensor)) {
	h.readAll(field, tensor)
	if errors.Is(h.err, io.EOF) || errors.Is(h.err, io.ErrUnexpectedEOF) {
		h.err = errShort // the file became shorter while it was read
	}
}

func (h *head) readAll(field func(name string, value any), tensor func(Tensor)) {
	var magic [4]byte
	if h.fill(magic[:]); string(magic[:]) != "GGUF" {
		h.fail("it begins with %q, want \"GGUF\"", magic)
	}

	if v := h.number(4); v != 2 && v != 3 {
		h.fail("it is of version %d, want 2 or 3", v)
	}

	tensors, fields := h.number(8), h.number(8)
	if tensors > maxFields || fields > maxFields {
		h.fail("it announces %d tensors and %d fields, want at most %d", tensors, fields, maxFields)
	}

	if !h.has(tensors, leastTensor) || !h.has(fields, leastField) {
		return
	}

	for range fields {
		name := h.text()
		value := h.value(uint32(h.number(4)), 0)
		if h.err != nil {
			return
		}
		field(name, value)
	}

	for range tensors {
		t := Tensor{Name: h.text()}
		n := h.number(4)
		if n > maxDims {
			h.fail("tensor %.60q has %d dimensions, want at most %d", t.Name, n, maxDims)
		}
		if h.err != nil {
			return
		}
		t.Shape = make([]int, n)
		for i := range t.Shape {
			size := h.number(8)
			if size > math.MaxInt32 {
				h.fail("tensor %.60q has a dimension of %d", t.Name, size)
			}
			t.Shape[len(t.Shape)-1-i] = int(size)
		}
		t.dtype = Type(h.number(4))
		t.Type, t.offset = t.dtype.String(), h.number(8)
		if h.err != nil {
			return
		}
		tensor(t)
	}
}

// String returns the type's name, or its number if it has no name.
func (t Type) String() string {
	switch t {
	case F32:
		return "f32"
	case F16:
		return "f16"
	case BF16:
		return "bf16"
	case Q80:
		return "q8_0"
	}

	if name, ok := foreignTypes[t]; ok {
		return name
	}
	return strconv.Itoa(int(t))
}

// foreignTypes has the names of the most frequent types that this package cannot read.
var foreignTypes = map[Type]string{2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 10: "q2_K", 11: "q3_K", 12: "q4_K",
	13: "q5_K", 14: "q6_K", 20: "iq4_nl", 23: "iq4_xs", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4"}

func (h *head) fill(b []byte) {
	if h.has(uint64(len(b)), 1) {
		h.left -= int64(len(b))
		_, h.err = io.ReadFull(h.r, b)
	}
}

// skip discards n bytes. The caller must first check with has that they exist.
func (h *head) skip(n int) {
	h.left -= int64(n)
	_, h.err = h.r.Discard(n)
}

// number reads an unsigned number of the given size in bytes.
func (h *head) number(bytes int) uint64 {
	h.digits = [8]byte{}
	h.fill(h.digits[:bytes])
	return binary.LittleEndian.Uint64(h.digits[:])
}

func (h *head) text() string {
	n := h.number(8)
	if n > maxText {
		h.fail("a text has %d bytes, want at most %d", n, maxText)
		return ""
	}

	if !h.has(n, 1) {
		return ""
	}

	b := make([]byte, n)
	h.fill(b)
	return string(b)
}

// sizes maps GGUF's type numbers to sizes in bytes. Strings and arrays, which vary in size, are missing.
var sizes = map[uint32]int{0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

// elements reads an array nested in depth-1 other arrays.
func (h *head) elements(kind uint32, n uint64, depth int) any {
	a := array{n: n}
	if h.keep {
		size := 8 // the least size of a string or an array
		if s, fixed := sizes[kind]; fixed {
			size = s
		}
		for i := uint64(0); i < n && h.has(n-i, size); i++ {
			a.elements = append(a.elements, h.value(kind, depth))
		}
		return a
	}

	h.skipElements(kind, n, depth)
	return a
}

func (h *head) skipElements(kind uint32, n uint64, depth int) {
	if size, fixed := sizes[kind]; fixed {
		if h.has(n, size) {
			h.skip(int(n) * size)
		}
		return
	}

	if !h.has(n, 8) { // each string or array needs at least 8 bytes
		return
	}

	for i := uint64(0); i < n && h.err == nil; i++ {
		if kind != kindString {
			h.value(kind, depth)
		} else if length := h.number(8); h.has(length, 1) {
			h.skip(int(length))
		}
	}
}

// value reads a value, nested in depth arrays. It returns a string, an int64, a uint64, a float32, a float64, a
// bool, or an array.
func (h *head) value(kind uint32, depth int) any {
	size, fixed := sizes[kind]
	switch {
	case kind == kindString:
		return h.text()
	case kind == kindArray && depth < 2:
		element, n := uint32(h.number(4)), h.number(8)
		return h.elements(element, n, depth+1)
	case !fixed:
		h.fail("a value has the type %d, which GGUF does not define", kind)
		return nil
	}

	bits := h.number(size)
	shift := 64 - 8*size
	switch kind {
	case 1, 3, 5, 11: // signed
		return int64(bits<<shift) >> shift
	case kindFloat32:
		return math.Float32frombits(uint32(bits))
	case 12:
		return math.Float64frombits(bits)
	case kindBool:
		return bits != 0
	}

	return bits
}
