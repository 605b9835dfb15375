package kernel

import (
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Struct is a struct that a kernel takes by value, as a list of its fields.
type Struct []any

// add appends values to a kernel's arguments or to the fields of a struct. An int becomes a 32-bit
// integer; larger values are an error, since no kernel accepts such sizes. A float64 becomes a
// float, and a bool an int.
func add(a *gpu.Args, values ...any) (err error) {
	for _, v := range values {
		switch v := v.(type) {
		case gpu.Ptr:
			gpu.Add(a, v)
		case int:
			if v > math.MaxInt32 {
				return fmt.Errorf("%d elements, want at most 2³¹ − 1", v)
			}
			gpu.Add(a, int32(v))
		case int64:
			gpu.Add(a, v)
		case uint32:
			gpu.Add(a, v)
		case float64:
			gpu.Add(a, float32(v))
		case bool:
			gpu.Add(a, Bit(v))
		case Struct:
			err = v.add(a)
		case gpu.TensorMap:
			// The compiler aligns a descriptor to 64 bytes in memory, where the parameters start at
			// offset 0x210.
			at := 0x30
			for at < len(a.Packed()) {
				at += 0x40
			}
			a.Struct(v[:], at)
		default:
			err = fmt.Errorf("unsupported argument type %T", v)
		}
		if err != nil {
			return err
		}
	}

	return nil
}

// add appends the struct with C's layout: its size is a multiple of its alignment.
func (s Struct) add(a *gpu.Args) error {
	var b gpu.Args
	if err := add(&b, s...); err != nil {
		return err
	}

	align := s.align()
	if len(b.Packed())%align != 0 {
		gpu.Add(&b, int32(0))
	}

	a.Struct(b.Packed(), align)
	return nil
}

// align returns the struct's alignment in C: 8 bytes if it has a field of 8 bytes, and 4 bytes otherwise.
func (s Struct) align() int {
	for _, v := range s {
		switch v := v.(type) {
		case gpu.Ptr, int64:
			return 8
		case Struct:
			if v.align() == 8 {
				return 8
			}
		}
	}
	return 4
}
