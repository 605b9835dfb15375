package quant

import (
	"slices"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

const (
	// BlockNF4 is the number of consecutive elements that share a scale in [NF4].
	BlockNF4 = 64

	// blockNested is the number of consecutive scales that share a scale of their own.
	blockNested = 256
)

// nf4 holds the numbers that the codes represent. They are quantiles of the normal distribution,
// scaled to [−1, 1] and with an exact zero.
//
// Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, appendix E.
var nf4 = [16]float32{-1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
	-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0, 0.07958029955625534,
	0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434,
	0.5626170039176941, 0.7229568362236023, 1}

// ValueNF4 returns the number that a code from 0 to 15 represents, relative to its block's scale.
func ValueNF4(code byte) float32 { return nf4[code] }

// nf4Middles[c] lies halfway between nf4[c] and nf4[c+1].
var nf4Middles = func() (middles [15]float32) {
	for c := range middles {
		middles[c] = (nf4[c] + nf4[c+1]) / 2
	}
	return middles
}()

// nested holds the block scales as 8-bit codes with scales of their own ("double quantization"). A
// scale is offset + Signed8.Values[code] · nested scale.
type nested struct {
	codes  []byte
	scales []float32
	offset float32 // mean of the scales
}

// encodeNF4 writes the codes of consecutive blocks and their scales.
func encodeNF4(codes []byte, scales, w []float32) {
	blocks := cpu.CeilDiv(len(w), BlockNF4)
	cpu.Parallel(blocks, cpu.Grain(8*BlockNF4), func(lo, hi int) {
		for b := lo; b < hi; b++ {
			x := w[b*BlockNF4 : min((b+1)*BlockNF4, len(w))]
			scales[b] = largest(x)
			encodeBlockNF4(codes[b*BlockNF4/2:], x, scales[b])
		}
	})
}

// encodeBlockNF4 writes the codes of a block, two to a byte, the first one in the upper half.
//
// A block of zeros has the code of zero, so that it stays zero whatever its scale is rounded to. (The
// CUDA kernel of bitsandbytes writes the code of −1 there.)
func encodeBlockNF4(codes []byte, x []float32, scale float32) {
	inverse := 1 / max(scale, 1e-38)
	clear(codes[:cpu.CeilDiv(len(x), 2)])
	for i, v := range x {
		code := byte(0)
		for code < 15 && v*inverse > nf4Middles[code] {
			code++
		}
		codes[i/2] |= code << (4 - i%2*4)
	}
}

// newNested encodes the scales of all blocks, as bitsandbytes does on a GPU.
func newNested(scales []float32) nested {
	if len(scales) == 0 {
		return nested{}
	}

	sum := 0.0
	for _, s := range scales {
		sum += float64(s)
	}
	n := nested{codes: make([]byte, len(scales)), offset: float32(sum / float64(len(scales)))}

	for block := range slices.Chunk(scales, blockNested) {
		rest := make([]float32, len(block))
		for i, s := range block {
			rest[i] = s - n.offset
		}

		at := len(n.scales) * blockNested
		scale := largest(rest)
		n.scales = append(n.scales, scale)
		inverse := float32(0) // if all scales are equal, every code represents 0
		if scale > 0 {
			inverse = 1 / max(scale, smallestScale)
		}
		for i, v := range rest {
			n.codes[at+i] = Signed8.Code(v * inverse)
		}
	}

	return n
}

// scale returns the scale of a block.
func (n *nested) scale(block int) float32 {
	// The conversion keeps a processor from fusing the product and the sum.
	return float32(Signed8.Values[n.codes[block]]*n.scales[block/blockNested]) + n.offset
}

// decodeNF4 decodes len(dst) elements, starting with element at.
func (m *Matrix) decodeNF4(dst []float32, at int) {
	for len(dst) > 0 {
		n := min(len(dst), BlockNF4-at%BlockNF4)
		scale := m.nested.scale(at / BlockNF4)
		values := nf4
		for c := range values {
			values[c] *= scale
		}

		for i := range dst[:n] {
			e := at + i
			dst[i] = values[m.codes[e/2]>>(4-e%2*4)&15]
		}
		dst, at = dst[n:], at+n
	}
}
