// Package half implements 16-bit floating-point numbers.
package half

import "math"

// Float16 is an IEEE 754 half-precision number: 1 sign bit, 5 exponent bits, 10 fraction bits. It
// represents integers up to 2048 exactly, has a relative spacing of 2⁻¹⁰, and rounds numbers from
// 65520 on to ±Inf.
type Float16 uint16

// NewFloat16 rounds v to the nearest Float16, ties to even, in one step from float64. NaN stays
// NaN.
func NewFloat16(v float64) Float16 {
	sign := Float16(math.Float64bits(v) >> 63 << 15)
	v = math.Abs(v)
	switch {
	case v != v:
		return sign | 0x7e00
	case v >= 65520: // halfway from the largest finite number, 65504, to the next number that would follow
		return sign | 0x7c00
	case v < 0x1p-14: // subnormal: a multiple of 2⁻²⁴; the smallest normal number is 1024 times that
		return sign | Float16(math.RoundToEven(v*0x1p24))
	}

	_, exp := math.Frexp(v) // v in [2^(exp−1), 2^exp)

	// The significand in units of its last place, 1024 … 2048. Its leading bit, and the carry if it
	// is 2048, add one to the exponent field.
	significand := Float16(math.RoundToEven(math.Ldexp(v, 11-exp)))
	return sign | (Float16(exp+13)<<10 + significand)
}

// Float64 returns the number, exactly.
func (h Float16) Float64() float64 {
	exp, fraction := int(h>>10&0x1f), float64(h&0x3ff)
	var v float64
	switch exp {
	case 0:
		v = fraction * 0x1p-24
	case 0x1f:
		v = math.Inf(1)
		if fraction != 0 {
			v = math.NaN()
		}
	default:
		v = math.Ldexp(1024+fraction, exp-25)
	}

	if h>>15 != 0 {
		v = -v
	}

	return v
}

// Narrow returns the bits of the BFloat16 or Float16 nearest to a finite number, and whether the
// result is finite too.
func Narrow(x float32, bfloat bool) (bits uint16, fits bool) {
	if bfloat {
		b := NewBFloat16(x)
		return uint16(b), b&0x7f80 != 0x7f80
	}
	h := NewFloat16(float64(x))
	return uint16(h), h&0x7c00 != 0x7c00
}
