package curve

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestCurveStaysSmall checks that a curve covers the whole run with bounded memory.
func TestCurveStaysSmall(t *testing.T) {
	var points []Progress
	for epoch := 1; epoch <= 10*MaxLength; epoch++ {
		points = Add(points, Progress{epoch, 0, 1})
		require.NoError(t, Check(points, uint32(epoch)))
	}

	require.GreaterOrEqual(t, len(points), MaxLength/2)
	require.Equal(t, 10*MaxLength, points[len(points)-1].Epoch)
	for _, bad := range [][]Progress{{{0, 0, 1}}, {{2, 0, 1}, {2, 0, 1}},
		{{1, 2, 1}}, {{99, 0, 1}}} {
		require.Error(t, Check(bad, 10))
	}
}
