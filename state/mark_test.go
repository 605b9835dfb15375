package state

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMark checks that passes leave no trace once an earlier mark is restored, and that a corrupt
// seed stays corrupt.
func TestMark(t *testing.T) {
	const seeds = 5
	l, err := NewLattice(seeds, 4*seeds)
	require.NoError(t, err)
	n, err := NewNetwork(nil, Layer{Name: "a", Lattice: l})
	require.NoError(t, err)
	pass := func(x float64) {
		var p Pass
		l.Begin(&p, true)
		require.NoError(t, l.RecordHealth(&p, func(seed int) HealthSample {
			m := Moments{Count: 8, Mean: x + float64(seed), Variance: 1}
			return HealthSample{NonFinite: 1, Moments: m,
				Health: Health{Mean: m.Mean, Variance: 1, Min: -x, Max: x}}
		}))
		require.NoError(t, l.RecordGradient(&p, func(seed int) GradientSample {
			return GradientSample{NonFinite: 1, Clipped: 2, Norms: Moments{Count: 1, Mean: x},
				Gradient: Gradient{Norm: x, Variance: 2, Max: x}}
		}))
	}

	pass(1)
	before, digest := l.Report(), n.Digest()
	for range 2 {
		restore := n.Mark()
		pass(2)
		pass(3)
		require.NotEqual(t, digest, n.Digest())
		restore()
		require.Equal(t, digest, n.Digest())
		require.Equal(t, before.Seeds, l.Report().Seeds)
		require.NoError(t, n.Verify())
	}

	flip(l.seeds.columns()[0], 3, 1)
	require.ErrorIs(t, n.Verify(), ErrCorrupt)
	restore := n.Mark()
	pass(2)
	restore()
	require.ErrorIs(t, n.Verify(), ErrCorrupt)
}
