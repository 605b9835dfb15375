package vec

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kasmina-go/kasmina/internal/cpu/cputest"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// ulps returns the difference of got and want in units in the last place of a float32 of want's
// magnitude.
func ulps(got float32, want float64) float64 {
	if math.IsNaN(want) && math.IsNaN(float64(got)) || float64(got) == want {
		return 0
	}

	w := float32(want)
	if math.IsInf(float64(w), 0) || math.IsInf(float64(got), 0) || got != got || w != w {
		if got == w {
			return 0
		}
		return math.Inf(1)
	}

	unit := math.Max(math.Ldexp(1, -149),
		math.Abs(float64(math.Nextafter32(w, float32(math.Inf(1))))-float64(w)))
	return math.Abs(float64(got)-want) / unit
}

func TestExp(t *testing.T) {
	r := randtest.New(t)
	inf := float32(math.Inf(1))
	x := []float32{0, float32(math.Copysign(0, -1)), 1, -1, inf, -inf, float32(math.NaN()),
		88.72283, 88.72284, 89, 1e30, -1e30,
		-87.33654, -87.4, -103.9, -103.97, -104, -104.6, 1e-30, -1e-45, 0.34657359, -0.34657359}
	for range 200000 {
		x = append(x, r.Float32()*195-105, float32(r.NormFloat64()),
			math.Float32frombits(r.Uint32()))
	}

	cputest.EachISA(t, func(t *testing.T) {
		dst := make([]float32, len(x))
		ExpSub(dst, x, 0)
		worst := 0.0
		for i, v := range x {
			d := ulps(dst[i], math.Exp(float64(v)))
			worst = max(worst, d)
			if d > 2 {
				t.Fatalf("exp(%v) = %v, want %v", v, dst[i], math.Exp(float64(v)))
			}
		}
		t.Logf("largest error %.3f ulp", worst)
	})
}

func TestExpSubAndMax(t *testing.T) {
	cputest.EachISA(t, func(t *testing.T) {
		r := randtest.New(t)
		for n := range 100 {
			x := cputest.Normal(r, n, 5)
			if n > 3 {
				x[r.IntN(n)] = float32(math.Inf(-1))
			}
			m := Max(x)
			want := float32(math.Inf(-1))
			for _, v := range x {
				want = max(want, v)
			}
			if m != want {
				t.Fatalf("maximum of %v is %v, want %v", x, m, want)
			}

			if n == 0 {
				m = 0
			}
			buf, dst := cputest.Padded(n)
			sum := ExpSub(dst, x, m)
			var ref float64
			for i, v := range x {
				e := math.Exp(float64(v - m))
				ref += e
				if ulps(dst[i], e) > 2 {
					t.Fatalf("exp(%v − %v) = %v, want %v", v, m, dst[i], e)
				}
			}

			// Each term is correct to 2 units in the last place, at most 4 of 2⁻²⁴, and each
			// addition adds a rounding error of one.
			if !(math.Abs(float64(sum)-ref) <= 0x1p-24*float64(n+5)*ref) {
				t.Fatalf("%d elements sum to %v, want %v", n, sum, ref)
			}

			cputest.CanariesLive(t, buf)
			again := append([]float32(nil), x...)
			if s := ExpSub(again, again, m); s != sum {
				t.Fatalf("in place %v, before %v", s, sum)
			}
			cputest.SameBits(t, dst, again)
		}

		if x := []float32{1, float32(math.NaN()), 2}; !math.IsNaN(float64(ExpSub(x, x, 2))) {
			t.Error("a NaN was hidden")
		}
	})
}

func TestSiLUMulKernels(t *testing.T) {
	cputest.EachISA(t, func(t *testing.T) {
		r := randtest.New(t)
		for n := range 100 {
			a, b, g := cputest.Normal(r, n, 1+50*r.Float64()), cputest.Normal(r, n, 1),
				cputest.Normal(r, n, 1)
			hBuf, h := cputest.Padded(n)
			SiLUMul(h, a, b)
			cputest.CanariesLive(t, hBuf)
			h2Buf, h2 := cputest.Padded(n)
			daBuf, da := cputest.Padded(n)
			dbBuf, db := cputest.Padded(n)
			copy(da, g)
			SiLUMulBackward(h2, da, db, da, a, b)
			for _, buf := range [][]float32{h2Buf, daBuf, dbBuf} {
				cputest.CanariesLive(t, buf)
			}
			cputest.SameBits(t, h, h2)
			for i := range n {
				x, y, dy := float64(a[i]), float64(b[i]), float64(g[i])
				s := 1 / (1 + math.Exp(-x))

				// Below a = −87, σ(a) and products with it only have the precision of a denormal
				// number.
				lost := math.Ldexp(1, -147) * (1 + math.Abs(x)) * (1 +
					math.Abs(y)) * (1 + math.Abs(dy))
				if d := math.Abs(float64(h[i]) - x*s*y); !(d <= 5e-7*math.Abs(x*s*y)+lost) {
					t.Fatalf("silu(%v)·%v = %v, want %v", x, y, h[i], x*s*y)
				}
				if d := math.Abs(float64(db[i]) - dy*x*s); !(d <= 5e-7*math.Abs(dy*x*s)+lost) {
					t.Fatalf("db = %v, want %v for a = %v", db[i], dy*x*s, x)
				}

				// The bracket passes through zero near a = −1.28, so its larger term bounds the
				// error.
				bound := 1e-6*math.Abs(dy*y*s)*(1+math.Abs(x*(1-s))) + lost
				if want := dy * y * s * (1 + x*(1-s)); !(math.Abs(float64(da[i])-want) <= bound) {
					t.Fatalf("da = %v, want %v for a = %v", da[i], want, x)
				}
			}
		}
	})
}

// TestVectorsDependOnNoPosition checks that the result for an element is the same in a whole vector
// and in a partial one.
func TestVectorsDependOnNoPosition(t *testing.T) {
	cputest.EachISA(t, func(t *testing.T) {
		r := randtest.New(t)
		a, b := cputest.Normal(r, 77, 3), cputest.Normal(r, 77, 3)
		whole, part := make([]float32, 77), make([]float32, 77)
		SiLUMul(whole, a, b)
		for lo := 0; lo < 77; {
			hi := min(77, lo+1+r.IntN(20))
			SiLUMul(part[lo:hi], a[lo:hi], b[lo:hi])
			lo = hi
		}
		cputest.SameBits(t, whole, part)
	})
}

func TestVectorsInFloat64(t *testing.T) {
	r := randtest.New(t)
	x, y := make([]float64, 33), make([]float64, 33)
	for i := range x {
		x[i] = r.NormFloat64()
	}

	m := Max(x)
	sum, ref := ExpSub(y, x, m), 0.0
	for i, v := range x {
		if y[i] != math.Exp(v-m) {
			t.Fatalf("exp(%v) = %v", v-m, y[i])
		}
		ref += y[i]
	}

	if math.Abs(sum-ref) > 1e-14 {
		t.Errorf("sum %v, want %v", sum, ref)
	}
}

func BenchmarkVectors(b *testing.B) {
	const n = 4096
	r := rand.New(rand.NewPCG(1, 2))
	x, y, z, g := cputest.Normal(r, n, 1), cputest.Normal(r, n, 1),
		make([]float32, n), make([]float32, n)
	for name, f := range map[string]func(){
		"ExpSub":          func() { ExpSub(z, x, 1) },
		"ExpSub64":        func() { ExpSub(z[:64], x[:64], 1) },
		"Max":             func() { Max(x) },
		"siluMul":         func() { SiLUMul(z, x, y) },
		"siluMulBackward": func() { SiLUMulBackward(z, g, g, y, x, y) },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				f()
			}
		})
	}
}
