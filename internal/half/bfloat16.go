package half

import "math"

// BFloat16 is the upper half of a float32. It covers the range of float32, 1e-38 to 3e38, with a
// relative spacing of 2⁻⁷.
type BFloat16 uint16

// NewBFloat16 rounds v to the nearest BFloat16, ties to even. NaN stays NaN.
func NewBFloat16(v float32) BFloat16 {
	bits := math.Float32bits(v)
	if v != v {
		return BFloat16(bits>>16) | 0x40
	}
	return BFloat16((bits + 0x7fff + bits>>16&1) >> 16)
}

// Float32 returns the number, exactly.
func (b BFloat16) Float32() float32 { return math.Float32frombits(uint32(b) << 16) }
