package optimizer

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/quant"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// reference8 performs a step of AdamW with 8-bit moments on one block in float64, following the steps
// of bitsandbytes' kernel: dequantize, update, find the scale, quantize.
func reference8(p, g []float64, m, v []uint8, mScale, vScale *float64, s AdamWStep) {
	first, second := make([]float64, len(p)), make([]float64, len(p))
	t := float64(s.Step)
	var mMost, vMost float64
	for i := range p {
		m0 := float64(quant.Signed8.Values[m[i]]) * *mScale
		v0 := float64(quant.Unsigned8.Values[v[i]]) * *vScale
		if v0 == 0 && g[i] == 0 {
			m0 = 0
		}
		first[i] = s.Beta1*m0 + (1-s.Beta1)*g[i]
		second[i] = s.Beta2*v0 + (1-s.Beta2)*g[i]*g[i]
		p[i] -= s.LR * s.Decay * p[i]
		p[i] -= s.LR * first[i] / (1 - math.Pow(s.Beta1, t)) /
			(math.Sqrt(second[i]/(1-math.Pow(s.Beta2, t))) + s.Eps)
		mMost, vMost = max(mMost, math.Abs(first[i])), max(vMost, second[i])
	}

	*mScale, *vScale = mMost, vMost
	for i := range p {
		m[i], v[i] = 127, 0
		if mMost > 0 {
			m[i] = quant.Signed8.Code(float32(first[i] / mMost))
			if first[i] < 0 && m[i] == 127 {
				m[i] = 126
			}
		}
		if vMost > 0 {
			v[i] = quant.Unsigned8.Code(float32(second[i] / vMost))
		}
	}
}

// scaled returns random gradients of one of several kinds, which share a magnitude.
func scaled(r *rand.Rand, n int, kind string) []float64 {
	g := make([]float64, n)
	for i := range g {
		switch kind {
		case "normal":
			g[i] = r.NormFloat64()
		case "huge":
			g[i] = r.NormFloat64() * 0x1p60
		case "tiny":
			g[i] = r.NormFloat64() * 1e-15
		case "wide":
			g[i] = r.NormFloat64() * math.Exp2(-40*r.Float64())
		case "mostly zero":
			if r.IntN(20) == 0 {
				g[i] = r.NormFloat64()
			}
		}
	}

	return g
}

// TestAdamW8bit compares steps with the reference in float64, and in float32 from the same state, for
// odd sizes, blocks of zeros, and huge and tiny gradients.
func TestAdamW8bit(t *testing.T) {
	seed := randtest.Seed(t)
	r := rand.New(rand.NewPCG(seed, 8))
	for _, kind := range []string{"normal", "huge", "tiny", "wide", "mostly zero", "zero"} {
		for _, n := range []int{1, 255, 256, 257, 4099, 16384 + 5} {
			if n > 16384 && kind != "normal" {
				continue
			}
			blocks := (n + Block8 - 1) / Block8
			p, m, v := scaled(r, n, "normal"), make([]uint8, n), make([]uint8, n)
			mScale, vScale := make([]float64, blocks), make([]float64, blocks)
			for step := range 4 {
				s := AdamWStep{LR: 0.01, Beta1: 0.9, Beta2: 0.95, Eps: 1e-20, Decay: 0.1,
					Step: step + 1}
				g := scaled(r, n, kind)
				if n > Block8 {
					clear(g[:Block8])
				}

				// float32 starts each step from the reference's state, so that codes are comparable.
				p32, g32 := narrowed(p), narrowed(g)
				m32, v32 := append([]uint8(nil), m...), append([]uint8(nil), v...)
				mScale32, vScale32 := narrowed(mScale), narrowed(vScale)
				g0, mScaleBefore := slices.Clone(g), slices.Clone(mScale)
				AdamW8bit(p32, g32, m32, v32, mScale32, vScale32, s)

				wantP, wantM := append([]float64(nil), p...), append([]uint8(nil), m...)
				wantV := append([]uint8(nil), v...)
				wantMScale := append([]float64(nil), mScale...)
				wantVScale := append([]float64(nil), vScale...)
				for b := range blocks {
					lo, hi := b*Block8, min((b+1)*Block8, n)
					reference8(wantP[lo:hi], g[lo:hi], wantM[lo:hi], wantV[lo:hi], &wantMScale[b],
						&wantVScale[b], s)
				}
				AdamW8bit(p, g, m, v, mScale, vScale, s)

				what := []any{"seed %d, %s, %d elements, step %d", seed, kind, n, step}
				requireNear(t, wantP, p, 1e-9, what...)
				requireNear(t, wantMScale, mScale, 1e-12, what...)
				requireNear(t, wantVScale, vScale, 1e-12, what...)
				requireCodes(t, wantM, m, 0.001, what...)
				requireCodes(t, wantV, v, 0.001, what...)

				// Where m nearly cancels, or v is lost, few digits of a change remain accurate.
				requireNear(t, wantP, widened(p32), 1e-3, what...)
				for b := range blocks {
					// The precision lost in float32 depends on the terms of m, which may cancel.
					terms := 0.9 * mScaleBefore[b]
					for _, x := range g0[b*Block8 : min((b+1)*Block8, n)] {
						terms = max(terms, 0.1*math.Abs(x))
					}
					require.InDelta(t, wantMScale[b], mScale32[b], 1e-5*terms, what...)
				}
				requireNear(t, wantVScale, widened(vScale32), 1e-5, what...)
				requireCodes(t, wantM, m32, 0.01, what...)
				requireCodes(t, wantV, v32, 0.01, what...)
				for _, x := range g {
					require.Zero(t, x, "a gradient after the step")
				}
			}
		}
	}
}

// requireNear requires each number to be within a tolerance relative to the largest one in its block.
func requireNear(t *testing.T, want, got []float64, tolerance float64, what ...any) {
	t.Helper()
	for i := range want {
		if d := math.Abs(want[i] - got[i]); !(d <= tolerance*max(1e-300, math.Abs(want[i]))) &&
			!(math.Abs(want[i]) < 1 && d <= tolerance) {
			require.InDelta(t, want[i], got[i], tolerance*math.Abs(want[i]), what...)
		}
	}
}

// requireCodes requires equal codes. A share of the codes may be adjacent instead, because some numbers
// are so close to a midpoint that rounding decides.
func requireCodes(t *testing.T, want, got []uint8, share float64, what ...any) {
	t.Helper()
	differ := 0
	for i := range want {
		if want[i] != got[i] {
			differ++
			require.LessOrEqual(t, math.Abs(float64(want[i])-float64(got[i])), 1.0, what...)
		}
	}
	require.LessOrEqual(t, float64(differ), max(1, share*float64(len(want))), what...)
}

func narrowed(x []float64) []float32 {
	y := make([]float32, len(x))
	for i, v := range x {
		y[i] = float32(v)
	}
	return y
}

func widened(x []float32) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}

// TestAdamW8bitWithoutSquares checks that an element does not jump when its gradient vanishes and its
// second moment has been rounded to 0 because of a large one in its block.
func TestAdamW8bitWithoutSquares(t *testing.T) {
	p, m, v := make([]float32, 256), make([]uint8, 256), make([]uint8, 256)
	mScale, vScale := make([]float32, 1), make([]float32, 1)
	for step := range 10 {
		g := make([]float32, 256)
		if step == 0 {
			g[0], g[1] = 1, 1e-4 // its square is 10⁻⁸ of the scale
		}
		AdamW8bit(p, g, m, v, mScale, vScale, AdamWStep{LR: 0.01, Beta1: 0.9, Beta2: 0.95,
			Eps: 1e-8, Step: step + 1})
	}

	require.InDelta(t, 0, p[1], 0.2)
}
