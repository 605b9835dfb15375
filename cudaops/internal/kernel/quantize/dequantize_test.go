package quantize_test

import (
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
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
