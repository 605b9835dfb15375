package gguf

import (
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/llm"
)

// source is a tensor that is converted while being written.
type source struct {
	name  string
	shape []int
	dtype Type
	row   func(i int) []float32 // returns row i of a matrix; row 0 is the whole of a vector
}

func (s source) rows() (n, width int) {
	if len(s.shape) == 1 {
		return 1, s.shape[0]
	}
	return s.shape[0], s.shape[1]
}

// size returns the number of bytes of the tensor's data.
func (s source) size() int64 {
	n, width := s.rows()
	elements := int64(n) * int64(width)
	switch s.dtype {
	case F32:
		return 4 * elements
	case Q80:
		return elements / blockSize * (blockSize + 2)
	}
	return 2 * elements
}

func (s source) write(w io.Writer) error {
	n, _ := s.rows()
	var b []byte
	for i := range n {
		b = b[:0]
		row := s.row(i)
		for j, x := range row {
			if math.Float32bits(x)&0x7f800000 == 0x7f800000 {
				return fmt.Errorf("%w: row %d, column %d is %v", llm.ErrDiverged, i, j, x)
			}
		}
		switch s.dtype {
		case F32:
			for _, x := range row {
				b = binary.LittleEndian.AppendUint32(b, math.Float32bits(x))
			}
		case F16, BF16:
			for j, x := range row {
				v, fits := half.Narrow(x, s.dtype == BF16)
				if !fits {
					return fmt.Errorf("row %d, column %d is %v, which %v cannot hold: ask for "+
						"another type", i, j, x, s.dtype)
				}
				b = binary.LittleEndian.AppendUint16(b, v)
			}
		case Q80:
			var fits bool
			if b, fits = appendQ80(b, row); !fits {
				return fmt.Errorf("row %d has numbers that q8_0 cannot hold: ask for another type", i)
			}
		}
		if _, err := w.Write(b); err != nil {
			return err
		}
	}

	return nil
}

const blockSize = 32 // elements that share a scale in q8_0

// appendQ80 quantizes a row in blocks. Each block stores whole multiples of a scale, such that the
// element of largest magnitude becomes ±127. It reports whether the scales fit in float16.
func appendQ80(b []byte, row []float32) (_ []byte, fits bool) {
	for ; len(row) > 0; row = row[blockSize:] {
		largest := float32(0)
		for _, x := range row[:blockSize] {
			largest = max(largest, max(x, -x))
		}
		scale, inverse := largest/127, float32(0)
		v, fits := half.Narrow(scale, false)
		if !fits {
			return b, false
		}
		if scale > 0 {
			inverse = 1 / scale
		}
		if math.IsInf(float64(inverse), 0) { // every element of the block is nearly zero
			inverse = 0
		}
		b = binary.LittleEndian.AppendUint16(b, v)
		for _, x := range row[:blockSize] {
			b = append(b, byte(int8(math.Round(float64(x*inverse)))))
		}
	}

	return b, true
}

// tensorsOf returns the tensors of a model in llama.cpp's layout.
func tensorsOf(m *llm.Model, a architecture, t Type) ([]source, error) {
	all, params, err := a.layoutOf(m.Config, t)
	if err != nil {
		return nil, err
	}

	for i, names := range params {
		if len(names) == 0 {
			continue
		}
		values, err := joined(m, names)
		if err != nil {
			return nil, err
		}
		_, width := all[i].rows()
		all[i].row = func(i int) []float32 { return values[i*width:][:width] }

		rotated := strings.Contains(names[0], "q_proj") || strings.Contains(names[0], "k_proj")
		if a.interleaved && rotated {
			all[i] = interleaved(all[i], m.Config.HeadDim)
		}
	}

	return all, nil
}

// layoutOf returns the tensors of a configuration, without their values, and for each tensor the
// names of its parameters. Tensors derived from the configuration have no parameters.
func (a architecture) layoutOf(c llm.Config, t Type) (all []source, params [][]string, err error) {
	if s := c.Scaling; s.HighFreq != 0 {
		factors := rotaryFactors(c)
		all = append(all, source{"rope_freqs.weight", []int{len(factors)}, F32,
			func(int) []float32 { return factors }})
		params = append(params, nil)
	}

	shapes := map[string][]int{}
	for name, shape := range c.Parameters() {
		shapes[name] = shape
	}

	for name := range c.Parameters() {
		if strings.Contains(name, ".kasmina.") {
			continue
		}
		parts := a.together(name)
		if len(parts) == 0 {
			continue
		}
		to, err := a.nameOf(name)
		if err != nil {
			return nil, nil, err
		}

		s := source{name: to, shape: slices.Clone(shapes[name]), dtype: t}
		for _, p := range parts[1:] {
			s.shape[0] += shapes[p][0]
		}
		_, width := s.rows()
		if len(s.shape) == 1 || name == positions {
			s.dtype = F32
		} else if t == Q80 && width%blockSize != 0 {
			return nil, nil, fmt.Errorf("tensor %s has rows of %d numbers, and q8_0 takes multiples "+
				"of %d: ask for f16", name, width, blockSize)
		}
		all, params = append(all, s), append(params, parts)
		if name == embedding && a.ownOutput && !c.Untied {
			s.name = output
			all, params = append(all, s), append(params, parts)
		}
	}

	return all, params, nil
}

// joined concatenates the values of parameters.
func joined(m *llm.Model, names []string) (values []float32, err error) {
	for i, name := range names {
		p := m.Param(name)
		part, ok := p.Data().([]float32)
		if !ok {
			return nil, fmt.Errorf("tensor %s is of %v, want float32", name, p.Dtype())
		}
		if i == 0 {
			values = slices.Clip(part) // the clipped slice aliases the model's memory, so append copies it
		} else {
			values = append(values, part...)
		}
	}

	return values, nil
}

// interleaved reorders the rows of each head such that features rotated together by RoPE are neighbors,
// as llama.cpp expects for Llama. The tensor is a matrix with one row per feature, or a bias.
func interleaved(s source, headDim int) source {
	at := func(i int) int {
		head, within := i/headDim, i%headDim
		return head*headDim + within%2*headDim/2 + within/2
	}
	row := s.row
	if len(s.shape) > 1 {
		s.row = func(i int) []float32 { return row(at(i)) }
		return s
	}

	s.row = func(int) []float32 {
		values := make([]float32, s.shape[0])
		for i := range values {
			values[i] = row(0)[at(i)]
		}
		return values
	}

	return s
}

// rotaryFactors returns Llama 3.1's scaling factor for each pair of features.
func rotaryFactors(c llm.Config) []float32 {
	s, factors := c.Scaling, make([]float32, c.HeadDim/2)
	for i := range factors {
		turns := float64(s.Original) * math.Pow(c.Base,
			-2*float64(i)/float64(c.HeadDim)) / (2 * math.Pi)
		smooth := min(1, max(0, (turns-s.LowFreq)/(s.HighFreq-s.LowFreq)))
		factors[i] = float32(1 / ((1-smooth)/s.Factor + smooth))
	}
	return factors
}
