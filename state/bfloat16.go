package state

import "math"

// Figures of the normal tier are kept in bfloat16, the upper half of a float32: its range, 1e-38 to 3e38, with a relative
// spacing of 2⁻⁷. KASMINA's float16 would do for activations near 1, but the variance of a gradient underflows in it at the
// sizes of real models.

// brain rounds v to the nearest bfloat16, ties to even. NaN stays NaN.
func brain(v float64) uint16 {
	bits := math.Float32bits(float32(v))
	if v != v {
		return uint16(bits>>16) | 0x40
	}
	return uint16((bits + 0x7fff + bits>>16&1) >> 16)
}

// unbrain returns the number, exactly.
func unbrain(b uint16) float64 { return float64(math.Float32frombits(uint32(b) << 16)) }
