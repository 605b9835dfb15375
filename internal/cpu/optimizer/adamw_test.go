package optimizer

import (
	"math"
	"testing"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/cputest"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

func TestAdamWFollowsTheFormula(t *testing.T) {
	r := randtest.New(t)
	const n = 3*cpu.VectorGrain + 5
	p, g, m, v := cputest.Normals(r, n), cputest.Normals(r, n),
		cputest.Normals(r, n), cputest.Normals(r, n)
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

	p32, g32, m32, v32 := cputest.Narrow(p), cputest.Narrow(g), cputest.Narrow(m), cputest.Narrow(v)
	AdamW(p, g, m, v, s)
	AdamW(p32, g32, m32, v32, s)
	for name, e := range map[string]float64{"p": cputest.Relative(p, wantP),
		"m": cputest.Relative(m, wantM), "v": cputest.Relative(v, wantV)} {
		if !(e < 1e-13) {
			t.Errorf("float64 %s: relative error %.2g", name, e)
		}
	}

	for name, e := range map[string]float64{"p": cputest.Relative(cputest.Widen(p32), wantP),
		"m": cputest.Relative(cputest.Widen(m32), wantM),
		"v": cputest.Relative(cputest.Widen(v32), wantV)} {
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

func BenchmarkAdamW(b *testing.B) {
	const n = 1 << 20
	p, g, m, v := make([]float32, n), make([]float32, n), make([]float32, n), make([]float32, n)
	s := AdamWStep{LR: 1e-3, Beta1: 0.9, Beta2: 0.999, Eps: 1e-8, Decay: 0.1, Step: 1}
	b.SetBytes(8 * 4 * n) // four arrays read and written
	for b.Loop() {
		AdamW(p, g, m, v, s)
	}
}
