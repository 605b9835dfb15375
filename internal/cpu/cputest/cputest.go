// Package cputest provides helpers for testing CPU kernels. They run tests with every instruction
// set, provide buffers that reveal out-of-bounds writes, and generate random numbers.
package cputest

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// EachISA runs f with every instruction set that this machine supports.
func EachISA(t *testing.T, f func(t *testing.T)) {
	best := cpu.Level()
	defer cpu.UseISA(best)
	for _, l := range cpu.ISAs() {
		cpu.UseISA(l)
		t.Run(l.String(), f)
	}
}

// Canary is the value around the writable part of a padded buffer.
const Canary = 31

// SameBits fails the test unless both slices hold the same numbers, bit for bit.
func SameBits[T cpu.Float](t *testing.T, want, got []T) {
	t.Helper()
	for i := range want {
		if math.Float64bits(float64(want[i])) != math.Float64bits(float64(got[i])) {
			t.Fatalf("offset %d: %v, then %v", i, want[i], got[i])
		}
	}
}

// Padded returns n elements, mid, surrounded by canaries in buf.
func Padded(n int) (buf, mid []float32) {
	buf = make([]float32, n+64)
	for i := range buf {
		buf[i] = Canary
	}
	return buf, buf[32 : 32+n]
}

// CanariesLive fails the test if anything was written outside the writable part of a buffer from
// [Padded].
func CanariesLive(t *testing.T, buf []float32) {
	t.Helper()
	for i, v := range buf {
		if (i < 32 || i >= len(buf)-32) && v != Canary {
			t.Fatalf("written outside, at offset %d of %d", i-32, len(buf)-64)
		}
	}
}

// Normal returns n normally distributed numbers with the given standard deviation.
func Normal(r *rand.Rand, n int, size float64) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64() * size)
	}
	return x
}

// Relative returns ‖got − want‖ / ‖want‖.
func Relative(got, want []float64) float64 {
	var d, n float64
	for i := range want {
		d += (got[i] - want[i]) * (got[i] - want[i])
		n += want[i] * want[i]
	}
	return math.Sqrt(d / n)
}

// Normals returns n numbers with a standard normal distribution.
func Normals(r *rand.Rand, n int) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = r.NormFloat64()
	}
	return x
}

// Narrow returns x rounded to float32.
func Narrow(x []float64) []float32 {
	y := make([]float32, len(x))
	for i, v := range x {
		y[i] = float32(v)
	}
	return y
}

// Widen returns x converted to float64.
func Widen(x []float32) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}

// Absolute replaces the elements of x by their magnitudes, and returns x.
func Absolute[T cpu.Float](x []T) []T {
	for i, v := range x {
		x[i] = max(v, -v)
	}
	return x
}
