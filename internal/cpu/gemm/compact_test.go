package gemm

import (
	"fmt"
	"math"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/cputest"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// TestStripOffsets checks the offsets of fields that the assembly relies on.
func TestStripOffsets(t *testing.T) {
	var s strip
	require.Equal(t, []uintptr{0, 8, 16, 24, 32, 40, 48}, []uintptr{unsafe.Offsetof(s.m),
		unsafe.Offsetof(s.k), unsafe.Offsetof(s.x), unsafe.Offsetof(s.xs), unsafe.Offsetof(s.b),
		unsafe.Offsetof(s.c), unsafe.Offsetof(s.cs)})
}

func newCompact(t *testing.T, typ CompactType, out, in int, values []float32) *Compact {
	t.Helper()
	w := NewCompact(typ, out, in, new(cpu.Slab))
	require.NoError(t, w.Set(0, values))
	return w
}

// TestCompactLinear compares products of all shapes with sums in float64 over the rounded weights, with
// every instruction set. The results must be the same bits for any number of rows and of cores, and
// nothing may be read or written outside the operands.
func TestCompactLinear(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	cputest.EachISA(t, func(t *testing.T) {
		r := randtest.New(t)
		for _, typ := range []CompactType{Float32, BFloat16, Q8} {
			for _, s := range [][3]int{{1, 1, 1}, {2, 33, 31}, {3, 64, 32}, {4, 31, 95}, {5, 100, 130}, {6, 32, 257},
				{7, 40, 256}, {8, 129, 320}, {9, 65, 288}, {13, 70, 64}, {131, 97, 300}, {1, 300, 1024}, {3, 1100, 96},
				{2, 2081, 130}} {
				rows, out, in := s[0], s[1], s[2]
				t.Run(fmt.Sprintf("%v %v", typ, s), func(t *testing.T) {
					w := newCompact(t, typ, out, in, cputest.Normal(r, out*in, 1))
					x := guarded[float32](t, rows*in)
					copy(x, cputest.Normal(r, rows*in, 1))
					buf, y := cputest.Padded(rows * out)
					for i := range y {
						y[i] = float32(math.NaN())
					}

					runtime.GOMAXPROCS(1)
					w.Linear(nil, y, x, rows)
					cputest.CanariesLive(t, buf)
					checkCompact(t, w, y, x, rows)

					// Again on several cores, and row by row.
					runtime.GOMAXPROCS(4)
					again := make([]float32, rows*out)
					w.Linear(nil, again, x, rows)
					cputest.SameBits(t, y, again)
					for i := range rows {
						w.Linear(nil, again, x[i*in:][:in], 1)
						cputest.SameBits(t, y[i*out:][:out], again[:out])
					}
				})
			}
		}
	})
}

// checkCompact compares y with x·wᵀ.
func checkCompact(t *testing.T, w *Compact, y, x []float32, rows int) {
	t.Helper()
	weights := make([]float32, w.Out*w.In)
	w.Expand(weights)
	for i := range rows {
		for j := range w.Out {
			want, size := 0.0, 0.0
			for k := range w.In {
				v := float64(x[i*w.In+k]) * float64(weights[j*w.In+k])
				want, size = want+v, size+math.Abs(v)
			}
			if got := float64(y[i*w.Out+j]); !(math.Abs(got-want) <= 1e-6*size) {
				t.Fatalf("element %d, %d is %v, want %v", i, j, got, want)
			}
		}
	}
}

// TestCompactRounds checks that weights are rounded as documented, and that weights outside the range of
// the type are rejected.
func TestCompactRounds(t *testing.T) {
	r := randtest.New(t)
	const out, in = 70, 90
	values := cputest.Normal(r, out*in, 3)
	clear(values[5*in:][:64])
	values[6*in] = 1e-42
	for typ, size := range map[CompactType]int{Float32: 96 * 90 * 4, BFloat16: 96 * 90 * 2, Q8: 96 * 3 * 34} {
		w := newCompact(t, typ, out, in, values)
		require.Equal(t, size, w.Bytes())
		got, row := make([]float32, out*in), make([]float32, in)
		w.Expand(got)
		for i := range out {
			w.Row(row, i)
			require.Equal(t, row, got[i*in:][:in])
		}
		for at, v := range values {
			off := math.Abs(float64(got[at] - v))
			limit := math.Abs(float64(v)) / 256
			switch typ {
			case Float32:
				limit = 0
			case Q8: // half a step, and the error of the scale
				block := values[at/in*in+at%in/32*32:][:min(32, in-at%in/32*32)]
				largest := 0.0
				for _, v := range block {
					largest = max(largest, math.Abs(float64(v)))
				}
				limit = largest/127*0.5 + largest/2048 + 1e-7
			}
			require.LessOrEqual(t, off, limit+1e-41, "%v: %v became %v", typ, v, got[at])
		}

		for _, bad := range []float32{float32(math.NaN()), float32(math.Inf(1)), math.MaxFloat32} {
			if typ == Float32 && bad == math.MaxFloat32 {
				continue
			}
			values := append([]float32(nil), values...)
			values[33*in+7] = bad
			require.ErrorContains(t, w.Set(0, values), "rows 32 to 63", "%v", bad)
		}
	}
}

// TestCompactTogether checks that products are bit-identical whether they are computed together or one after
// the other.
func TestCompactTogether(t *testing.T) {
	cputest.EachISA(t, func(t *testing.T) {
		r := randtest.New(t)
		const in = 100
		for _, typ := range []CompactType{Float32, BFloat16, Q8} {
			for _, rows := range []int{1, 7, 140} {
				x := cputest.Normal(r, rows*in, 1)
				var all []CompactProduct
				for _, out := range []int{70, 32, 129} {
					w := newCompact(t, typ, out, in, cputest.Normal(r, out*in, 1))
					y := make([]float32, rows*out)
					for i := range y {
						y[i] = float32(math.NaN())
					}
					all = append(all, CompactProduct{y, w})
				}

				CompactLinear(nil, x, rows, all...)
				for _, p := range all {
					want := make([]float32, len(p.Y))
					p.W.Linear(nil, want, x, rows)
					cputest.SameBits(t, want, p.Y)
				}
			}
		}
	})
}

// TestCompactStops checks that a product ends early on request.
func TestCompactStops(t *testing.T) {
	w := newCompact(t, Q8, 64, 64, make([]float32, 64*64))
	stop, y := new(cpu.Stop), []float32{63: 5}
	stop.Ask()
	w.Linear(stop, y, make([]float32, 64), 1)
	require.EqualValues(t, 5, y[63])
}

// BenchmarkCompact reports how fast products with few rows read the weights of a model of 124 million
// parameters, and how fast products with many rows compute.
func BenchmarkCompact(b *testing.B) {
	for _, typ := range []CompactType{Float32, BFloat16, Q8} {
		for _, rows := range []int{1, 2, 3, 4, 6, 8, 128} {
			b.Run(fmt.Sprintf("%v rows=%d", typ, rows), func(b *testing.B) {
				const dim, ff, vocab, layers = 768, 2048, 50304, 12
				var slab cpu.Slab
				var all []*Compact
				bytes, weights := 0, 0
				add := func(out, in int) {
					w := NewCompact(typ, out, in, &slab)
					if err := w.Set(0, make([]float32, out*in)); err != nil {
						b.Fatal(err)
					}
					all, bytes, weights = append(all, w), bytes+w.Bytes(), weights+out*in
				}
				for range layers {
					for range 4 {
						add(dim, dim)
					}
					add(ff, dim)
					add(ff, dim)
					add(dim, ff)
				}
				add(vocab, dim)
				x, y := make([]float32, rows*ff), make([]float32, rows*vocab)

				best := time.Duration(math.MaxInt64)
				for b.Loop() {
					from := time.Now()
					for _, w := range all {
						w.Linear(nil, y, x, rows)
					}
					best = min(best, time.Since(from))
				}
				b.ReportMetric(float64(bytes)/best.Seconds()/1e9, "GB/s")
				b.ReportMetric(2*float64(weights*rows)/best.Seconds()/1e9, "GFLOP/s")
				b.ReportMetric(best.Seconds()*1e3, "best-ms")
			})
		}
	}
}
