// Package columns stores tables as one array per column. It provides access to their bytes,
// checksums of their rows, and their file format.
package columns

import (
	"encoding/binary"
	"fmt"
	"math"
	"reflect"

	"github.com/kasmina-go/kasmina/internal/half"
)

// Column is a named column of a table. Array points to its elements: a []uint8, []uint16, []uint32,
// []uint64, []float32 or []float64.
type Column struct {
	Name  string
	Array any
}

// New returns an empty column with elements of the named type.
func New(name, elements string) (Column, error) {
	c := Column{Name: name}
	switch elements {
	case "uint8":
		c.Array = new([]uint8)
	case "uint16":
		c.Array = new([]uint16)
	case "uint32":
		c.Array = new([]uint32)
	case "uint64":
		c.Array = new([]uint64)
	case "float32":
		c.Array = new([]float32)
	case "float64":
		c.Array = new([]float64)
	default:
		return c, fmt.Errorf("field %q is of type %q", name, elements)
	}

	return c, nil
}

// Data returns the column's array, such as a []uint8, without copying it.
func (c Column) Data() any { return reflect.ValueOf(c.Array).Elem().Interface() }

// Set replaces the column's array with data, which must have the same type, without copying it.
func (c Column) Set(data any) { reflect.ValueOf(c.Array).Elem().Set(reflect.ValueOf(data)) }

// Clone returns a column with the same name and a copy of the array.
func (c Column) Clone() Column {
	array := reflect.New(reflect.TypeOf(c.Array).Elem())
	own := reflect.ValueOf(c.Array).Elem()
	array.Elem().Set(reflect.AppendSlice(reflect.MakeSlice(own.Type(), 0, own.Len()), own))
	return Column{c.Name, array.Interface()}
}

// Make gives the column a new array of n zeros.
func (c Column) Make(n int) {
	switch a := c.Array.(type) {
	case *[]uint8:
		*a = make([]uint8, n)
	case *[]uint16:
		*a = make([]uint16, n)
	case *[]uint32:
		*a = make([]uint32, n)
	case *[]uint64:
		*a = make([]uint64, n)
	case *[]float32:
		*a = make([]float32, n)
	case *[]float64:
		*a = make([]float64, n)
	}
}

// Type returns the name of the element type, as used in files.
func (c Column) Type() string {
	switch c.Array.(type) {
	case *[]uint8:
		return "uint8"
	case *[]uint16:
		return "uint16"
	case *[]uint32:
		return "uint32"
	case *[]uint64:
		return "uint64"
	case *[]float32:
		return "float32"
	default:
		return "float64"
	}
}

// Width returns the size of an element in bytes.
func (c Column) Width() int { return widths[c.Type()] }

var widths = map[string]int{"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "float32": 4,
	"float64": 8}

// RowWidth returns the size of a row of all columns in bytes.
func RowWidth(columns []Column) (bytes int) {
	for _, c := range columns {
		bytes += c.Width()
	}
	return bytes
}

// Gather writes elements [lo, hi) in little-endian order, one every stride bytes of dst.
func (c Column) Gather(dst []byte, stride, lo, hi int) {
	switch a := c.Array.(type) {
	case *[]uint8:
		for i, v := range (*a)[lo:hi] {
			dst[i*stride] = v
		}
	case *[]uint16:
		for i, v := range (*a)[lo:hi] {
			binary.LittleEndian.PutUint16(dst[i*stride:], v)
		}
	case *[]uint32:
		for i, v := range (*a)[lo:hi] {
			binary.LittleEndian.PutUint32(dst[i*stride:], v)
		}
	case *[]uint64:
		for i, v := range (*a)[lo:hi] {
			binary.LittleEndian.PutUint64(dst[i*stride:], v)
		}
	case *[]float32:
		for i, v := range (*a)[lo:hi] {
			binary.LittleEndian.PutUint32(dst[i*stride:], math.Float32bits(v))
		}
	case *[]float64:
		for i, v := range (*a)[lo:hi] {
			binary.LittleEndian.PutUint64(dst[i*stride:], math.Float64bits(v))
		}
	}
}

// Scatter reads elements [lo, hi) from src; it is the inverse of Gather.
func (c Column) Scatter(src []byte, stride, lo, hi int) {
	for i := lo; i < hi; i++ {
		b := src[(i-lo)*stride:]
		switch a := c.Array.(type) {
		case *[]uint8:
			(*a)[i] = b[0]
		case *[]uint16:
			(*a)[i] = binary.LittleEndian.Uint16(b)
		case *[]uint32:
			(*a)[i] = binary.LittleEndian.Uint32(b)
		case *[]uint64:
			(*a)[i] = binary.LittleEndian.Uint64(b)
		case *[]float32:
			(*a)[i] = math.Float32frombits(binary.LittleEndian.Uint32(b))
		case *[]float64:
			(*a)[i] = math.Float64frombits(binary.LittleEndian.Uint64(b))
		}
	}
}

// Narrow fills a float32 column from former contents of type float64, or half.Float16 stored as
// uint16. It returns false for other types.
func (c Column) Narrow(from Column) bool {
	to, ok := c.Array.(*[]float32)
	if !ok {
		return false
	}

	switch a := from.Array.(type) {
	case *[]float64:
		for i, v := range *a {
			(*to)[i] = float32(v)
		}
	case *[]uint16:
		for i, v := range *a {
			(*to)[i] = float32(half.Float16(v).Float64())
		}
	default:
		return false
	}

	return true
}
