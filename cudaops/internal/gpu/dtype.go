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

// Float8Max is the largest value of Float8E4M3.
const Float8Max = 448

// E4M3 rounds v to the nearest Float8E4M3, ties to even. Larger magnitudes saturate at Float8Max.
//
// The format has 1 sign bit, 4 exponent bits with a bias of 7, and 3 mantissa bits. It has no infinity;
// NaN has all bits set except possibly the sign.
func E4M3(v float32) byte {
	sign := byte(math.Float32bits(v) >> 24 & 0x80)
	x := math.Abs(float64(v))
	switch {
	case x != x:
		return sign | 0x7f
	case x >= Float8Max:
		return sign | 0x7e
	case x == 0:
		return sign
	}

	_, e := math.Frexp(x) // x = f·2^e with f in [0.5, 1)
	e = max(e-1, -6)
	// in units in the last place; normal numbers start at 8
	steps := int(math.RoundToEven(math.Ldexp(x, 3-e)))
	return sign | byte(steps+(e+6)<<3)
}

// FromE4M3 returns the value of a Float8E4M3.
func FromE4M3(b byte) float32 { return e4m3Values[b] }

var e4m3Values = func() (values [256]float32) {
	for b := range values {
		exponent, mantissa := b>>3&15, float64(b&7)
		v := math.Ldexp(mantissa, -9)
		switch {
		case b&0x7f == 0x7f:
			v = math.NaN()
		case exponent > 0:
			v = math.Ldexp(8+mantissa, exponent-10)
		}
		values[b] = float32(math.Copysign(v, float64(127-b)))
	}
	return values
}()

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
			raw[i] = E4M3(float32(v))
		}
	}
}

// Decode is the inverse of Encode.
func Decode[F float32 | float64](x []F, t DType, raw []byte) {
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
			x[i] = F(FromE4M3(raw[i]))
		}
	}
}
