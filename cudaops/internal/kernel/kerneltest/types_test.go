package kerneltest

import (
	"math"
	"testing"
)

func TestStorageTypesRoundTrip(t *testing.T) {
	for h := range 1 << 16 {
		if v := FromF16(uint16(h)); v == v && ToF16(v) != uint16(h) {
			t.Fatalf("float16 %#x is %v, which becomes %#x", h, v, ToF16(v))
		}
		if v := math.Float32frombits(uint32(h) << 16); v == v && ToBF16(v) != uint16(h) {
			t.Fatalf("bfloat16 %#x is %v, which becomes %#x", h, v, ToBF16(v))
		}
	}
	for v, want := range map[float64]uint16{1 + 0x1p-11: 0x3c00, 1 + 3*0x1p-11: 0x3c02,
		65519: 0x7bff, 0x1.8p-25: 1} {
		if got := ToF16(v); got != want {
			t.Errorf("float16 of %v is %#x, want %#x", v, got, want)
		}
	}
}
