package gpu_test

import (
	"math"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// TestE4M3 wants every number of the format to stay itself, and what lies between two of them to
// become the nearer one.
func TestE4M3(t *testing.T) {
	for b, want := range map[byte]float32{0: 0, 1: 1. / 512, 8: 1. / 64, 0x38: 1,
		0x7e: gpu.Float8Max, 0xb8: -1} {
		if got := gpu.FromE4M3(b); got != want {
			t.Errorf("%#02x is %v, want %v", b, got, want)
		}
	}
	for i := range 256 {
		b := byte(i)
		v := gpu.FromE4M3(b)
		if b&0x7f == 0x7f {
			if v == v || gpu.E4M3(v)&0x7f != 0x7f {
				t.Errorf("%#02x is %v, want NaN", b, v)
			}
			continue
		}
		if got := gpu.E4M3(v); got != b {
			t.Errorf("%v becomes %#02x, want %#02x", v, got, b)
		}
		if b&0x7f == 0x7e {
			continue
		}
		next := gpu.FromE4M3(b + 1)
		middle, even := (v+next)/2, b+b&1
		for x, want := range map[float32]byte{
			middle: even, math.Nextafter32(middle, v): b, math.Nextafter32(middle, next): b + 1,
		} {
			if got := gpu.E4M3(x); got != want {
				t.Errorf("%v becomes %#02x, want %#02x", x, got, want)
			}
		}
	}
	for x, want := range map[float32]byte{449: 0x7e, -1e30: 0xfe, float32(math.Inf(1)): 0x7e,
		1e-30: 0} {
		if got := gpu.E4M3(x); got != want {
			t.Errorf("%v becomes %#02x, want %#02x", x, got, want)
		}
	}
}
