package parallel

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestEach checks that every number occurs once, and that all calls have finished when Each
// returns.
func TestEach(t *testing.T) {
	for _, n := range []int{0, 1, 2, 1000} {
		calls := make([]atomic.Int32, n)
		Each(n, func(i int) { calls[i].Add(1) })
		for i := range calls {
			require.EqualValues(t, 1, calls[i].Load())
		}
	}
}

// TestIndex checks that Index returns the first matching number, and that clones are equal.
func TestIndex(t *testing.T) {
	for _, n := range []int{0, 3, chunk + 1, 5*chunk + 7} {
		x := make([]byte, n)
		require.Equal(t, -1, Index(n, func(i int) bool { return x[i] > 0 }))
		for _, at := range []int{n - 1, n / 2, 0} {
			if at < 0 || at >= n {
				continue
			}
			x[at] = 1
			require.Equal(t, at, Index(n, func(i int) bool { return x[i] > 0 }))
		}
		require.Equal(t, x, Clone(x))
	}
}
