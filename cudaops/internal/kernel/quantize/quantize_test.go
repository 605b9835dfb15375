package quantize_test

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/silu"
	"github.com/kasmina-go/kasmina/internal/half"
)

// quantized returns the codes and the scale of a row, computed in float32 like the kernels do.
func quantized(row []float64) (codes []byte, scale float32) {
	var largest float64
	for _, v := range row {
		largest = math.Max(largest, math.Abs(v))
		if v != v { // even if there is an infinity as well
			largest = v
			break
		}
	}

	switch scale = float32(largest) / 448; {
	case largest == 0:
		scale = 1
	case scale < 0x1p-126:
		scale = 0x1p-126
	}

	inverse := 1 / scale
	for _, v := range row {
		codes = append(codes, half.E4M3(float32(v)*inverse))
	}

	return codes, scale
}

// rows8 checks rows of float8 and their scales against the original numbers.
func rows8(g *kerneltest.Rig, what string, y, scale *kerneltest.Buffer, rows [][]float64) {
	g.Helper()
	got, scales := raw(g, y), g.Read(scale)
	for r, row := range rows {
		codes, want := quantized(row)
		if s := float32(scales[r]); s != want && (s == s || want == want) {
			g.Fatalf("%s: scale of row %d is %v, want %v", what, r, s, want)
		}
		for c, code := range got[r*len(row) : (r+1)*len(row)] {
			if code != codes[c] && (code&0x7f != 0x7f || codes[c]&0x7f != 0x7f) {
				g.Fatalf("%s: row %d, column %d: %v over %v is %#x, want %#x", what, r, c,
					row[c], want, code, codes[c])
			}
			if exact := row[c] / float64(want); exact-exact == 0 {
				if near := float64(half.FromE4M3(code & 0x7f)); math.Abs(near-math.Abs(exact)) >
					halfStep(exact)*(1+1e-5) {
					g.Fatalf("%s: row %d, column %d: %v is %v, which is not the nearest number",
						what, r, c, exact, near)
				}
			}
		}
	}
}

// halfStep returns half the distance between representable numbers around v.
func halfStep(v float64) float64 {
	_, exp := math.Frexp(math.Abs(v)) // |v| in [2^(exp−1), 2^exp)
	return math.Ldexp(1, max(exp-1, -6)-4)
}

func raw(g *kerneltest.Rig, b *kerneltest.Buffer) []byte {
	g.Helper()
	raw := make([]byte, b.Bytes())
	g.Must(g.Ctx.CopyToHost(raw, b.Ptr, g.Stream))
	return raw
}

// oddRows returns rows of all magnitudes that a type supports, including zeros, outliers,
// infinities and NaN.
func oddRows(g *kerneltest.Rig, rows, d int, t gpu.DType) [][]float64 {
	lowest, highest := -40.0, 30.0 // powers of ten
	if t == kerneltest.F16 {
		lowest, highest = -8, 4
	}

	x := make([][]float64, rows)
	for r := range x {
		x[r] = make([]float64, d)
		size := math.Pow(10, lowest+(highest-lowest)*g.Rand.Float64())
		if r%3 == 0 {
			size = 1
		}
		for c := range x[r] {
			x[r][c] = size * g.Rand.NormFloat64()
		}
		one := &x[r][g.Rand.IntN(d)]
		switch g.Rand.IntN(8) {
		case 0:
			clear(x[r])
		case 1:
			*one *= 1000
		case 2:
			*one = math.Inf(g.Rand.IntN(2)*2 - 1)
		case 3:
			*one = math.NaN()
		case 4: // multiples of half steps, that is, ties
			for c := range x[r] {
				x[r][c] = float64(g.Rand.IntN(65)-32) / 32
			}
			*one = 1.75
		}
	}

	return x
}

// uploadRows uploads rows that are stride elements apart, and returns them as rounded.
func uploadRows(g *kerneltest.Rig, x [][]float64, stride int, t gpu.DType,
	skew int) (*kerneltest.Buffer, [][]float64) {
	g.Helper()
	all := make([]float64, stride*len(x))
	for i := range all {
		all[i] = math.NaN()
	}
	for r, row := range x {
		copy(all[r*stride:], row)
	}
	b, rounded := g.Upload(all, t, skew)
	return b, split(rounded, stride, len(x[0]))
}

// split returns the first d of every stride numbers.
func split(x []float64, stride, d int) (rows [][]float64) {
	for ; len(x) > 0; x = x[stride:] {
		rows = append(rows, x[:d])
	}
	return rows
}

// rows8Alloc allocates memory for rows of float8 and their scales.
func rows8Alloc(g *kerneltest.Rig, rows, d, skew int) (y, scale *kerneltest.Buffer) {
	g.Helper()
	return g.Alloc(rows*d, gpu.Float8E4M3, skew), g.Alloc(rows, kerneltest.F32, 0)
}

func TestQuantize(t *testing.T) {
	g := kerneltest.NewRig(t)
	shapes := [][2]int{{1, 1}, {3, 7}, {5, 32}, {131, 768}, {67, 1000}, {33, 1024}, {33, 2304},
		{21, 2816}, {9, 5632}, {7, 6144}, {2, 8200},
		{3, 16384}, {3, 4099}, {2, 20000}}
	for i, shape := range shapes {
		for _, dt := range kerneltest.StorageTypes {
			if !g.Some() {
				continue
			}
			rows, d := shape[0], shape[1]
			g.Scope(fmt.Sprintf("%dx%d/%v", rows, d, dt), func(g *kerneltest.Rig) {
				stride := 0
				if i%2 == 1 {
					stride = d + 8*(1+g.Rand.IntN(3))
				}
				x, xr := uploadRows(g, oddRows(g, rows, d, dt), max(stride, d), dt, i%5/4)
				y, scale := rows8Alloc(g, rows, d, i%3*4)
				a := quantize.Rows{Y: y.Ptr, Scale: scale.Ptr, X: x.Ptr, Rows: rows, D: d,
					XStride: stride, Type: dt}
				g.Must(g.Launch(g.Stream, a))
				rows8(g, "rows", y, scale, xr)
			})
		}
	}
}

func TestQuantizeColumns(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, shape := range [][2]int{{1, 1}, {7, 3}, {32, 64}, {129, 65}, {128, 256}, {1000, 72},
		{272, 1000}, {705, 264}, {2304, 768}} {
		for _, dt := range kerneltest.StorageTypes {
			rows, d := shape[0], shape[1]
			g.Scope(fmt.Sprintf("%dx%d/%v", rows, d, dt), func(g *kerneltest.Rig) {
				columns := oddRows(g, d, rows, dt)
				turned := make([][]float64, rows)
				for r := range turned {
					for _, column := range columns {
						turned[r] = append(turned[r], column[r])
					}
				}
				x, xr := uploadRows(g, turned, d, dt, i%2)
				for c := range columns {
					for r := range xr {
						columns[c][r] = xr[r][c]
					}
				}
				y, scale := rows8Alloc(g, d, rows, i%3)
				work := g.Alloc(quantize.Columns{Rows: rows, D: d}.WorkspaceBytes(g.Info)/4, kerneltest.F32,
					0)
				g.Must(g.Launch(g.Stream, quantize.Columns{Y: y.Ptr, Scale: scale.Ptr, X: x.Ptr,
					Workspace: work.Ptr, Rows: rows, D: d, Type: dt}))
				rows8(g, "columns", y, scale, columns)
			})
		}
	}
}

// sameBits checks that two arrays are equal, and that something has been written to them.
func sameBits(g *kerneltest.Rig, what string, a, b *kerneltest.Buffer) {
	g.Helper()
	x, y := raw(g, a), raw(g, b)
	if !slices.Equal(x, y) {
		g.Errorf("%s: fused and separate kernels are not bit-identical", what)
	}
	if !slices.ContainsFunc(x, func(v byte) bool { return v != 0xff }) {
		g.Errorf("%s: nothing was written", what)
	}
}

// separate checks rows of float8 against the result of Rows for the rows x with the given stride.
func separate(g *kerneltest.Rig, what string, y, scale, x *kerneltest.Buffer, d, stride int) {
	g.Helper()
	wantY, want := rows8Alloc(g, scale.N, d, 0)
	g.Must(g.Launch(g.Stream, quantize.Rows{Y: wantY.Ptr, Scale: want.Ptr, X: x.Ptr, Rows: scale.N,
		D: d, XStride: stride, Type: x.Dtype}))
	sameBits(g, what, y, wantY)
	sameBits(g, "scales of "+what, scale, want)
}

// halfTypes are the types of rows that are then stored as float8.
var halfTypes = []gpu.DType{kerneltest.Bf16, kerneltest.F16}

func TestRMSNormFloat8(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, shape := range [][2]int{{3, 7}, {5, 32}, {130, 768}, {67, 1000}, {33, 2048}, {5, 4096},
		{3, 16384}, {3, 4099}} {
		for _, dt := range halfTypes {
			for _, residual := range []bool{false, true} {
				if !g.Some() {
					continue
				}
				for skew := range 2 {
					name := fmt.Sprintf("%dx%d/%v/%v/%d", shape[0], shape[1], dt, residual, skew)
					g.Scope(name, func(g *kerneltest.Rig) {
						rmsNormFloat8(g, shape[0], shape[1], dt, residual, skew)
					})
				}
			}
		}
	}
}

func rmsNormFloat8(g *kerneltest.Rig, rows, d int, dt gpu.DType, residual bool, skew int) {
	x, _ := uploadRows(g, oddRows(g, rows, d, dt), d, dt, skew)
	w, _ := g.Normal(d, kerneltest.F32, 0)
	run := func(float8 bool) (outputs []*kerneltest.Buffer) {
		y, rstd := g.Alloc(rows*d, dt, skew), g.Alloc(rows, kerneltest.F32, 0)
		a := norm.RMSNorm{Y: y.Ptr, Rstd: rstd.Ptr, X: x.Ptr, W: w.Ptr, Rows: rows,
			D: d, Eps: 1e-5, Type: dt}
		outputs = []*kerneltest.Buffer{y, rstd}
		if residual {
			sum := g.Alloc(rows*d, dt, skew)
			a.Residual, a.Sum, outputs = x.Ptr, sum.Ptr, append(outputs, sum)
		}
		if float8 {
			y8, scale := rows8Alloc(g, rows, d, 0)
			a.Y8, a.Scale8, outputs = y8.Ptr, scale.Ptr, append(outputs, y8, scale)
		}
		g.Must(g.Launch(g.Stream, a))
		return outputs
	}

	plain, fused := run(false), run(true)
	for i, b := range plain {
		sameBits(g, fmt.Sprint("output ", i), fused[i], b)
	}

	separate(g, "y", fused[len(plain)], fused[len(plain)+1], fused[0], d, 0)
}

// TestRMSNormBackwardFloat8 includes shapes with more rows than the GPU processes at once.
func TestRMSNormBackwardFloat8(t *testing.T) {
	g := kerneltest.NewRig(t)
	shapes := [][2]int{{3, 7}, {50, 32}, {1003, 256}, {2203, 768}, {67, 1000}, {600, 2048},
		{60, 4096}, {1500, 2056}, {2, 8200}, {70, 4099}, {2222, 1024}, {1111, 1288}, {900, 2040}}
	for i, shape := range shapes {
		for _, dt := range halfTypes {
			for _, add := range []bool{false, true} {
				if g.Some() {
					name := fmt.Sprintf("%dx%d/%v/%v", shape[0], shape[1], dt, add)
					g.Scope(name, func(g *kerneltest.Rig) {
						for skew := range 1 + i%2 {
							rmsNormBackwardFloat8(g, shape[0], shape[1], dt, add, skew)
						}
					})
				}
			}
		}
	}
}

func rmsNormBackwardFloat8(g *kerneltest.Rig, rows, d int, dt gpu.DType, add bool, skew int) {
	x, _ := g.Normal(rows*d, dt, skew)
	dy, _ := uploadRows(g, oddRows(g, rows, d, dt), d, dt, skew)
	w, _ := g.Normal(d, kerneltest.F32, 0)
	rstd, _ := g.Normal(rows, kerneltest.F32, 0)
	base := norm.RMSNormBackward{DX: dy.Ptr, G: dy.Ptr, X: x.Ptr, W: w.Ptr, Rstd: rstd.Ptr,
		Rows: rows, D: d, Type: dt,
		Workspace: g.Alloc(norm.RMSNormBackward{D: d, Type: dt}.WorkspaceBytes(g.Info)/4,
			kerneltest.F32, 0).Ptr}
	if add {
		base.Add = x.Ptr
	}

	run := func(float8 bool) (outputs []*kerneltest.Buffer) {
		dx, dw := g.Alloc(rows*d, dt, skew), g.Alloc(d, kerneltest.F32, 0)
		a := base
		a.DX, a.DW = dx.Ptr, dw.Ptr
		outputs = []*kerneltest.Buffer{dx, dw}
		if float8 {
			dx8, scale := rows8Alloc(g, rows, d, 0)
			a.DX8, a.Scale8, outputs = dx8.Ptr, scale.Ptr, append(outputs, dx8, scale)
		}
		g.Must(g.Launch(g.Stream, a))
		return outputs
	}

	plain, fused := run(false), run(true)
	sameBits(g, "dx", fused[0], plain[0])
	g.Near("dw", fused[1], g.Read(plain[1]), 1e-4) // the sums of blocks may differ
	separate(g, "dx as float8", fused[2], fused[3], fused[0], d, 0)
}

func TestSiLUMulFloat8(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, shape := range [][2]int{{1, 1}, {3, 7}, {5, 8}, {13, 1000}, {129, 768}, {40, 2816},
		{33, 2048}, {9, 5632}, {3, 16384}, {2, 17000}} {
		for _, dt := range halfTypes {
			rows, f := shape[0], shape[1]
			g.Scope(fmt.Sprintf("%dx%d/%v", rows, f, dt), func(g *kerneltest.Rig) {
				siluFloat8(g, rows, f, dt, i%3/2)
			})
		}
	}
}

func siluFloat8(g *kerneltest.Rig, rows, f int, dt gpu.DType, skew int) {
	n := rows * f
	ab, _ := uploadRows(g, oddRows(g, rows, 2*f, dt), 2*f, dt, skew)
	dh, _ := g.Normal(n, dt, skew)

	h := g.Alloc(n, dt, skew)
	a := silu.Mul{H: h.Ptr, AB: ab.Ptr, Rows: rows, F: f, Type: dt}
	g.Must(g.Launch(g.Stream, a))
	h8, scales := rows8Alloc(g, rows, f, 0)
	out := g.Alloc(n, dt, skew)
	a.H, a.H8, a.Scale8 = out.Ptr, h8.Ptr, scales.Ptr
	g.Must(g.Launch(g.Stream, a))
	sameBits(g, "h", out, h)
	separate(g, "h", h8, scales, h, f, 0)
	g.Must(g.Ctx.Memset8(h8.Ptr, 0xff, h8.Bytes(), g.Stream))
	a.H = 0
	g.Must(g.Launch(g.Stream, a))
	separate(g, "h that is not written", h8, scales, h, f, 0)

	wantH, want := g.Alloc(n, dt, skew), g.Alloc(2*n, dt, skew)
	b := silu.MulBackward{H: wantH.Ptr, DAB: want.Ptr, DH: dh.Ptr, AB: ab.Ptr, Rows: rows, F: f,
		Type: dt}
	g.Must(g.Launch(g.Stream, b))
	dab8, scale := rows8Alloc(g, rows, 2*f, 0)
	again, dab := g.Alloc(n, dt, skew), g.Alloc(2*n, dt, skew)
	b.H, b.DAB, b.DAB8, b.Scale8 = again.Ptr, dab.Ptr, dab8.Ptr, scale.Ptr
	g.Must(g.Launch(g.Stream, b))
	sameBits(g, "h again", again, wantH)
	sameBits(g, "da, db", dab, want)
	separate(g, "da, db", dab8, scale, want, 2*f, 0)

	if f%8 != 0 || skew != 0 {
		return
	}

	b.H, b.DAB = 0, ab.Ptr // in place
	g.Must(g.Launch(g.Stream, b))
	sameBits(g, "da, db in place", ab, want)
}
