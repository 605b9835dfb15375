package gpu

import (
	"math"

	"github.com/kasmina-go/kasmina/internal/half"
)

// DType is the type of elements in device memory. Kernels receive it as an int.
type DType int32

// The element types: floats ordered by size and range, integers for ids, and codes for moments.
const (
	Float32 DType = iota
	Float16
	BFloat16
	Float8E4M3
	Int64
	Uint8
)

// Size returns the size of an element in bytes.
func (t DType) Size() int { return [...]int{4, 2, 2, 1, 8, 1}[t] }

func (t DType) String() string {
	return [...]string{"float32", "float16", "bfloat16", "float8e4m3", "int64", "uint8"}[t]
}

// Encode stores floats in raw as type t, rounded to nearest, ties to even.
func Encode[F float32 | float64](raw []byte, t DType, x []F) {
	f32, f16, b16 := View[float32](raw), View[half.Float16](raw), View[half.BFloat16](raw)
	switch t {
	case Float32:
		for i, v := range x {
			f32[i] = float32(v)
		}
	case Float16:
		for i, v := range x {
			f16[i] = half.NewFloat16(float64(v))
		}
	case BFloat16:
		for i, v := range x {
			b16[i] = half.NewBFloat16(float32(v))
		}
	case Float8E4M3:
		for i, v := range x {
			raw[i] = half.E4M3(float32(v))
		}
	}
}

// Decode is the inverse of Encode.
func Decode[F float32 | float64](x []F, t DType, raw []byte) {
	if narrow, ok := any(x).([]float32); ok && t == BFloat16 { // logits, which every drawn token waits for
		from := View[uint16](raw)[:len(narrow)]
		for i := range narrow {
			narrow[i] = math.Float32frombits(uint32(from[i]) << 16)
		}
		return
	}

	f32, f16, b16 := View[float32](raw), View[half.Float16](raw), View[half.BFloat16](raw)
	switch t {
	case Float32:
		for i := range x {
			x[i] = F(f32[i])
		}
	case Float16:
		for i := range x {
			x[i] = F(f16[i].Float64())
		}
	case BFloat16:
		for i := range x {
			x[i] = F(b16[i].Float32())
		}
	case Float8E4M3:
		for i := range x {
			x[i] = F(half.FromE4M3(raw[i]))
		}
	}
}
