package decode

import (
	"fmt"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	"github.com/kasmina-go/kasmina/internal/quant"
)

// TestPackedProducts compares products with up to three matrices of float8 or NF4 weights to products with the decoded
// weights in float64. It also checks gated products, products that normalize their row, and added matrices, and that two
// runs are bit-identical.
func TestPackedProducts(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, c := range []struct {
		rows, depth int
		parts       []int
	}{
		{1, 64, []int{5}}, {1, 2048, []int{100, 100}}, {3, 192, []int{16, 8, 40}}, {1, 4160, []int{33, 7, 9}},
		{8, 768, []int{24, 24}}, {9, 1024, []int{50}}, {17, 128, []int{70, 70}}, {32, 2048, []int{256, 64, 64}},
		{64, 576, []int{90, 90}}, {1, 512, []int{9000}}, {1, 4096, []int{33, 7, 9}}, {1, 256, []int{1, 1, 1}},
		{1, 2304, []int{1100, 1100}}, {1, 14336, []int{500}}, {1, 1088, []int{40, 40}},
	} {
		for _, format := range []quant.Format{quant.Float8, quant.NF4} {
			for _, dt := range []gpu.DType{kerneltest.Bf16, kerneltest.F16} {
				g.Scope(fmt.Sprintf("%+v/%v/%v", c, format, dt), func(g *kerneltest.Rig) {
					packedProducts(g, c.rows, c.depth, c.parts, format, dt, i)
				})
			}
		}
	}
}

func packedProducts(g *kerneltest.Rig, rows, depth int, parts []int, format quant.Format, dt gpu.DType, i int) {
	p := PackedProduct{Rows: rows, D: depth, NF4: format == quant.NF4, Type: dt}
	p.Steady, p.Early = i%2 == 0, i%3 == 0
	var w []float32
	for k, n := range parts {
		numbers := make([]float32, n*depth)
		for j, v := range scaled(g.Rand, len(numbers), depth) {
			numbers[j] = float32(v) * float32(k+1)
		}
		m, err := quant.New(format, n, depth, numbers)
		g.Must(err)
		p.Parts[k] = Packed{Codes: uploadBytes(g, m.Codes()), Rows: n}
		scales := m.Scales()
		if p.NF4 {
			var nested []byte
			nested, scales, p.Parts[k].Offset = m.Nested()
			p.Parts[k].Nested = uploadBytes(g, nested)
			table, _ := g.Upload(wide(quant.Signed8.Values[:]), kerneltest.F32, 0)
			p.Table = table.Ptr
		}
		s, _ := g.Upload(wide(scales), kerneltest.F32, 0)
		p.Parts[k].Scales = s.Ptr
		decoded := make([]float32, len(numbers))
		m.Decode(decoded, 0, n)
		w = append(w, decoded...)
		p.Columns += n
	}

	x, xr := g.Normal(rows*depth, dt, 0)
	add, ar := g.Normal(rows*p.Columns, dt, 1)
	want := product(xr, wide(w), rows, p.Columns, depth)

	y := g.Alloc(rows*p.Columns, dt, i%2)
	p.Y, p.X = y.Ptr, x.Ptr
	g.Must(g.Launch(g.Stream, p))
	g.Near("y", y, want, 2*kerneltest.Forward(dt))
	once := g.Read(y)
	g.Must(g.Launch(g.Stream, p))
	if kerneltest.Distance(g.Read(y), once) != 0 {
		g.Error("two runs give different bits")
	}

	p.C = add.Ptr
	g.Must(g.Launch(g.Stream, p))
	for j := range ar {
		ar[j] += want[j]
	}
	g.Near("y + c", y, ar, 2*kerneltest.Forward(dt))

	gate := func(want []float64) {
		if len(parts) == 2 && parts[0] == parts[1] {
			p.C = 0
			gatedPacked(g, p, want, dt)
		}
	}
	gate(want)

	factors, fr := g.Normal(depth, kerneltest.F32, 0)
	p.C, p.Norm = 0, Norm{W: factors.Ptr, Eps: 1e-3}
	if !p.Streams(g.Info) {
		return
	}
	normed := make([]float64, depth)
	layer.RMSNorm(normed, make([]float64, 1), xr, fr, p.Norm.Eps)
	want = product(normed, wide(w), 1, p.Columns, depth)
	g.Must(g.Launch(g.Stream, p))
	g.Near("normed", y, want, 2*kerneltest.Forward(dt))
	gate(want)
}

// gatedPacked checks p with gates. Its two matrices have the same size, and want are its results without a gate.
func gatedPacked(g *kerneltest.Rig, p PackedProduct, want []float64, dt gpu.DType) {
	f := p.Columns / 2
	for _, gate := range []Gate{GateSiLU, GateGELU} {
		mul := layer.SiLUMul[float64]
		if gate == GateGELU {
			mul = layer.GELUMul[float64]
		}
		gated := gatedRows(want, p.Rows, 2*f, mul)
		h := g.Alloc(p.Rows*f, dt, 0)
		p.Y, p.Columns, p.Gate = h.Ptr, f, gate
		g.Must(g.Launch(g.Stream, p))
		g.Near(fmt.Sprintf("gate %v, normed %t", gate, p.Norm.W != 0), h, gated, 4*kerneltest.Forward(dt))
	}
}

func wide(x []float32) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}

// uploadBytes uploads bytes and returns their address.
func uploadBytes(g *kerneltest.Rig, b []byte) gpu.Ptr {
	g.Helper()
	to := g.Alloc(len(b), gpu.Float8E4M3, 0)
	g.Must(g.Ctx.CopyToDevice(to.Ptr, b, g.Stream))
	return to.Ptr
}
