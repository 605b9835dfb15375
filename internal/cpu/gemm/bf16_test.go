package gemm

import (
	"errors"
	"math"
	"testing"

	"github.com/kasmina-go/kasmina/internal/cpu/cputest"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// bf16Of rounds to the nearest bfloat16, ties to even.
func bf16Of(v float32) float64 {
	return float64(math.Float32frombits(math.Float32bits(lastPair(v)) << 16))
}

// TestRoundedProducts compares products with rounded operands with float64 sums of individually
// rounded operands, for all forms and odd sizes, with canaries around C.
func TestRoundedProducts(t *testing.T) {
	if err := UseBFloat16(true); errors.Is(err, ErrNoBFloat16) {
		t.Skip(err)
	} else if err != nil {
		t.Fatal(err)
	}

	defer UseBFloat16(false)

	r := randtest.New(t)
	for _, c := range [][3]int{{128, 128, 128}, {129, 131, 127}, {64, 200, 333}, {1000, 33, 40},
		{17, 1021, 97}, {300, 16, 515}} {
		m, n, k := c[0], c[1], c[2]
		for form := range 4 {
			transA, transB := form&1 != 0, form&2 != 0
			lda, ldb, ldc := k+r.IntN(5), n+r.IntN(5), n+r.IntN(5)
			if transA {
				lda = m + r.IntN(5)
			}
			if transB {
				ldb = k + r.IntN(5)
			}
			a, b := cputest.Normal(r, max(m, k)*lda, 1), cputest.Normal(r, max(n, k)*ldb, 1)
			buf, out := cputest.Padded(m * ldc)
			copy(out, cputest.Normal(r, m*ldc, 1))
			was := append([]float32(nil), out...)
			alpha, beta := float32(1.5), float32(form%3)
			Mul(transA, transB, m, n, k, alpha, a, lda, b, ldb, beta, out, ldc)
			cputest.CanariesLive(t, buf)
			var diff, norm float64
			for i := range m {
				for j := range ldc {
					got := float64(out[i*ldc+j])
					if j >= n {
						if out[i*ldc+j] != was[i*ldc+j] {
							t.Fatalf("%v form %d: wrote outside row %d", c, form, i)
						}
						continue
					}

					var sum float64
					for p := range k {
						x, y := a[i*lda:], b[p*ldb:]
						ax, by := x[min(p, len(x)-1)], y[min(j, len(y)-1)]
						if transA {
							ax = a[p*lda+i]
						}
						if transB {
							by = b[j*ldb+p]
						}
						sum += bf16Of(ax) * bf16Of(by)
					}

					want := float64(alpha)*sum + float64(beta)*float64(was[i*ldc+j])
					diff += (got - want) * (got - want)
					norm += want * want
				}
			}

			if e := math.Sqrt(diff / norm); !(e < 1e-6) {
				t.Errorf("%v transA=%v transB=%v: relative error %.2g", c, transA, transB, e)
			}
		}
	}
}

// TestRoundedProductsKeepNaN checks that NaN and infinities show in the result.
func TestRoundedProductsKeepNaN(t *testing.T) {
	if err := UseBFloat16(true); err != nil {
		t.Skip(err)
	}

	defer UseBFloat16(false)

	const n = 128
	for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		for _, at := range []int{0, 127*n + 127, 63*n + 64} {
			a, b, c := make([]float32, n*n), make([]float32, n*n), make([]float32, n*n)
			for i := range a {
				a[i], b[i] = 1, 1
			}
			a[at] = float32(bad)
			Mul(false, true, n, n, n, 1, a, n, b, n, 0, c, n)
			for i, v := range c {
				if spoiled := i/n == at/n; spoiled == (v-v == 0) {
					t.Fatalf("%v at %d: element %d is %v", bad, at, i, v)
				}
			}
		}
	}
}
