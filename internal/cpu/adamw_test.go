package cpu

import (
	"math"
	"testing"
)

func TestAdamWFollowsTheFormula(t *testing.T) {
	r := freshRand(t)
	const n = 3*vectorGrain + 5
	p, g, m, v := normals(r, n), normals(r, n), normals(r, n), normals(r, n)
	for i := range v {
		v[i] *= v[i]
	}
	s := AdamWStep{LR: 0.03, Beta1: 0.8, Beta2: 0.97, Eps: 1e-6, Decay: 0.2, Step: 7}
	wantP, wantM, wantV := make([]float64, n), make([]float64, n), make([]float64, n)
	for i := range p {
		wantM[i] = 0.8*m[i] + 0.2*g[i]
		wantV[i] = 0.97*v[i] + 0.03*g[i]*g[i]
		mHat, vHat := wantM[i]/(1-math.Pow(0.8, 7)), wantV[i]/(1-math.Pow(0.97, 7))
		wantP[i] = p[i] - 0.03*0.2*p[i] - 0.03*mHat/(math.Sqrt(vHat)+1e-6)
	}
	p32, g32, m32, v32 := narrow(p), narrow(g), narrow(m), narrow(v)
	AdamW(p, g, m, v, s)
	AdamW(p32, g32, m32, v32, s)
	for name, e := range map[string]float64{"p": relative(p, wantP), "m": relative(m, wantM), "v": relative(v, wantV)} {
		if !(e < 1e-13) {
			t.Errorf("float64 %s: relative error %.2g", name, e)
		}
	}
	for name, e := range map[string]float64{"p": relative(widen(p32), wantP), "m": relative(widen(m32), wantM), "v": relative(widen(v32), wantV)} {
		if !(e < 1e-6) {
			t.Errorf("float32 %s: relative error %.2g", name, e)
		}
	}
	for i := range g {
		if g[i] != 0 || g32[i] != 0 {
			t.Fatalf("gradient %d is left at %v and %v, want 0", i, g[i], g32[i])
		}
	}
}

func TestVectorReductions(t *testing.T) {
	r := freshRand(t)
	for _, n := range []int{0, 1, vectorGrain - 1, vectorGrain, 2*vectorGrain + 3} {
		x := normals(r, n)
		var want float64
		for _, v := range x {
			want += v * v
		}
		if got := SumSquares(x); math.Abs(got-want) > 1e-10*want {
			t.Errorf("n=%d: sum of squares %v, want %v", n, got, want)
		}
		if i := FirstNonFinite(x); i != -1 {
			t.Errorf("n=%d: index %d of finite numbers is called non-finite", n, i)
		}
		if n < 2 {
			continue
		}
		at := r.IntN(n - 1)
		x[at], x[n-1] = math.Inf(-1), math.NaN()
		if i := FirstNonFinite(x); i != at {
			t.Errorf("n=%d: first non-finite element at %d, want %d", n, i, at)
		}
	}
}

func BenchmarkAdamW(b *testing.B) {
	const n = 1 << 20
	p, g, m, v := make([]float32, n), make([]float32, n), make([]float32, n), make([]float32, n)
	s := AdamWStep{LR: 1e-3, Beta1: 0.9, Beta2: 0.999, Eps: 1e-8, Decay: 0.1, Step: 1}
	b.SetBytes(8 * 4 * n) // four arrays read and written
	for b.Loop() {
		AdamW(p, g, m, v, s)
	}
}

func BenchmarkFirstNonFinite(b *testing.B) {
	x := make([]float32, 1<<20)
	b.SetBytes(4 * int64(len(x)))
	for b.Loop() {
		FirstNonFinite(x)
	}
}
