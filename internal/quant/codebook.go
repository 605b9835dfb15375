package quant

import (
	"math"
	"slices"
)

// A Codebook is the table of the 256 numbers that 8-bit codes represent, in ascending order between −1 and 1. A block
// of numbers is divided by its largest magnitude before it is encoded.
type Codebook struct {
	Values [256]float32

	// middles[c] lies halfway between Values[c] and Values[c+1].
	middles [255]float32

	// from[sign] maps the high 16 bits of a magnitude to the smallest code among the numbers with these bits, where
	// the search for a code starts. sign is 1 for negative numbers.
	from [2][]uint8
}

// Signed8 and Unsigned8 are the dynamic maps of bitsandbytes for signed and non-negative numbers.
// They cover seven decades, each with twice as many evenly spaced values as the next smaller one, and
// also include 0 and 1.
//
// Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022. The function create_dynamic_map
// of bitsandbytes returns the same values, bit for bit.
var (
	Signed8   = newCodebook(true)
	Unsigned8 = newCodebook(false)
)

func newCodebook(signed bool) *Codebook {
	values := []float32{0, 1}
	for decade := range 7 {
		n := 2 << decade
		if signed {
			n = 1 << decade
		}

		top := float32(math.Pow(10, float64(decade-6)))
		bounds := evenly(n + 1)
		for i := range n {
			v := top * ((bounds[i] + bounds[i+1]) / 2)
			values = append(values, v)
			if signed {
				values = append(values, -v)
			}
		}
	}

	slices.Sort(values)

	b := &Codebook{Values: [256]float32(values)}
	for c := range b.middles {
		b.middles[c] = (b.Values[c] + b.Values[c+1]) * 0.5
	}

	for sign := range b.from {
		b.from[sign] = b.starts(sign == 1)
	}

	return b
}

// evenly returns n evenly spaced numbers from 0.1 to 1, rounded as by PyTorch's linspace. PyTorch
// computes the first half upward from the start and the second half downward from the end, with fused
// multiplications.
func evenly(n int) []float32 {
	bounds := make([]float32, n)
	low, high := float64(float32(0.1)), 1.0
	step := float64((float32(high) - float32(low)) / float32(n-1))
	for i := range bounds {
		if i < n/2 {
			bounds[i] = float32(low + step*float64(i))
		} else {
			bounds[i] = float32(high - step*float64(n-1-i))
		}
	}

	return bounds
}

// starts returns from[1] if negative, else from[0].
func (b *Codebook) starts(negative bool) []uint8 {
	const last = 0x3f80 // the high bits of 1
	from := make([]uint8, last+1)
	for high := range from {
		smallest := math.Float32frombits(uint32(high) << 16)
		if negative {
			smallest = -math.Float32frombits(uint32(high)<<16 | 0xffff)
		}
		at, _ := slices.BinarySearch(b.middles[:], smallest)
		from[high] = uint8(at)
	}

	return from
}

// Code returns the code of the value nearest to x, which is from −1 to 1. If two values are equally
// near, it returns the even code.
func (b *Codebook) Code(x float32) uint8 {
	bits := math.Float32bits(x)
	c := int(b.from[bits>>31][bits>>16&0x7fff])
	for c < len(b.middles) && x > b.middles[c] {
		c++
	}
	if c < len(b.middles) && x == b.middles[c] {
		c += c & 1
	}
	return uint8(c)
}
