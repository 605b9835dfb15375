//go:build !race

package gemm

import (
	"testing"

	"github.com/kasmina-go/kasmina/internal/allocs"
	"github.com/kasmina-go/kasmina/internal/cpu/cputest"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// The race detector makes sync.Pool drop values at random, so these tests are excluded from such
// builds.
func TestGemmAllocatesNothing(t *testing.T) {
	r := randtest.New(t)
	for _, p := range []*product[float32]{
		newProduct[float32](r, false, true, 64, 64, 64, 1, 0),
		newProduct[float32](r, false, false, 1, 13, 200, 1, 0), // B in place
	} {
		if n := allocs.PerRun(100, func() { p.run(MulSerial[float32]) }); n >= 1 {
			t.Errorf("%d×%d×%d: %v allocations a call", p.m, p.n, p.k, n)
		}
	}
}

func TestCompactAllocatesNothing(t *testing.T) {
	r := randtest.New(t)
	const out, in = 70, 40
	for _, typ := range []CompactType{Float32, BFloat16, Q8} {
		w := newCompact(t, typ, out, in, cputest.Normal(r, out*in, 1))
		x, y := cputest.Normal(r, 3*in, 1), make([]float32, 3*out)
		if n := allocs.PerRun(100, func() { w.Linear(nil, y, x, 3) }); n >= 1 {
			t.Errorf("%v: %v allocations a call", typ, n)
		}
	}
}

func TestRoundedProductsAllocate(t *testing.T) {
	if err := UseBFloat16(true); err != nil {
		t.Skip(err)
	}
	defer UseBFloat16(false)

	const n = 256
	a, c := make([]float32, n*n), make([]float32, n*n)
	if got := allocs.PerRun(50, func() {
		Mul(false, true, n, n, n, 1, a, n, a, n, 0, c, n)
	}); got > 1 {
		t.Errorf("a product allocates %v times", got)
	}
}
