package curve

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestWindow checks that a window has the trend of the whole curve after every point.
func TestWindow(t *testing.T) {
	points := run(t, 1, 0.01, func(x float64) float64 { return 2 + math.Pow(x, -0.4) })
	var w Window
	for i, p := range points {
		fall, level, ok := w.Add(p)
		wantFall, wantLevel, want := Trend(points[:i+1])
		require.Equal(t, want, ok)
		require.InDelta(t, wantFall, fall, 1e-6)
		require.InDelta(t, wantLevel, level, 1e-6)
	}
}
