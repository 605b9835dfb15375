package quant

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// TestMatrix compares the elements of random matrices of odd sizes with the definitions of the
// formats, evaluated element by element in float64, and checks that decoding any range of rows gives
// the same elements.
func TestMatrix(t *testing.T) {
	r := randtest.New(t)
	for _, f := range []Format{BFloat16, Float8, NF4} {
		for _, shape := range [][2]int{{0, 0}, {3, 0}, {1, 1}, {1, 63}, {5, 13}, {64, 64}, {7, 65}, {61, 130}} {
			rows, cols := shape[0], shape[1]
			w := make([]float32, rows*cols)
			for i := range w {
				w[i] = float32(r.NormFloat64() * math.Exp2(-8*r.Float64()))
			}
			if rows > 2 {
				clear(w[cols : 2*cols])
			}

			m, err := New(f, rows, cols, w)
			require.NoError(t, err)
			got := make([]float32, len(w)+1)
			got[len(w)] = 7
			m.Decode(got, 0, rows)
			require.EqualValues(t, 7, got[len(w)], "written after the end")
			for i, v := range w {
				want := nearestValue(m, w, i)
				require.InDelta(t, want, got[i], 1e-6*math.Abs(want), "%v, %v, element %d (%v)", f, shape, i, v)
			}

			for range 5 {
				if rows == 0 {
					break
				}
				from := r.IntN(rows)
				to := from + r.IntN(rows-from+1)
				part := make([]float32, (to-from)*cols)
				m.Decode(part, from, to)
				require.Equal(t, got[from*cols:to*cols], part)
			}
		}
	}
}

// nearestValue returns the stored value of element i of w, found by trying all numbers of the format.
func nearestValue(m *Matrix, w []float32, i int) float64 {
	v := float64(w[i])
	var values []float64
	switch m.Format {
	case BFloat16:
		return float64(half.NewBFloat16(w[i]).Float32())
	case Float8:
		row := w[i/m.Cols*m.Cols:][:m.Cols]
		scale := float64(largest(row)) / half.MaxE4M3
		for b := range 256 {
			values = append(values, scale*float64(half.FromE4M3(byte(b))))
		}
	case NF4:
		block := i / BlockNF4
		exact := float64(largest(w[block*BlockNF4 : min(len(w), (block+1)*BlockNF4)]))
		best := nf4[7] // 0, which a block of zeros keeps
		for _, q := range nf4 {
			if math.Abs(float64(q)*exact-v) < math.Abs(float64(best)*exact-v) {
				best = q
			}
		}
		return float64(best) * float64(m.nested.scale(block))
	}

	best := math.Inf(1)
	for _, q := range values {
		if math.Abs(q-v) < math.Abs(best-v) {
			best = q
		}
	}
	return best
}

// TestSize checks the memory taken by a large matrix.
func TestSize(t *testing.T) {
	const rows, cols = 128, 4096
	for f, bits := range map[Format]float64{BFloat16: 16, Float8: 8 + 32./cols, NF4: 4 + 8./64 + 32./(64*256)} {
		m, err := New(f, rows, cols, make([]float32, rows*cols))
		require.NoError(t, err)
		require.EqualValues(t, bits*rows*cols/8, m.Bytes(), f)
	}
}

// TestRefuses checks what New and ParseFormat reject.
func TestRefuses(t *testing.T) {
	for _, v := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		w := make([]float32, 6)
		w[4] = float32(v)
		_, err := New(NF4, 2, 3, w)
		require.ErrorContains(t, err, "element 1 of row 1 is")
	}
	_, err := New(NF4, 2, 3, make([]float32, 5))
	require.ErrorContains(t, err, "5 elements for a matrix of 2 × 3")
	_, err = New(0, 0, 0, nil)
	require.ErrorContains(t, err, "Format(0) is not a format")

	for _, f := range []Format{BFloat16, Float8, NF4} {
		got, err := ParseFormat(f.String())
		require.NoError(t, err)
		require.Equal(t, f, got)
	}
	_, err = ParseFormat("int4")
	require.EqualError(t, err, `"int4" is not a format of weights, want one of bf16, float8, nf4`)
}

// TestNF4 compares codes, scales and decoded elements with the results of bitsandbytes, bit for bit.
// The second level of scales may differ slightly, because the CPU code of bitsandbytes looks up codes
// in a table of 65536 intervals, which may yield the second nearest one, and PyTorch's mean adds the
// scales in a different order.
func TestNF4(t *testing.T) {
	var cases []struct {
		Name                           string
		Rows, Cols                     int
		Weights, Codes, Scales, Offset []byte
		NestedCodes                    []byte `json:"nested_codes"`
		NestedScales                   []byte `json:"nested_scales"`
		Decoded                        []byte
	}
	raw, err := os.ReadFile("testdata/nf4.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(raw, &cases))
	for _, c := range cases {
		w := float32s(c.Weights)
		m, err := New(NF4, c.Rows, c.Cols, w)
		require.NoError(t, err)
		require.Equal(t, c.Codes, m.codes, c.Name)

		scales := make([]float32, len(w)/BlockNF4)
		for b := range scales {
			scales[b] = largest(w[b*BlockNF4:][:BlockNF4])
		}
		require.Equal(t, float32s(c.Scales), scales, c.Name)

		theirs := nested{c.NestedCodes, float32s(c.NestedScales), float32s(c.Offset)[0]}
		require.InEpsilon(t, theirs.offset, m.nested.offset, 1e-7, c.Name)
		require.InEpsilonSlice(t, theirs.scales, m.nested.scales, 1e-6, c.Name)
		differ := 0
		for i, code := range theirs.codes {
			if code != m.nested.codes[i] {
				differ++
				require.InDelta(t, code, m.nested.codes[i], 1, c.Name)
			}
		}
		require.LessOrEqual(t, differ, 1+len(theirs.codes)/100, c.Name)

		m.nested = theirs
		got := make([]float32, len(w))
		m.Decode(got, 0, c.Rows)
		require.Equal(t, float32s(c.Decoded), got, c.Name)
	}
}

func float32s(raw []byte) []float32 {
	x := make([]float32, len(raw)/4)
	for i := range x {
		x[i] = math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:]))
	}
	return x
}

// TestBuilder checks that a matrix stored in parts equals one stored at once, and that Set rejects
// invalid parts.
func TestBuilder(t *testing.T) {
	r := randtest.New(t)
	const rows, cols = 96, 10
	w := make([]float32, rows*cols)
	for i := range w {
		w[i] = float32(r.NormFloat64())
	}

	for _, f := range []Format{BFloat16, Float8, NF4} {
		whole, err := New(f, rows, cols, w)
		require.NoError(t, err)
		b, err := NewBuilder(f, rows, cols)
		require.NoError(t, err)
		for _, part := range [][2]int{{32, 64}, {0, 32}, {64, 96}} {
			require.NoError(t, b.Set(part[0], w[part[0]*cols:part[1]*cols]))
		}
		require.NoError(t, b.Set(0, w[:32*cols]), "a part may be set again")
		require.Equal(t, whole, b.Matrix(), f)
	}

	b, err := NewBuilder(NF4, rows, cols)
	require.NoError(t, err)
	require.ErrorContains(t, b.Set(1, w[:32*cols]), "are not whole blocks of 64")
	require.ErrorContains(t, b.Set(0, w[:cols]), "are not whole blocks of 64")
	require.ErrorContains(t, b.Set(65, w[:32*cols]), "are not rows of a matrix of 96 × 10")
	_, err = NewBuilder(Float8, -1, 2)
	require.ErrorContains(t, err, "a matrix of -1 × 2")
}
