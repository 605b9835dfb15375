package driver_test

import (
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// stored is a matrix as stored on the device, with its values in float64 after rounding to the stored
// type.
type stored struct {
	bytes  []byte
	values []float64
}

func (r *rig) matrix(t gpu.DType, n int) stored {
	m := stored{bytes: make([]byte, n*t.Size())}
	gpu.Encode(m.bytes, t, r.floats(n))
	m.values = values(t, m.bytes)
	return m
}

func values(t gpu.DType, b []byte) []float64 {
	out := make([]float64, len(b)/t.Size())
	gpu.Decode(out, t, b)
	return out
}

func TestMatmul(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		blas, err := r.Blas()
		ok(t, err)
		t.Logf("version %d", blas.Version())
		if again, err := r.Blas(); err != nil || again != blas {
			t.Errorf("second call: %v, %v", again, err)
		}
		const f32, b16, f16 = gpu.Float32, gpu.BFloat16, gpu.Float16
		for _, c := range []gpu.MatmulSpec{
			{M: 1, N: 1, K: 1},
			{M: 37, N: 29, K: 61, Align: 4},
			{M: 37, N: 29, K: 61, TransA: true, Align: 4},
			{M: 37, N: 29, K: 61, TransB: true, Align: 4},
			{M: 37, N: 29, K: 61, TransA: true, TransB: true, Align: 4},
			{M: 64, N: 48, K: 80, TransB: true, A: b16, B: b16, D: b16},
			{M: 67, N: 35, K: 81, TransB: true, A: b16, B: b16, D: b16, Align: 2},
			{M: 48, N: 40, K: 72, TransA: true, A: b16, B: b16, D: f32},
			{M: 64, N: 48, K: 80, TransB: true, A: f16, B: f16, D: f16},
			{M: 67, N: 35, K: 81, A: f16, B: f16, D: f16, Align: 2},
			{M: 48, N: 40, K: 72, TransA: true, A: f16, B: f16, D: f32},
			{M: 33, N: 24, K: 16},
			{M: 33, N: 24, K: 16, A: b16, B: b16, D: b16, TransB: true},
			{M: 17, N: 24, K: 32, Batch: 5, A: b16, B: b16, D: b16},
			{M: 16, N: 24, K: 32, Batch: 3, TransA: true},
		} {
			t.Run(fmt.Sprintf("%dx%dx%d %v%v%v b%d", c.M, c.N, c.K, c.TransA,
				c.TransB, c.D, c.Batch),
				func(t *testing.T) { r.matmul(t, blas, c, 1.5, 0); r.matmul(t, blas, c, 1, -0.75) })
		}
		for name, c := range map[string]gpu.MatmulSpec{
			"empty": {M: 0, N: 1, K: 1},
			"batch": {M: 2, N: 2, K: 2, Batch: -1},
			"align": {M: 2, N: 2, K: 2, Align: 3},
		} {
			require.ErrorIs(t, second(blas.Plan(c, 0, 1)), gpu.BlasInvalidValue, name)
		}
	})
}

// TestMatmulFloat8 compares float8 products with products of the dequantized operands.
func TestMatmulFloat8(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		if got := r.Device().Capability(); got != 90 {
			t.Skipf("needs compute capability 9.0, this is %d", got)
		}
		blas := must[gpu.Blas](t)(r.Blas())
		const f8, b16, f32 = gpu.Float8E4M3, gpu.BFloat16, gpu.Float32
		for _, c := range []gpu.MatmulSpec{
			{M: 64, N: 48, K: 80, D: b16},
			{M: 67, N: 48, K: 80, D: b16, Align: 16},
			{M: 1, N: 16, K: 16, D: b16},
			{M: 131, N: 144, K: 208, D: b16},
			{M: 131, N: 144, K: 208, D: b16},
			{M: 67, N: 48, K: 80, D: f32},
		} {
			c.A, c.B, c.TransB = f8, f8, true
			t.Run(fmt.Sprintf("%dx%dx%d %v", c.M, c.N, c.K, c.D), func(t *testing.T) {
				r.matmul(t, blas, c, 1.5, 0)
				r.matmul(t, blas, c, 1, -0.75)
			})
		}
		batch := gpu.MatmulSpec{M: 16, N: 16, K: 16, TransB: true, A: f8, B: f8, D: b16, Batch: 2}
		require.ErrorIs(t, second(blas.Plan(batch, 0, 1)), gpu.BlasInvalidValue)
		for name, c := range map[string]gpu.MatmulSpec{
			"A along M": {M: 16, N: 16, K: 16, TransA: true, TransB: true, A: f8, B: f8,
				D: b16},
			"B along N": {M: 16, N: 16, K: 16, A: f8, B: f8, D: b16},
			"K of 24": {M: 16, N: 16, K: 24, TransB: true, A: f8, B: f8,
				D: b16},
			"N of 20": {M: 16, N: 20, K: 16, TransB: true, A: f8, B: f8,
				D: b16},
			"8 bytes apart": {M: 16, N: 16, K: 16, TransB: true, A: f8, B: f8, D: b16,
				Align: 8},
		} {
			require.ErrorIs(t, second(blas.Plan(c, 0, 1)), gpu.BlasNotSupported, name)
		}
	})
}

// TestFloat8Depth checks that accumulation in long float8 sums adds an error of less than 4%, the error
// due to rounding the operands.
func TestFloat8Depth(t *testing.T) {
	c := must[gpu.Context](t)(needGPU(t).Retain(0))
	if got := c.Device().Capability(); got != 90 {
		t.Skipf("needs compute capability 9.0, this is %d", got)
	}

	r := &rig{Context: c, gpu: true, rng: randtest.New(t)}
	blas := must[gpu.Blas](t)(r.Blas())
	const m, n = 128, 128
	for _, k := range []int{768, 2048, 11264} {
		a, b := r.matrix(gpu.Float8E4M3, m*k), r.matrix(gpu.Float8E4M3, n*k)
		ones := make([]float32, m)
		for i := range ones {
			ones[i] = 1
		}
		want := make([]float64, m*n)
		for i := range want {
			for j := range k {
				want[i] += a.values[i/n*k+j] * b.values[i%n*k+j]
			}
		}
		pa, pb, pd, ps := r.alloc(t, m*k), r.alloc(t, n*k), r.alloc(t, 4*m*n), r.alloc(t, 4*m)
		ok(t, errors.Join(r.CopyToDevice(pa, a.bytes, 0), r.CopyToDevice(pb, b.bytes, 0),
			r.CopyToDevice(ps, gpu.Bytes(ones), 0)))
		p := must[gpu.MatmulPlan](t)(blas.Plan(gpu.MatmulSpec{M: m, N: n, K: k,
			TransB: true, A: gpu.Float8E4M3, B: gpu.Float8E4M3}, 0, 1))
		ok(t, p.Run(0, gpu.MatmulArgs{Alpha: 1, A: pa, B: pb, D: pd, ScaleA: ps, ScaleB: ps}, 0))
		got := make([]byte, 4*m*n)
		ok(t, r.CopyToHost(got, pd, 0))
		e := relative(values(gpu.Float32, got), want)
		t.Logf("sums of %d: error %.2g", k, e)
		require.Less(t, e, 0.04, k)
		ok(t, errors.Join(r.Free(pa), r.Free(pb), r.Free(pd), r.Free(ps)))
	}

	ok(t, c.Close())
}

// TestMatmulDepth checks that long sums, which variants may split into parts, are rounded to 16 bits only
// once, without rounding the parts.
func TestMatmulDepth(t *testing.T) {
	c := must[gpu.Context](t)(needGPU(t).Retain(0))
	r := &rig{Context: c, gpu: true, rng: randtest.New(t)}
	blas := must[gpu.Blas](t)(r.Blas())
	const m, n, k, limit = 96, 64, 32768, 32 << 20
	for _, dt := range []gpu.DType{gpu.BFloat16, gpu.Float16} {
		a, b := r.matrix(dt, m*k), r.matrix(dt, n*k)
		sums := make([]float64, m*n)
		for at := range k {
			for i := range m {
				for j := range n {
					sums[i*n+j] += a.values[at*m+i] * b.values[at*n+j]
				}
			}
		}
		pa, pb, pd, work := r.alloc(t, 2*m*k), r.alloc(t, 2*n*k),
			r.alloc(t, 2*m*n), r.alloc(t, limit)
		ok(t, errors.Join(r.CopyToDevice(pa, a.bytes, 0), r.CopyToDevice(pb, b.bytes, 0)))
		p := must[gpu.MatmulPlan](t)(blas.Plan(gpu.MatmulSpec{M: m, N: n, K: k, TransA: true, A: dt,
			B: dt, D: dt}, limit, 12))
		worst, split := 0, false
		for i, variant := range p.Algos() {
			ok(t, p.Run(i, gpu.MatmulArgs{Alpha: 1. / 256, A: pa, B: pb, D: pd, Workspace: work,
				WorkspaceSize: limit}, 0))
			got := make([]byte, 2*m*n)
			ok(t, r.CopyToHost(got, pd, 0))
			farOff := 0
			for j, v := range values(dt, got) {
				// Half the gap between two numbers, plus the error of a float32 sum when tensor cores
				// truncate digits.
				gap := math.Ldexp(1, math.Ilogb(sums[j]/256)-map[gpu.DType]int{gpu.BFloat16: 7,
					gpu.Float16: 10}[dt])
				if !(math.Abs(v-sums[j]/256) <= 0.5*gap+2e-5) {
					farOff++
				}
			}
			worst, split = max(worst, farOff), split || variant.Workspace > 0
		}
		if t.Logf("%v: %d variants, some with workspace: %v, at most %d of %d rounded elsewhere", dt,
			len(p.Algos()), split, worst, m*n); worst > m*n/20 {
			t.Errorf("%v: a variant rounds %d of %d numbers more than once", dt, worst, m*n)
		}
		ok(t, errors.Join(r.Free(pa), r.Free(pb), r.Free(pd), r.Free(work)))
	}

	ok(t, c.Close())
}

// scales returns n positive float32 numbers.
func (r *rig) scales(n int) stored {
	f, m := r.floats(n), stored{values: make([]float64, n)}
	for i := range f {
		f[i] = 0.5 + f[i]*f[i]
		m.values[i] = float64(f[i])
	}
	m.bytes = gpu.Bytes(f)
	return m
}

func (r *rig) matmul(t *testing.T, blas gpu.Blas, c gpu.MatmulSpec, alpha, beta float32) {
	const limit = 4 << 20
	p, err := blas.Plan(c, limit, 8)
	ok(t, err)
	c = must[gpu.MatmulSpec](t)(c.Normal())
	a, b := r.matrix(c.A, c.Batch*c.M*c.K), r.matrix(c.B, c.Batch*c.K*c.N)
	d := r.matrix(c.D, c.Batch*c.M*c.N)
	want := append([]float64(nil), d.values...)
	scaleA, scaleB := r.scales(c.M), r.scales(c.N)
	factor := func(i, j int) float64 {
		if !c.Scaled() {
			return 1
		}
		return scaleA.values[i] * scaleB.values[j]
	}

	for batch := range c.Batch {
		for i := range c.M {
			for j := range c.N {
				sum := 0.0
				for k := range c.K {
					ia, ib := i*c.K+k, k*c.N+j
					if c.TransA {
						ia = k*c.M + i
					}
					if c.TransB {
						ib = j*c.K + k
					}
					sum += a.values[batch*c.M*c.K+ia] * b.values[batch*c.K*c.N+ib]
				}
				at := batch*c.M*c.N + i*c.N + j
				want[at] = float64(alpha)*factor(i, j)*sum + float64(beta)*d.values[at]
			}
		}
	}

	up := func(m stored) gpu.Ptr {
		ptr := r.alloc(t, len(m.bytes)+c.Align)
		ok(t, r.CopyToDevice(ptr.Offset(c.Align), m.bytes, 0)) // aligned exactly as specified, and no better
		return ptr
	}
	pa, pb, pd, work := up(a), up(b), up(d), r.alloc(t, limit)
	psa, psb := up(scaleA), up(scaleB)
	args := gpu.MatmulArgs{Alpha: alpha, Beta: beta, A: pa.Offset(c.Align), B: pb.Offset(c.Align),
		D: pd.Offset(c.Align), Workspace: work, WorkspaceSize: limit}
	if c.Scaled() {
		args.ScaleA, args.ScaleB = psa.Offset(c.Align), psb.Offset(c.Align)
	}

	tolerance := 1e-6
	if c.A == gpu.Float8E4M3 {
		tolerance = 1e-3 // tensor cores accumulate with fewer bits
	}

	// The rounding errors of a few elements may all happen to be large, and scales make a few elements much larger than
	// the rest.
	switch many := c.M*c.N >= 1024 && !c.Scaled(); {
	case c.D == gpu.BFloat16 && many:
		tolerance = 2.4e-3
	case c.D == gpu.BFloat16:
		tolerance = 4e-3
	case c.D == gpu.Float16 && many:
		tolerance = 3e-4
	case c.D == gpu.Float16:
		tolerance = 5e-4
	}

	require.NotEmpty(t, p.Algos(), "no algorithm")
	for i := range p.Algos() {
		ok(t, r.CopyToDevice(args.D, d.bytes, 0))
		ok(t, p.Run(i, args, 0))
		got := make([]byte, len(d.bytes))
		ok(t, r.CopyToHost(got, args.D, 0))
		require.LessOrEqual(t, relative(values(c.D, got), want), tolerance, "%v, %v", i,
			len(p.Algos()))
	}

	bad := args
	bad.WorkspaceSize = -1
	half := args
	half.ScaleA, half.ScaleB = args.A, 0
	for what, err := range map[string]error{"algorithm 99": p.Run(99, args, 0),
		"workspace": p.Run(0, bad, 0), "scales": p.Run(0, half, 0)} {
		require.ErrorIs(t, err, gpu.BlasInvalidValue)
		require.ErrorContains(t, err, what)
	}

	ok(t, errors.Join(r.Free(pa), r.Free(pb), r.Free(pd), r.Free(psa), r.Free(psb), r.Free(work)))
}

// TestPoison checks that complete products are unaffected by poisoning, and that C survives if beta is
// not zero. A product that reads its own output must be NaN.
func TestPoison(t *testing.T) {
	before := gpu.Poison
	gpu.Poison = true
	defer func() { gpu.Poison = before }()
	each(t, func(t *testing.T, r *rig) {
		blas := must[gpu.Blas](t)(r.Blas())
		const b16 = gpu.BFloat16
		for _, c := range []gpu.MatmulSpec{
			{M: 37, N: 29, K: 61, Align: 4},
			{M: 64, N: 48, K: 80, TransB: true, A: b16, B: b16, D: b16},
			{M: 17, N: 24, K: 32, Batch: 5, A: b16, B: b16, D: b16},
			// some variants accumulate this one in the workspace
			{M: 24, N: 32, K: 4096, TransA: true, A: b16, B: b16, D: b16},
		} {
			r.matmul(t, blas, c, 1.5, 0)
			r.matmul(t, blas, c, 1, -0.75)
		}

		const n = 16
		p := must[gpu.MatmulPlan](t)(blas.Plan(gpu.MatmulSpec{M: n, N: n, K: n}, 0, 1))
		in, out := r.floats(n*n), make([]float32, n*n)
		a, d := r.alloc(t, 4*n*n), r.alloc(t, 4*n*n)
		ok(t, r.CopyToDevice(a, gpu.Bytes(in), 0))
		for _, args := range []gpu.MatmulArgs{{Alpha: 1, A: a, B: d, D: d},
			{Alpha: 1, Beta: 1, A: a, B: d, C: a, D: d}} {
			ok(t, r.CopyToDevice(d, gpu.Bytes(in), 0))
			ok(t, p.Run(0, args, 0))
			ok(t, r.CopyToHost(gpu.Bytes(out), d, 0))
			for i, v := range out {
				if v == v {
					t.Fatalf("beta %v: element %d of a product with its own result is %v, want NaN",
						args.Beta, i, v)
				}
			}
		}
		ok(t, errors.Join(r.Free(a), r.Free(d)))
	})
}
