package quantize_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/internal/quant"
)

// TestWiden compares widened weights with those that the CPU decodes, rounded to each storage type, at odd
// sizes and addresses.
func TestWiden(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, shape := range [][2]int{{1, 1}, {3, 7}, {5, 32}, {31, 100}, {64, 64}, {131, 776}, {300, 1024}} {
		rows, d := shape[0], shape[1]
		w := make([]float32, rows*d)
		for i := range w {
			w[i] = float32(g.Rand.NormFloat64())
		}
		for _, format := range []quant.Format{quant.Float8, quant.NF4} {
			m, err := quant.New(format, rows, d, w)
			g.Must(err)
			want := make([]float32, len(w))
			m.Decode(want, 0, rows)

			codes := uploadBytes(g, m.Codes())
			for _, dt := range kerneltest.StorageTypes {
				for _, skew := range []int{0, 1} {
					y := g.Alloc(len(w), dt, skew)
					if format == quant.Float8 {
						scales, _ := g.Upload(wide(m.Scales()), kerneltest.F32, 0)
						g.Must(g.Launch(g.Stream, quantize.WidenFloat8{Y: y.Ptr, Codes: codes.Ptr, Scales: scales.Ptr,
							Rows: rows, D: d, Type: dt}))
					} else {
						nested, blockScales, offset := m.Nested()
						scales, _ := g.Upload(wide(blockScales), kerneltest.F32, 0)
						table, _ := g.Upload(wide(quant.Signed8.Values[:]), kerneltest.F32, 0)
						g.Must(g.Launch(g.Stream, quantize.WidenNF4{Y: y.Ptr, Codes: codes.Ptr,
							Nested: uploadBytes(g, nested).Ptr, Scales: scales.Ptr, Table: table.Ptr, Offset: offset, N: len(w),
							Type: dt}))
					}

					rounded := make([]byte, len(w)*dt.Size())
					gpu.Encode(rounded, dt, want)
					exact := make([]float32, len(w))
					gpu.Decode(exact, dt, rounded)
					for i, v := range g.Read(y) {
						if float32(v) != exact[i] {
							g.Fatalf("%v as %v, %v, element %d is %v, want %v", format, dt, shape, i, v, exact[i])
						}
					}
				}
			}
		}
	}
}

func wide(x []float32) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}

// uploadBytes uploads bytes.
func uploadBytes(g *kerneltest.Rig, b []byte) *kerneltest.Buffer {
	g.Helper()
	to := g.Alloc(len(b), gpu.Float8E4M3, 0)
	g.Must(g.Ctx.CopyToDevice(to.Ptr, b, g.Stream))
	return to
}

// TestFloat8Weights compares weights that are rounded from one format to float8, in rows and transposed, with those
// that the CPU computes, bit for bit. Two matrices share the rows of the transposed result.
func TestFloat8Weights(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, shape := range [][2]int{{16, 16}, {32, 48}, {128, 128}, {144, 208}, {272, 1024}, {1040, 336}} {
		rows, d := shape[0], shape[1]
		w, factors := make([]float32, rows*d), make([]float32, rows)
		for i := range w {
			w[i] = float32(g.Rand.NormFloat64())
		}
		for r := range factors {
			factors[r] = float32(50 + 100*g.Rand.Float64())
		}

		for _, format := range []quant.Format{quant.Float8, quant.NF4} {
			m, err := quant.New(format, rows, d, w)
			g.Must(err)
			values := make([]float32, len(w)) // for float8, the codes without scales
			m.Decode(values, 0, rows)
			a := quantize.NF4{Codes: uploadBytes(g, m.Codes()).Ptr}
			to, _ := g.Upload(wide(factors), kerneltest.F32, 0)
			if format == quant.NF4 {
				nested, blockScales, offset := m.Nested()
				scales, _ := g.Upload(wide(blockScales), kerneltest.F32, 0)
				table, _ := g.Upload(wide(quant.Signed8.Values[:]), kerneltest.F32, 0)
				a.Nested, a.Scales, a.Table, a.Offset = uploadBytes(g, nested).Ptr, scales.Ptr, table.Ptr, offset
			} else {
				for i, code := range m.Codes() {
					values[i] = half.FromE4M3(code)
				}
			}

			want := make([]byte, len(w))
			for i, v := range values {
				want[i] = half.E4M3(v * factors[i/d])
			}
			if format == quant.NF4 {
				y := g.Alloc(len(w), gpu.Float8E4M3, 0)
				g.Must(g.Launch(g.Stream, quantize.Float8NF4{NF4: a, Y: y.Ptr, Factors: to.Ptr, Rows: rows, D: d}))
				require.Equal(t, want, raw(g, y), "%v %v", format, shape)
			}

			const margin = 32 // columns of y to the left, and a third of them to the right, of the result
			stride := margin + rows + 16
			y := g.Alloc(d*stride, gpu.Float8E4M3, 0)
			g.Must(g.Launch(g.Stream, quantize.Float8Columns{NF4: a, Y: y.Ptr.Offset(margin), Factors: to.Ptr, Rows: rows,
				D: d, Stride: stride}))
			got, untouched := raw(g, y), make([]byte, 16)
			copy(untouched, got[margin+rows:])
			for c := range d {
				row := got[c*stride:][:stride]
				for r := range rows {
					if row[margin+r] != want[r*d+c] {
						g.Fatalf("%v, %v, transposed: row %d, column %d has the code %#x, want %#x", format, shape, r, c,
							row[margin+r], want[r*d+c])
					}
				}
				require.Equal(t, untouched, row[margin+rows:], "%v, %v: written beside the result", format, shape)
			}
		}
	}
}
