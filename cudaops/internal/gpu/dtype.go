package gpu

// DType is the type of what lies in device memory.
type DType uint8

// The types: floats by size and then range, and the integers of ids.
const (
	Float32 DType = iota
	Float16
	BFloat16
	Float8E4M3
	Int64
)

// Size is the bytes of an element.
func (t DType) Size() int { return [...]int{4, 2, 2, 1, 8}[t] }

func (t DType) String() string {
	return [...]string{"float32", "float16", "bfloat16", "float8e4m3", "int64"}[t]
}
