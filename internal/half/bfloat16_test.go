package half

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestBFloat16 checks that every number survives a round trip, and that numbers in between go to
// the nearer neighbor, or to the one with an even last bit.
func TestBFloat16(t *testing.T) {
	for i := range 1 << 16 {
		b := BFloat16(i)
		v := b.Float32()
		if v != v {
			require.NotEqual(t, NewBFloat16(v).Float32(), NewBFloat16(v).Float32(), "%#04x", i)
			continue
		}
		require.Equal(t, b, NewBFloat16(v), "%#04x", i)
		if i&0x7fff >= 0x7f80 { // infinite or NaN
			continue
		}
		middle := math.Float32frombits(uint32(i)<<16 | 0x8000)
		require.Equal(t, b+b&1, NewBFloat16(middle), "%#04x", i)
		require.Equal(t, b, NewBFloat16(math.Float32frombits(uint32(i)<<16|0x7fff)), "%#04x", i)
		require.Equal(t, b+1, NewBFloat16(math.Float32frombits(uint32(i)<<16|0x8001)), "%#04x", i)
	}
}
