package half

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestE4M3 checks that every number of the format is preserved, and that numbers between two neighbors
// round to the nearer one.
func TestE4M3(t *testing.T) {
	for b, want := range map[byte]float32{0: 0, 1: 1. / 512, 8: 1. / 64, 0x38: 1,
		0x7e: MaxE4M3, 0xb8: -1} {
		require.Equal(t, want, FromE4M3(b), b)
	}

	for i := range 256 {
		b := byte(i)
		v := FromE4M3(b)
		if b&0x7f == 0x7f {
			require.True(t, math.IsNaN(float64(v)), b)
			require.Equal(t, byte(0x7f), E4M3(v)&0x7f, b)
			continue
		}
		require.Equal(t, b, E4M3(v), v)
		if b&0x7f == 0x7e {
			continue
		}
		next := FromE4M3(b + 1)
		middle, even := (v+next)/2, b+b&1
		for x, want := range map[float32]byte{
			middle: even, math.Nextafter32(middle, v): b, math.Nextafter32(middle, next): b + 1,
		} {
			require.Equal(t, want, E4M3(x), x)
		}
	}

	for x, want := range map[float32]byte{449: 0x7e, -1e30: 0xfe, float32(math.Inf(1)): 0x7e,
		1e-30: 0} {
		require.Equal(t, want, E4M3(x), x)
	}
}
