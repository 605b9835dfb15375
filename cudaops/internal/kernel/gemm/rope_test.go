package gemm

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/rope"
	cpugemm "github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
)

// TestRoPEProduct compares products whose leading columns are rotated with float64 references, and checks that they are
// bit-identical to a product followed by a separate rotation.
func TestRoPEProduct(t *testing.T) {
	g := newHopperRig(t)
	for _, s := range []struct{ batch, seq, heads, kvHeads, headDim, d int }{
		{1, 1, 1, 1, 64, 8}, {3, 43, 3, 1, 64, 72}, {1, 257, 2, 2, 128, 264},
		{5, 103, 4, 2, 128, 584}, {1, 515, 3, 1, 96, 200},
		// several tiles per block
		{2, 150, 12, 4, 64, 776}, {7, 300, 12, 12, 64, 520}, {3, 700, 8, 4, 128, 456},
		{4, 531, 8, 8, 96, 520},
	} {
		if testing.Short() && s.batch*s.seq > 1000 {
			continue
		}
		a := RoPEProduct{Rows: s.batch * s.seq, Columns: (s.heads + 2*s.kvHeads) * s.headDim,
			D: s.d, Turned: (s.heads + s.kvHeads) * s.headDim, Seq: s.seq, HeadDim: s.headDim}
		for _, a.Type = range []gpu.DType{kerneltest.Bf16, kerneltest.F16} {
			g.Scope(fmt.Sprintf("%+v/%v", s, a.Type), func(g *kerneltest.Rig) {
				testRoPEProduct(g, a)
			})
		}
	}

	for _, turned := range []int{0, 64, 320} { // no rotation, and heads next to columns that are not heads
		a := RoPEProduct{Rows: 140, Columns: 328, D: 456, Turned: turned, Seq: 35, HeadDim: 64,
			Type: kerneltest.Bf16}
		g.Scope(fmt.Sprintf("%d turned", a.Turned), func(g *kerneltest.Rig) {
			testRoPEProduct(g, a)
		})
	}
}

func testRoPEProduct(g *kerneltest.Rig, a RoPEProduct) {
	g.Helper()
	x, xr := g.Normal(a.Rows*a.D, a.Type, 0)
	w, wr := scaledNormal(g, a.Columns*a.D, a.D, a.Type)
	a.X, a.Weights = x.Ptr, w.Ptr
	cos, sin, want := turnedProduct(g, &a, xr, wr)
	variants := a.Variants(g.Set)
	if len(variants) == 0 {
		g.Fatal("no variant accepts the product")
	}

	for _, a.Variant = range variants {
		y, again, product := g.Alloc(len(want), a.Type, 0), g.Alloc(len(want), a.Type, 0),
			g.Alloc(len(want), a.Type, 0)
		run := func(to *kerneltest.Buffer, turned int) []float64 {
			a := a
			a.Y, a.Turned = to.Ptr, turned
			g.Must(g.Launch(g.Stream, a))
			return g.Read(to)
		}
		got := run(y, a.Turned)
		g.Near(a.Variant.String(), y, want, kerneltest.Forward(a.Type))
		if !slices.Equal(run(again, a.Turned), got) {
			g.Errorf("%v: results differ from run to run", a.Variant)
		}
		if run(product, 0); a.Turned > 0 {
			g.Must(g.Launch(g.Stream, rope.Rotate{Y: product.Ptr, X: product.Ptr, Cos: cos.Ptr,
				Sin: sin.Ptr, Rows: a.Rows, Seq: a.Seq,
				Heads: a.Turned / a.HeadDim, HeadDim: a.HeadDim, XStride: a.Columns,
				YStride: a.Columns, Type: a.Type}))
		}
		if !slices.Equal(g.Read(product), got) {
			g.Errorf("%v: the bits differ from a product followed by a rotation", a.Variant)
		}
	}
}

// turnedProduct sets random rotation angles in a. It returns their cosines and sines and the expected
// result for x and w.
func turnedProduct(g *kerneltest.Rig, a *RoPEProduct, x, w []float64) (cos, sin *kerneltest.Buffer,
	want []float64) {
	g.Helper()
	cosines := make([]float64, a.Seq*a.HeadDim/2)
	sines := slices.Clone(cosines)
	for i := range sines {
		sines[i], cosines[i] = math.Sincos(2 * math.Pi * g.Rand.Float64())
	}

	cos, cr := g.Upload(cosines, kerneltest.F32, 0)
	sin, sr := g.Upload(sines, kerneltest.F32, 0)
	a.Angles = ropeAngles(g, cr, sr, a.HeadDim/2)
	want = make([]float64, a.Rows*a.Columns)
	cpugemm.Mul(false, true, a.Rows, a.Columns, a.D, 1, x, a.D, w, a.D, 0, want, a.Columns)
	for r := 0; r < a.Rows && a.Turned > 0; r++ {
		row, at := want[r*a.Columns:][:a.Turned], r%a.Seq*a.HeadDim/2
		layer.RoPE(row, slices.Clone(row), cr[at:], sr[at:], 1, a.Turned/a.HeadDim, a.HeadDim,
			false)
	}

	return cos, sin, want
}

// ropeAngles uploads the table of angles that a RoPEProduct reads.
func ropeAngles(g *kerneltest.Rig, cos, sin []float64, h int) gpu.Ptr {
	var narrow [2][]float32
	for i, wide := range [][]float64{cos, sin} {
		for _, v := range wide {
			narrow[i] = append(narrow[i], float32(v))
		}
	}

	var table []float64
	for _, v := range RoPEAngles(narrow[0], narrow[1], h) {
		table = append(table, float64(v))
	}

	b, _ := g.Upload(table, kerneltest.F32, 0)
	return b.Ptr
}

// TestRoPEAngles checks that every angle has a unique place in the table, such that the four lanes
// that share a position read consecutive elements.
func TestRoPEAngles(t *testing.T) {
	for _, s := range []struct{ seq, h int }{{1, 2}, {8, 32}, {13, 48}, {40, 64}} {
		cos, sin := make([]float32, s.seq*s.h), make([]float32, s.seq*s.h)
		for i := range cos {
			cos[i], sin[i] = float32(i+1), float32(-i-1)
		}
		table := RoPEAngles(cos, sin, s.h)
		for i := range cos {
			position, pair := i/s.h, i%s.h
			// index of a warp's 16-byte load
			lane := 32*(position/8*kernel.CeilDiv(s.h, 8)+pair/8) + position%8*4 + pair%8/2
			if at := 4*lane + pair%2; table[at] != cos[i] || table[at+2] != sin[i] {
				t.Errorf("%+v, position %d, pair %d: %g and %g, want %g and %g", s, position, pair,
					table[at], table[at+2], cos[i], sin[i])
			}
		}
	}
}
