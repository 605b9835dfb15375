package preference

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestNaN checks that a ratio of NaN makes the loss and both derivatives NaN.
func TestNaN(t *testing.T) {
	for _, l := range []Loss{{Kind: Sigmoid, Beta: 0.5}, {Kind: Hinge, Beta: 0.5}, {Kind: IPO, Beta: 0.5},
		{Kind: Robust, Beta: 0.5, Smoothing: 0.25}} {
		loss, grad := l.Of(Pair{Ratio: [2]float64{math.NaN(), 1}, Rows: [2]float64{3, 4}})
		require.True(t, math.IsNaN(loss) && math.IsNaN(grad[0]) && math.IsNaN(grad[1]), l)
	}
}
