package gemm

import (
	"fmt"
	"runtime"
	"testing"
	"time"
)

// BenchmarkGemm reports the speed and its share of the multiply-add peak, measured just before and
// after.
func BenchmarkGemm(b *testing.B) {
	for _, s := range []struct {
		m, n, k        int
		transA, transB bool
		serial         bool
	}{
		{1024, 1024, 1024, false, false, false},
		{1024, 1024, 1024, false, true, false},
		{1024, 1024, 1024, true, false, false},
		{1024, 256, 256, false, true, false},  // attention's projections
		{1024, 704, 256, false, true, false},  // up
		{1024, 256, 704, false, true, false},  // down
		{1024, 256, 704, false, false, false}, // gradient through up
		{256, 256, 1024, true, false, false},  // gradients of weights
		{704, 256, 1024, true, false, false},
		{64, 64, 64, false, true, true}, // tiles of attention
		{64, 64, 64, false, false, true},
		{64, 64, 64, true, false, true},
		{32, 64, 64, false, true, true},
		{1, 704, 256, false, true, false}, // one token
		{8, 704, 256, false, true, false},
		{16, 704, 256, false, true, false},
	} {
		name := fmt.Sprintf("%dx%dx%d,%v,%v", s.m, s.n, s.k, s.transA, s.transB)
		b.Run(name, func(b *testing.B) {
			lda, ldb := s.k, s.n
			if s.transA {
				lda = s.m
			}

			if s.transB {
				ldb = s.k
			}

			x, w, y := make([]float32, s.m*s.k), make([]float32, s.k*s.n), make([]float32, s.m*s.n)
			for i := range x {
				x[i] = float32(i%7) - 3
			}

			for i := range w {
				w[i] = float32(i%5) - 2
			}

			f := Mul[float32]
			if s.serial {
				f = MulSerial[float32]
			}

			cores := runtime.GOMAXPROCS(0)
			if s.serial {
				cores = 1
			}

			before := FMAPeak(cores, 20*time.Millisecond)
			b.ReportAllocs()
			for b.Loop() {
				f(s.transA, s.transB, s.m, s.n, s.k, 1, x, lda, w, ldb, 0, y, s.n)
			}

			speed := 2 * float64(s.m*s.n*s.k) * float64(b.N) / b.Elapsed().Seconds()
			b.ReportMetric(speed/1e9, "GFLOP/s")
			if peak := (before + FMAPeak(cores, 20*time.Millisecond)) / 2; peak > 0 {
				b.ReportMetric(100*speed/peak, "%peak")
			}
		})
	}
}
