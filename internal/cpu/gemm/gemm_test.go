package gemm

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/cputest"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// product is a call of Mul with its memory: matrices with odd strides, and a C inside a larger
// poisoned buffer.
type product[T cpu.Float] struct {
	operands[T]
	before, buf []T
	at          int
}

func newProduct[T cpu.Float](r *rand.Rand, transA, transB bool, m, n, k int,
	alpha, beta T) *product[T] {
	p := &product[T]{operands: operands[T]{transA: transA, transB: transB, m: m, n: n, k: k,
		alpha: alpha, beta: beta}}
	p.a, p.lda = randomMatrix[T](r, m, k, transA)
	p.b, p.ldb = randomMatrix[T](r, k, n, transB)
	p.ldc = n + r.IntN(3)*r.IntN(40)
	p.at = 64
	p.buf = make([]T, p.at+m*p.ldc+64)
	for i := range p.buf {
		p.buf[i] = cputest.Canary
	}

	p.c = p.buf[p.at : p.at+m*p.ldc]
	for i := range m {
		for j := range n {
			p.c[i*p.ldc+j] = T(r.NormFloat64())
			if beta == 0 {
				p.c[i*p.ldc+j] = T(math.NaN())
			}
		}
	}

	p.before = append([]T(nil), p.buf...)
	return p
}

// randomMatrix returns rows×cols values, stored transposed on request, in a slice without room beyond
// the last value.
func randomMatrix[T cpu.Float](r *rand.Rand, rows, cols int, trans bool) ([]T, int) {
	if trans {
		rows, cols = cols, rows
	}
	ld := cols + r.IntN(3)*r.IntN(40)
	x := make([]T, max(0, (rows-1)*ld+cols))
	for i := range x {
		x[i] = T(r.NormFloat64())
	}
	return x, ld
}

// check compares C elementwise with sums in float64, within the error bound of a sum of k rounded
// products, and checks the canaries around C.
func (p *product[T]) check(t *testing.T, eps float64) {
	t.Helper()
	a, b := contiguous(p.a, p.lda, p.m, p.k, p.transA), contiguous(p.b, p.ldb, p.n, p.k, !p.transB)
	for q := range p.buf {
		i, j := -1, -1
		if q >= p.at && p.ldc > 0 {
			i, j = (q-p.at)/p.ldc, (q-p.at)%p.ldc
		}
		if i < 0 || i >= p.m || j >= p.n {
			if p.buf[q] != cputest.Canary {
				t.Fatalf("written outside C: offset %d of %d×%d, stride %d",
					q-p.at, p.m, p.n, p.ldc)
			}
			continue
		}

		var sum, size float64
		col := b[j*p.k : (j+1)*p.k]
		for l, x := range a[i*p.k : (i+1)*p.k] {
			x *= float64(p.alpha) * col[l]
			sum += x
			size += math.Abs(x)
		}

		if p.beta != 0 {
			x := float64(p.beta) * float64(p.before[q])
			sum += x
			size += math.Abs(x)
		}

		if d := math.Abs(float64(p.buf[q]) - sum); !(d <= eps*(4+math.Sqrt(float64(p.k)))*size) {
			t.Fatalf("C[%d,%d] = %v, want %v (difference %.2g)", i, j, p.buf[q], sum, d)
		}
	}
}

// contiguous returns the rows×cols values of a matrix, stored transposed or not, in float64 and row
// by row.
func contiguous[T cpu.Float](x []T, ld, rows, cols int, trans bool) []float64 {
	rowStride, colStride := ld, 1
	if trans {
		rowStride, colStride = 1, ld
	}

	out := make([]float64, 0, rows*cols)
	for i := range rows {
		for j := range cols {
			out = append(out, float64(x[i*rowStride+j*colStride]))
		}
	}

	return out
}

func (p *product[T]) run(f func(bool, bool, int, int, int, T, []T, int, []T, int, T, []T, int)) {
	f(p.transA, p.transB, p.m, p.n, p.k, p.alpha, p.a, p.lda, p.b, p.ldb, p.beta, p.c, p.ldc)
}

// transpositions returns the forms of A and B for testing case i: all four, or one in turn with
// -short.
func transpositions(i int) []int {
	if testing.Short() {
		return []int{i % 4}
	}
	return []int{0, 1, 2, 3}
}

func TestGemm(t *testing.T) {
	cputest.EachISA(t, func(t *testing.T) {
		t.Run("float32", func(t *testing.T) { testGemm[float32](t, 1.0/(1<<23)) })
		t.Run("float64", func(t *testing.T) { testGemm[float64](t, 1.0/(1<<52)) })
	})
}

func testGemm[T cpu.Float](t *testing.T, eps float64) {
	r := randtest.New(t)
	shapes := [][3]int{{0, 3, 4}, {3, 0, 4}, {3, 4, 0}, {1, 1, 1}, {1, 300, 65}, {300, 1, 65},
		{17, 33, 1}, {64, 64, 64},
		{32, 64, 64}, {2, 37, 130}, {14, 32, 256}, {16, 100, 300}, {29, 65, 257}, {60, 40, 515},
		{3, 1100, 17}, {40, 1050, 9}}
	for m := 1; m <= 15; m++ { // every height of a tile, with a last column of every width
		shapes = append(shapes, [3]int{m, 1 + r.IntN(70), 1 + r.IntN(40)},
			[3]int{15 + m, 16 + m, 1 + r.IntN(40)})
	}

	for range 8 {
		shapes = append(shapes, [3]int{1 + r.IntN(80), 1 + r.IntN(80), 1 + r.IntN(300)})
	}

	scalars := []T{0, 1, -0.75}
	for i, s := range shapes {
		for _, trans := range transpositions(i) {
			transA, transB := trans&1 != 0, trans&2 != 0
			alpha, beta := scalars[max(r.IntN(6)-3, 0)], scalars[r.IntN(3)]
			if r.IntN(4) > 0 {
				alpha = 1
			}
			p := newProduct(r, transA, transB, s[0], s[1], s[2], alpha, beta)
			t.Run(fmt.Sprintf("%dx%dx%d,%v,%v,alpha=%v,beta=%v,lda=%d,ldb=%d,ldc=%d", s[0], s[1],
				s[2], transA, transB, alpha, beta, p.lda, p.ldb, p.ldc), func(t *testing.T) {
				p.run(Mul[T])
				p.check(t, eps)
				first := append([]T(nil), p.buf...)
				copy(p.buf, p.before)
				p.run(MulSerial[T])
				cputest.SameBits(t, first, p.buf)
			})
		}
	}
}

// TestGemmAdds checks that a product that adds D is bit-identical to the product followed by an
// addition, for one and several steps along k, and for few and many rows.
func TestGemmAdds(t *testing.T) {
	cputest.EachISA(t, func(t *testing.T) {
		r := randtest.New(t)
		for _, s := range [][3]int{{1, 5, 3}, {20, 40, 50}, {33, 31, 256}, {15, 33, 257},
			{100, 65, 700}, {40, 600, 30}, {130, 64, 1025}, {7, 9, 0}} {
			for _, beta := range []float32{0, 1, -0.75} {
				p := newProduct[float32](r, s[0]%2 == 0, s[1]%2 == 0, s[0], s[1], s[2], 1, beta)
				d := cputest.Normal(r, s[0]*s[1], 1)
				g := p.operands
				g.d = d
				multiply(true, g)
				got := slices.Clone(p.buf)
				copy(p.buf, p.before)
				p.run(Mul[float32])
				for i := range g.m {
					for j := range g.n {
						g.c[i*g.ldc+j] += d[i*g.n+j]
					}
				}
				cputest.SameBits(t, p.buf, got)
			}
		}
	})
}

// TestGemmCores checks that the number of cores, and the resulting blocks of C, do not affect the
// result.
func TestGemmCores(t *testing.T) {
	cputest.EachISA(t, func(t *testing.T) {
		r := randtest.New(t)
		for i, s := range [][3]int{{130, 70, 515}, {16, 600, 300}, {60, 700, 300}, {100, 40, 700}} {
			for _, trans := range transpositions(i) {
				p := newProduct[float32](r, trans&1 != 0, trans&2 != 0, s[0], s[1], s[2], 1, 0.5)
				p.run(MulSerial[float32])
				want := append([]float32(nil), p.buf...)
				for _, cores := range []int{2, 3, 8} {
					copy(p.buf, p.before)
					old := runtime.GOMAXPROCS(cores)
					p.run(Mul[float32])
					runtime.GOMAXPROCS(old)
					cputest.SameBits(t, want, p.buf)
				}
			}
		}
	})
}

func TestGemmPartsOfPackedB(t *testing.T) {
	// Larger than the part packed at a time, so that C is computed from several parts in both
	// directions.
	r := randtest.New(t)
	for _, s := range [][3]int{{15, 1100, 1300}, {18, 20, 60000}, {17, 2000, 700}} {
		p := newProduct[float32](r, false, s[0] == 18, s[0], s[1], s[2], 1, 0)
		p.run(Mul[float32])
		p.check(t, 1.0/(1<<23))
	}
}

func TestGemmRefusesShortSlices(t *testing.T) {
	for name, f := range map[string]func(){
		"a": func() {
			MulSerial(false, false, 3, 3, 3, 1, make([]float32, 8), 3, make([]float32, 9), 3, 0,
				make([]float32, 9), 3)
		},
		"b": func() {
			MulSerial(false, true, 3, 3, 3, 1, make([]float32, 9), 3, make([]float32, 8), 3, 0,
				make([]float32, 9), 3)
		},
		"c": func() {
			MulSerial(true, false, 3, 3, 3, 1, make([]float32, 9), 3, make([]float32, 9), 3, 0,
				make([]float32, 8), 3)
		},
		"lda": func() {
			MulSerial(true, false, 3, 3, 3, 1, make([]float32, 9), 2, make([]float32, 9), 3, 0,
				make([]float32, 9), 3)
		},
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			f()
		})
	}
}

func TestFMAPeak(t *testing.T) {
	cputest.EachISA(t, func(t *testing.T) {
		peak := FMAPeak(1, time.Millisecond)
		for range 50 { // another process may have used the CPU during most of an attempt
			if peak == 0 || peak >= 1e8 {
				break
			}
			peak = FMAPeak(1, time.Millisecond)
		}
		if (cpu.Level() == cpu.Generic) != (peak == 0) || peak > 0 && peak < 1e8 {
			t.Errorf("peak of %.3g operations a second", peak)
		}
	})
}

// TestGemmFetches checks that every tile of a block has prefetched the part of A that the next tile
// reads and it has not read itself: everything if A is not transposed, and the last column if it
// is.
func TestGemmFetches(t *testing.T) {
	const line = 64
	r := randtest.New(t)
	for range 200 {
		j := job[float32]{kn: &kernels[float32]{mr: 1 + r.IntN(14), pairs: r.IntN(2) == 0}}
		j.m, j.k, j.transA = 1+r.IntN(100), 1+r.IntN(1200), r.IntN(2) == 0
		j.depth = j.k
		rows, cols := j.m, j.k
		if j.transA {
			rows, cols = cols, rows
		}
		j.lda = cols + r.IntN(40)
		j.a = make([]float32, rows*j.lda)
		lineOf := func(x []float32) uintptr {
			return uintptr(unsafe.Pointer(unsafe.SliceData(x))) / line
		}
		i0 := r.IntN(j.m)
		i1 := i0 + 1 + r.IntN(j.m-i0)
		for p := 0; p < j.depth; p += j.kn.deepest() {
			kc := min(j.kn.deepest(), j.depth-p)
			for i, m := i0, 0; i < i1; i += m {
				m = cpu.CeilDiv(i1-i, cpu.CeilDiv(i1-i, j.kn.mr))

				// The tile after this one, unless it belongs to another block or depth.
				nextI, nextP := i+m, p
				if nextI == i1 {
					nextI, nextP = i0, p+kc
				}
				if nextP+kc > j.depth {
					continue
				}

				f := j.next(i, m, i0, i1, p)
				fetched := map[uintptr]bool{}
				first := uintptr(unsafe.Pointer(unsafe.SliceData(f.next)))
				for panel := range f.panels {
					for s := range cpu.CeilDiv(j.kn.steps(kc), gemmFetchSteps) {
						at := first + uintptr(panel*f.jump+s*f.step)
						fetched[at/line], fetched[(at+uintptr(f.stride))/line] = true, true
					}
				}

				rows := cpu.CeilDiv(i1-nextI, cpu.CeilDiv(i1-nextI, j.kn.mr))
				for q := nextP; q < nextP+kc; q++ {
					if j.transA && rows == m && !fetched[lineOf(j.a[q*j.lda+nextI+rows-1:])] {
						t.Fatalf("m %d of %d, k %d, A transposed: row %d of the tile at (%d, %d) "+
							"is not fetched", m, j.m, j.k, q, nextI, nextP)
					}
					for i := nextI; !j.transA && i < nextI+min(m, rows); i++ {
						// If rows do not start at a cache line, their last elements may be in
						// another one.
						if end := max(nextP,
							min(q, nextP+kc-line/4)); !fetched[lineOf(j.a[i*j.lda+end:])] {
							t.Fatalf("m %d of %d, k %d: element (%d, %d) of the tile at (%d, %d) "+
								"is not fetched", m, j.m, j.k, i, q, nextI, nextP)
						}
					}
				}
			}
		}
	}
}
