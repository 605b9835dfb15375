package half

import (
	"math"
	"testing"
)

// TestFloat16AllValues checks that converting every value to float64 and back returns the same bits, or another NaN.
func TestFloat16AllValues(t *testing.T) {
	for i := range 1 << 16 {
		h := Float16(i)
		v := h.Float64()
		if exp, fraction := i>>10&0x1f, i&0x3ff; exp == 0x1f && fraction != 0 {
			if v == v || NewFloat16(v).Float64() == NewFloat16(v).Float64() {
				t.Fatalf("%#04x is a NaN, reads as %v and comes back as %#04x", i, v, NewFloat16(v))
			}
			continue
		}
		if got := NewFloat16(v); got != h {
			t.Fatalf("%#04x reads as %v, which comes back as %#04x", i, v, got)
		}
		if math.Signbit(v) != (i>>15 != 0) {
			t.Fatalf("%#04x reads as %v: wrong sign", i, v)
		}
	}
}

// TestFloat16RoundsToNearestEven checks that every midpoint between neighbors rounds to the one
// with the even fraction, and that the next float64 on either side rounds to the nearer neighbor.
func TestFloat16RoundsToNearestEven(t *testing.T) {
	for i := range 0x7c00 {
		lo, hi := Float16(i), Float16(i+1)
		next := hi.Float64()
		if hi == 0x7c00 {
			next = 65536
		}
		mid := (lo.Float64() + next) / 2
		even := lo
		if i%2 != 0 {
			even = hi
		}
		for _, c := range []struct {
			v    float64
			want Float16
		}{{mid, even}, {math.Nextafter(mid, 0), lo}, {math.Nextafter(mid, math.Inf(1)), hi}} {
			if got := NewFloat16(c.v); got != c.want {
				t.Fatalf("%v rounds to %#04x, want %#04x", c.v, got, c.want)
			}
			if got := NewFloat16(-c.v); got != c.want|0x8000 {
				t.Fatalf("%v rounds to %#04x, want %#04x", -c.v, got, c.want|0x8000)
			}
		}
	}
}

func TestFloat16KnownValues(t *testing.T) {
	for _, c := range []struct {
		v    float64
		want Float16
	}{
		{0, 0}, {math.Copysign(0, -1), 0x8000}, {1, 0x3c00}, {-2, 0xc000}, {65504, 0x7bff},
		{65519.99, 0x7bff}, {65520, 0x7c00},
		{math.Inf(-1), 0xfc00}, {0x1p-14, 0x0400}, {0x1p-24, 1}, {0x1p-25, 0},
		{math.MaxFloat64, 0x7c00},
		{math.SmallestNonzeroFloat64, 0}, {1.0 / 3, 0x3555},
	} {
		if got := NewFloat16(c.v); got != c.want {
			t.Errorf("%v becomes %#04x, want %#04x", c.v, got, c.want)
		}
	}
}
