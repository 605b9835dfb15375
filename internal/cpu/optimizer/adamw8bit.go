package optimizer

import (
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
)

// Block8 is the number of elements that share a scale in a moment of eight bits.
const Block8 = 256

// Codebook is the numbers, in ascending order, that the codes of a moment of eight bits stand for,
// relative to the scale of their block.
type Codebook struct {
	Values [256]float32

	// middles[c] lies halfway between the values of codes c and c+1. Smaller numbers have code c or
	// less, and larger numbers have code c+1 or more.
	middles [255]float32

	// from[sign] has, for the high 16 bits of a number's magnitude, the code of the smallest such
	// number. The search for a code starts there.
	from [2][]uint8
}

// Signed8 and Unsigned8 are the dynamic maps of bitsandbytes, for first and for second moments. There
// are seven decades, each with twice as many values as the decade below; the values divide the decade
// evenly. The values 0 and 1 come in addition. All values equal the ones from create_dynamic_map bit
// for bit. (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022.)
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

// evenly returns n numbers that divide 0.1 to 1 evenly, with the roundings of PyTorch's linspace: it
// counts the first half from below and the second half from above, with fused multiplications.
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

// starts returns the table from for one sign.
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

// Code returns the code of the value nearest to x, which is from −1 to 1. Between two values that are
// equally near it returns the even code.
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

// encode replaces x, a block of a moment, by codes and returns their scale: the largest magnitude in
// the block. A negative number never becomes 0, as in bitsandbytes.
func encode[T cpu.Float](b *Codebook, codes []uint8, x []T) (scale T) {
	for _, v := range x {
		scale = max(scale, v, -v)
	}

	if scale == 0 {
		zero := b.Code(0)
		for i := range codes {
			codes[i] = zero
		}
		return 0
	}

	for i, v := range x {
		c := b.Code(float32(v / scale))
		if v < 0 && b.Values[c] >= 0 {
			c--
		}
		codes[i] = c
	}

	return scale
}

// AdamW8bit is [AdamW] with moments of eight bits. Each block of [Block8] elements of m, encoded by
// [Signed8], and of v, encoded by [Unsigned8], has a scale. The parameter is updated by the new
// moments before they are rounded to codes, as in bitsandbytes.
//
// If v of an element is too small, relative to the largest v in its block, to have a code, then v
// becomes 0 although m may not. Without a gradient, m/ε would then be an arbitrarily large step, so
// such an m counts as 0.
func AdamW8bit[T cpu.Float](p, g []T, m, v []uint8, mScale, vScale []T, s AdamWStep) {
	cpu.Spread(len(p), cpu.VectorGrain, adamW8bit[T]{p, g, m, v, mScale, vScale, adamWRule[T](s)})
}

type adamW8bit[T cpu.Float] struct {
	p, g           []T
	m, v           []uint8
	mScale, vScale []T
	rule           vec.AdamW[T]
}

func (s *adamW8bit[T]) Span(lo, hi int) {
	var mRoom, vRoom [Block8]T
	for ; lo < hi; lo += Block8 {
		end, block := min(lo+Block8, hi), lo/Block8
		g, mCodes, vCodes := s.g[lo:end], s.m[lo:end], s.v[lo:end]
		m, v := mRoom[:len(g)], vRoom[:len(g)]
		mScale, vScale := s.mScale[block], s.vScale[block]

		for i := range g {
			m[i] = T(Signed8.Values[mCodes[i]]) * mScale
			v[i] = T(Unsigned8.Values[vCodes[i]]) * vScale
			if v[i] == 0 && g[i] == 0 {
				m[i] = 0
			}
		}
		s.rule.Step(s.p[lo:end], g, m, v)

		s.mScale[block] = encode(Signed8, mCodes, m)
		s.vScale[block] = encode(Unsigned8, vCodes, v)
	}
}
