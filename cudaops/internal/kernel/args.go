package kernel

import (
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Struct is the fields of a structure that a kernel takes by value, in order.
type Struct []any

// Table is structures that a kernel takes as one, with room for more.
type Table struct {
	Rows []Struct
	Room int
}

// add appends values to a kernel's arguments, or to the fields of a structure. An int is one of 32
// bits there, and an error where it does not fit: no kernel takes sizes that large. A float64 is a
// float there, a bool an int. Ints are their address and the bytes of one.
func add(a *gpu.Args, values ...any) (err error) {
	for _, v := range values {
		switch v := v.(type) {
		case gpu.Ptr:
			gpu.Add(a, v)
		case Ints:
			gpu.Add(a, v.Ptr)
			gpu.Add(a, int32(v.Size()))
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
			err = add(a, Table{[]Struct{v}, 1})
		case Table:
			err = v.add(a)
		case gpu.TensorMap:
			// The compiler aligns a descriptor to 64 bytes in memory, where parameters begin at 0x210.
			// What comes before the first one is at most 0x30 bytes, or ends less than 16 before the
			// next such offset.
			align := 16
			if len(a.Packed()) < 0x30 {
				align = 0x30
			}
			a.Struct(v[:], align)
		default:
			err = fmt.Errorf("an argument is a %T", v)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// add appends the table as C lays out an array of structures. All of them have a field of 8 bytes
// but for those of ints alone.
func (t Table) add(a *gpu.Args) error {
	var b gpu.Args
	align := 4
	for _, row := range t.Rows {
		for _, v := range row {
			switch v.(type) {
			case gpu.Ptr, Ints, int64:
				align = 8
			}
		}
		if err := add(&b, row...); err != nil {
			return err
		}
		if align == 8 && len(b.Packed())%8 != 0 {
			gpu.Add(&b, int32(0))
		}
	}
	all := b.Packed()
	a.Struct(append(all, make([]byte, len(all)/len(t.Rows)*(t.Room-len(t.Rows)))...), align)
	return nil
}
