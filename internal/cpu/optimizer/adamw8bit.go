package optimizer

import (
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
	"github.com/kasmina-go/kasmina/internal/quant"
)

// Block8 is the number of elements that share a scale in an 8-bit moment.
const Block8 = 256

// encode replaces x, a block of a moment, by codes and returns their scale: the largest magnitude in
// the block. A negative number never becomes 0, as in bitsandbytes.
func encode[T cpu.Float](b *quant.Codebook, codes []uint8, x []T) (scale T) {
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

// AdamW8bit is [AdamW] with 8-bit moments. Each block of [Block8] elements of m, encoded by
// [quant.Signed8], and of v, encoded by [quant.Unsigned8], has a scale. The parameter is updated by
// the new moments before they are rounded to codes, as in bitsandbytes.
//
// If an element's v is too small to be represented relative to the largest v in its block, it becomes
// 0 although m may not. Without a gradient, m/ε would then be an arbitrarily large step, so such an m
// counts as 0.
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
			m[i] = T(quant.Signed8.Values[mCodes[i]]) * mScale
			v[i] = T(quant.Unsigned8.Values[vCodes[i]]) * vScale
			if v[i] == 0 && g[i] == 0 {
				m[i] = 0
			}
		}
		s.rule.Step(s.p[lo:end], g, m, v)

		s.mScale[block] = encode(quant.Signed8, mCodes, m)
		s.vScale[block] = encode(quant.Unsigned8, vCodes, v)
	}
}
