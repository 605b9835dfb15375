// Package quant stores matrices in fewer bits than float32. It is meant for weights that are never
// updated, such as the base weights of a model being tuned through adapters.
package quant

import (
	"fmt"
	"math"
	"strings"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/enum"
	"github.com/kasmina-go/kasmina/internal/half"
)

// A Format is a way to store the elements of a [Matrix].
type Format uint8

// The formats, with the number of bits per element in a large matrix.
const (
	BFloat16 Format = 1 + iota // 16 bits: the upper half of a float32
	Float8                     // 8 bits: E4M3 with one float32 scale per row
	NF4                        // 4.13 bits: bitsandbytes' NormalFloat with double quantization
)

var formatNames = []string{BFloat16: "bf16", Float8: "float8", NF4: "nf4"}

// ParseFormat returns the format with a given name: bf16, float8 or nf4.
func ParseFormat(name string) (Format, error) {
	for f, s := range formatNames {
		if s == name && s != "" {
			return Format(f), nil
		}
	}
	return 0, fmt.Errorf("%q is not a format of weights, want one of %s", name,
		strings.Join(formatNames[1:], ", "))
}

// String returns the name that [ParseFormat] accepts.
func (f Format) String() string { return enum.Name(f, "Format", formatNames) }

// A Matrix is a matrix in one of the formats. It is immutable and safe for concurrent use.
type Matrix struct {
	Format     Format
	Rows, Cols int

	codes  []byte    // elements in row-major order, little-endian
	scales []float32 // Float8: the scale of each row
	nested nested    // NF4: the scale of each block
}

// New stores a matrix, given as its elements in row-major order. Elements are rounded to the nearest
// number that the format represents:
//
//   - [BFloat16]: ties to even.
//   - [Float8]: half.E4M3(w/scale), where scale is the row's largest magnitude divided by 448, or 1 for a
//     row of zeros.
//   - [NF4]: the code nearest to w divided by the largest magnitude in its block of [BlockNF4]
//     elements. Blocks may extend across the end of a row.
//
// New returns an error if an element is NaN or infinite.
func New(f Format, rows, cols int, w []float32) (*Matrix, error) {
	if len(w) != rows*cols {
		return nil, fmt.Errorf("quant: %d elements for a matrix of %d × %d", len(w), rows, cols)
	}

	b, err := NewBuilder(f, rows, cols)
	if err != nil {
		return nil, err
	}
	if err := b.Set(0, w); err != nil {
		return nil, err
	}
	return b.Matrix(), nil
}

// A Builder stores a matrix part by part, so that the whole matrix is never in memory as float32.
type Builder struct {
	m         *Matrix
	nf4Scales []float32 // NF4: the scale of each block
}

// NewBuilder returns a builder for a matrix of zeros.
func NewBuilder(f Format, rows, cols int) (*Builder, error) {
	if rows < 0 || cols < 0 {
		return nil, fmt.Errorf("quant: a matrix of %d × %d", rows, cols)
	}

	b := &Builder{m: &Matrix{Format: f, Rows: rows, Cols: cols}}
	n := rows * cols
	switch f {
	case BFloat16:
		b.m.codes = make([]byte, 2*n)
	case Float8:
		b.m.codes, b.m.scales = make([]byte, n), make([]float32, rows)
		for i := range b.m.scales {
			b.m.scales[i] = 1
		}
	case NF4:
		b.m.codes = make([]byte, cpu.CeilDiv(n, 2))
		b.nf4Scales = make([]float32, cpu.CeilDiv(n, BlockNF4))
	default:
		return nil, fmt.Errorf("quant: %v is not a format", f)
	}
	return b, nil
}

// Set stores whole rows from the given one on. For [NF4], each part must start at the start of a block,
// and end at the end of a block or of the matrix. Set returns an error if an element is NaN or infinite.
func (b *Builder) Set(row int, w []float32) error {
	m := b.m
	at := row * m.Cols
	switch {
	case m.Cols > 0 && len(w)%m.Cols != 0 || at+len(w) > m.Rows*m.Cols:
		return fmt.Errorf("quant: %d elements from row %d on are not rows of a matrix of %d × %d", len(w), row, m.Rows,
			m.Cols)
	case m.Format == NF4 && (at%BlockNF4 != 0 || len(w)%BlockNF4 != 0 && at+len(w) != m.Rows*m.Cols):
		return fmt.Errorf("quant: %d elements from row %d on of a matrix with rows of %d are not whole blocks of %d",
			len(w), row, m.Cols, BlockNF4)
	}

	for i, v := range w {
		if v-v != 0 {
			return fmt.Errorf("quant: element %d of row %d is %v, want a finite number", i%m.Cols,
				row+i/m.Cols, v)
		}
	}

	switch m.Format {
	case BFloat16:
		encodeBFloat16(m.codes[2*at:], w)
	case Float8:
		m.encodeFloat8(row, w)
	case NF4:
		encodeNF4(m.codes[at/2:], b.nf4Scales[at/BlockNF4:], w)
	}
	return nil
}

// Matrix returns the matrix. The builder must not be used afterwards.
func (b *Builder) Matrix() *Matrix {
	if b.m.Format == NF4 {
		b.m.nested = newNested(b.nf4Scales)
	}
	return b.m
}

// Bytes returns the size of the matrix in memory.
func (m *Matrix) Bytes() int {
	return len(m.codes) + 4*len(m.scales) + len(m.nested.codes) + 4*len(m.nested.scales)
}

// Codes returns the elements' codes in row-major order: little-endian numbers of type bfloat16, E4M3 bytes, or
// two NF4 codes per byte, of which the first is in the upper half. The caller must not change them.
func (m *Matrix) Codes() []byte { return m.codes }

// Scales returns the scale of each row of a [Float8] matrix. The caller must not change them.
func (m *Matrix) Scales() []float32 { return m.scales }

// LargestOfRows returns the largest magnitude in each row of a [Float8] or [NF4] matrix, or an upper bound if the
// row shares a block with another row.
func (m *Matrix) LargestOfRows() []float32 {
	all := make([]float32, m.Rows)
	cpu.Parallel(m.Rows, cpu.Grain(max(1, m.Cols/BlockNF4)), func(lo, hi int) {
		for r := lo; r < hi; r++ {
			if m.Format == Float8 {
				all[r] = half.MaxE4M3 * m.scales[r]
				continue
			}
			for b := r * m.Cols / BlockNF4; b*BlockNF4 < (r+1)*m.Cols; b++ {
				scale := m.nested.scale(b)
				all[r] = max(all[r], scale, -scale)
			}
		}
	})
	return all
}

// Nested returns the scales of the blocks of an [NF4] matrix: the scale of block i is
// Signed8.Values[codes[i]]·scales[i/256] + offset. The caller must not change them.
func (m *Matrix) Nested() (codes []byte, scales []float32, offset float32) {
	return m.nested.codes, m.nested.scales, m.nested.offset
}

// Decode writes rows [from, to) to dst as float32, which represents every stored number exactly except
// for the rounding of the products with a scale.
func (m *Matrix) Decode(dst []float32, from, to int) {
	dst = dst[:(to-from)*m.Cols]
	cpu.Parallel(len(dst), cpu.VectorGrain, func(lo, hi int) {
		at := from*m.Cols + lo
		switch m.Format {
		case BFloat16:
			m.decodeBFloat16(dst[lo:hi], at)
		case Float8:
			m.decodeFloat8(dst[lo:hi], at)
		case NF4:
			m.decodeNF4(dst[lo:hi], at)
		}
	})
}

func encodeBFloat16(codes []byte, w []float32) {
	cpu.Parallel(len(w), cpu.VectorGrain, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			b := half.NewBFloat16(w[i])
			codes[2*i], codes[2*i+1] = byte(b), byte(b>>8)
		}
	})
}

// decodeBFloat16 decodes len(dst) elements, starting with element at.
func (m *Matrix) decodeBFloat16(dst []float32, at int) {
	codes := m.codes[2*at : 2*(at+len(dst))]
	for i := range dst {
		dst[i] = math.Float32frombits(uint32(codes[2*i])<<16 | uint32(codes[2*i+1])<<24)
	}
}

// encodeFloat8 encodes whole rows from row first on.
func (m *Matrix) encodeFloat8(first int, w []float32) {
	if m.Cols == 0 {
		return
	}
	cpu.Parallel(len(w)/m.Cols, cpu.Grain(8*m.Cols), func(lo, hi int) {
		for r := lo; r < hi; r++ {
			row, codes := w[r*m.Cols:][:m.Cols], m.codes[(first+r)*m.Cols:][:m.Cols]
			m.scales[first+r] = encodeFloat8Row(codes, row)
		}
	})
}

// smallestScale is the smallest scale with a finite inverse.
const smallestScale = 0x1p-126

// encodeFloat8Row encodes a row with the same rounding as the GPU kernel and returns its scale.
func encodeFloat8Row(codes []byte, row []float32) (scale float32) {
	largest := largest(row)
	if largest == 0 {
		return 1 // and the codes are 0
	}

	scale = max(largest/half.MaxE4M3, smallestScale)
	inverse := 1 / scale
	for i, v := range row {
		codes[i] = half.E4M3(v * inverse)
	}

	return scale
}

// decodeFloat8 decodes len(dst) elements, starting with element at.
func (m *Matrix) decodeFloat8(dst []float32, at int) {
	for len(dst) > 0 {
		row, col := at/m.Cols, at%m.Cols
		n := min(len(dst), m.Cols-col)
		scale, codes := m.scales[row], m.codes[at:at+n]
		for i, c := range codes {
			dst[i] = half.FromE4M3(c) * scale
		}
		dst, at = dst[n:], at+n
	}
}

// largest returns the largest magnitude in x.
func largest(x []float32) (most float32) {
	for _, v := range x {
		most = max(most, v, -v)
	}
	return most
}
