package gemm

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	cpugemm "github.com/kasmina-go/kasmina/internal/cpu/gemm"
)

// matrix8 uploads a random float8 matrix [rows, d] and a factor for each row, between 2⁻⁸/√d and 2⁸/√d.
// values is the matrix with each row multiplied by its factor.
func matrix8(g *kerneltest.Rig, rows, d int) (x, scale gpu.Ptr, values []float64) {
	g.Helper()
	of, codes := g.Normal(rows*d, gpu.Float8E4M3, 0)
	factors := make([]float64, rows)
	for i := range factors {
		factors[i] = math.Exp2(16*g.Rand.Float64()-8) / math.Sqrt(float64(d))
	}

	b, factors := g.Upload(factors, kerneltest.F32, 0)
	for i, v := range codes {
		values = append(values, v*factors[i/d])
	}

	return of.Ptr, b.Ptr, values
}

// TestProductFloat8 compares products of float8 matrices with float64 references, row by row, because the
// magnitudes of the rows differ.
func TestProductFloat8(t *testing.T) {
	g := newHopperRig(t)
	for _, s := range []Product{{Rows: 1, Columns: 16, D: 400},
		{Rows: 5, Columns: 272, D: 528}, {Rows: 130, Columns: 1008, D: 512},
		// the last case has several tiles per block
		{Rows: 257, Columns: 256, D: 768}, {Rows: 300, Columns: 784, D: 1104},
		{Rows: 2100, Columns: 2608, D: 656}} {
		if testing.Short() && s.Rows*s.Columns > 1e6 {
			continue
		}
		s.TransW, s.Float8 = true, true
		g.Scope(fmt.Sprintf("%+v", s), func(g *kerneltest.Rig) { testProductFloat8(g, s) })
	}
}

func testProductFloat8(g *kerneltest.Rig, s Product) {
	g.Helper()
	n := s.Rows * s.Columns
	x, xs, xr := matrix8(g, s.Rows, s.D)
	w, ws, wr := matrix8(g, s.Columns, s.D)
	alone := make([]float64, n)
	cpugemm.Mul(false, true, s.Rows, s.Columns, s.D, 1, xr, s.D, wr, s.D, 0, alone, s.Columns)
	c, cr := g.Normal(n, kerneltest.Bf16, 0)
	plus := slices.Clone(alone)
	for i, v := range cr {
		plus[i] += v
	}

	s.X, s.W, s.ScaleX, s.ScaleW, s.Type = x, w, xs, ws, kerneltest.Bf16
	checkProduct(g, s, c, cr, func(what string, y *kerneltest.Buffer) {
		want := plus
		if what == "alone" {
			want = alone
		}
		nearRows(g, what, g.Read(y), want, xr, wr, s.D)
	})
}

// checkProduct computes a product without the added matrix C, with C, and with the result overwriting C. It passes
// each result to check, and requires repeated runs to be bit-identical.
func checkProduct(g *kerneltest.Rig, a Product, c *kerneltest.Buffer, numbers []float64,
	check func(what string, y *kerneltest.Buffer)) {
	g.Helper()
	for _, what := range []string{"alone", "plus", "in place"} {
		var bits []float64
		for range 2 {
			y := g.Alloc(c.N, a.Type, 0)
			a.Y, a.C = y.Ptr, 0
			switch what {
			case "plus":
				a.C = c.Ptr
			case "in place":
				y, _ = g.Upload(numbers, a.Type, 0)
				a.Y, a.C = y.Ptr, y.Ptr
			}
			g.Must(g.Launch(g.Stream, a))
			check(what, y)
			got := g.Read(y)
			if bits != nil && !slices.Equal(bits, got) {
				g.Errorf("%s: results differ from run to run", what)
			}
			bits = got
		}
	}
}

// TestProduct compares products with float64 references, and checks that C is added before the result is rounded.
func TestProduct(t *testing.T) {
	g := newHopperRig(t)
	for _, s := range []Product{{Rows: 1, Columns: 8, D: 8}, {Rows: 5, Columns: 264, D: 136},
		{Rows: 130, Columns: 1000, D: 264}, {Rows: 257, Columns: 256, D: 768},
		{Rows: 2100, Columns: 2600, D: 840}} { // the last case has several tiles per block
		if testing.Short() && s.Rows*s.Columns > 1e6 {
			continue
		}
		for _, s.TransW = range []bool{false, true} {
			for _, dtype := range []gpu.DType{kerneltest.Bf16, kerneltest.F16} {
				g.Scope(fmt.Sprintf("%+v/%v", s, dtype), func(g *kerneltest.Rig) {
					testProduct(g, s, dtype)
				})
			}
		}
	}
}

func testProduct(g *kerneltest.Rig, s Product, dtype gpu.DType) {
	g.Helper()
	n := s.Rows * s.Columns
	x, xr := g.Normal(s.Rows*s.D, dtype, 0)
	w, wr := scaledNormal(g, s.Columns*s.D, s.D, dtype)
	c, cr := g.Normal(n, dtype, 0)
	stride := s.Columns
	if s.TransW {
		stride = s.D
	}

	alone := make([]float64, n)
	cpugemm.Mul(false, s.TransW, s.Rows, s.Columns, s.D, 1, xr, s.D, wr, stride, 0, alone,
		s.Columns)
	plus, twice := slices.Clone(alone), kerneltest.Decode(kerneltest.Encode(alone, dtype), dtype)
	for i, v := range cr {
		plus[i] += v
		twice[i] += v
	}

	rounded := kerneltest.Distance(kerneltest.Decode(kerneltest.Encode(twice, dtype), dtype), plus)
	s.X, s.W, s.Type = x.Ptr, w.Ptr, dtype
	checkProduct(g, s, c, cr, func(what string, y *kerneltest.Buffer) {
		if what == "alone" {
			g.Near(what, y, alone, kerneltest.Forward(dtype))
			return
		}
		g.Near(what, y, plus, kerneltest.Forward(dtype))
		if e := kerneltest.Distance(g.Read(y), plus); n > 10000 && !(e < 0.95*rounded) {
			g.Errorf("%s: relative error %.3g, want less than the %.3g of a result that is "+
				"rounded twice", what, e, rounded)
		}
	})
}

// nearRows compares the rows of the float8 product x·wᵀ, where x and w have d columns. It allows each row an error of
// 2⁻⁸ of its norm for rounding to bfloat16, plus 3·10⁻³ of ‖x‖‖w‖/√d, the norm that a row would have without
// cancellation. The second term is needed because tensor cores sum float8 products with fewer bits than float32.
func nearRows(g *kerneltest.Rig, what string, got, want, x, w []float64, d int) {
	g.Helper()
	columns := len(w) / d
	weights := kerneltest.Norm(w)
	for r := range len(want) / columns {
		row := want[r*columns:][:columns]
		off := kerneltest.Distance(got[r*columns:][:columns], row) * kerneltest.Norm(row)
		limit := kerneltest.Norm(row)/256 + 3e-3*kerneltest.Norm(x[r*d:][:d])*weights/math.Sqrt(float64(d))
		if !(off <= limit) {
			g.Fatalf("%s: row %d is off by %.3g, want at most %.3g", what, r, off, limit)
		}
	}
}

// TestRoPEProductFloat8 is TestRoPEProduct for float8 operands.
func TestRoPEProductFloat8(t *testing.T) {
	g := newHopperRig(t)
	for _, s := range []struct{ batch, seq, heads, kvHeads, headDim, d int }{
		{1, 1, 1, 1, 64, 400}, {3, 43, 3, 1, 64, 512}, {1, 257, 2, 2, 128, 656},
		{2, 150, 12, 4, 64, 784},
		{7, 300, 12, 12, 64, 528}, {3, 700, 8, 4, 128, 640}, // several tiles per block
	} {
		if testing.Short() && s.batch*s.seq > 1000 {
			continue
		}
		a := RoPEProduct{Rows: s.batch * s.seq, Columns: (s.heads + 2*s.kvHeads) * s.headDim,
			D: s.d, Turned: (s.heads + s.kvHeads) * s.headDim, Seq: s.seq, HeadDim: s.headDim,
			Float8: true, Type: kerneltest.Bf16}
		g.Scope(fmt.Sprintf("%+v", s), func(g *kerneltest.Rig) {
			var w, x []float64
			a.X, a.ScaleX, x = matrix8(g, a.Rows, a.D)
			a.Weights, a.ScaleWeights, w = matrix8(g, a.Columns, a.D)
			_, _, want := turnedProduct(g, &a, x, w)
			variants := a.Variants(g.Set)
			if len(variants) == 0 {
				g.Fatal("no variant accepts the product")
			}
			for _, a.Variant = range variants {
				var bits []float64
				for range 2 {
					y := g.Alloc(len(want), a.Type, 0)
					a.Y = y.Ptr
					g.Must(g.Launch(g.Stream, a))
					got := g.Read(y)
					nearRows(g, a.Variant.String(), got, want, x, w, a.D)
					if bits != nil && !slices.Equal(bits, got) {
						g.Errorf("%v: results differ from run to run", a.Variant)
					}
					bits = got
				}
			}
		})
	}
}
