package half

import "math"

// MaxE4M3 is the largest number that [E4M3] represents.
const MaxE4M3 = 448

// E4M3 returns the 8-bit floating-point number nearest to v, ties to even: a sign, 4 bits of exponent
// with a bias of 7, and 3 bits of mantissa. Numbers beyond ±[MaxE4M3], including infinities, saturate
// at ±MaxE4M3. In a NaN, all bits except the sign are set.
//
// The format is E4M3 of Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
func E4M3(v float32) byte {
	sign := byte(math.Float32bits(v) >> 24 & 0x80)
	x := math.Abs(float64(v))
	switch {
	case x != x:
		return sign | 0x7f
	case x >= MaxE4M3:
		return sign | 0x7e
	case x == 0:
		return sign
	}

	_, e := math.Frexp(x) // x = f·2^e with f in [0.5, 1)
	e = max(e-1, -6)
	// Count units in the last place. Numbers of 8 units and more are normal.
	steps := int(math.RoundToEven(math.Ldexp(x, 3-e)))
	return sign | byte(steps+(e+6)<<3)
}

// FromE4M3 returns the value of an E4M3 number, exactly.
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
