package control

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// TestTogetherHandsOn wants a controller that wraps others to hand on what gradients ask for.
func TestTogetherHandsOn(t *testing.T) {
	a := NewAdapters(1 << 20)
	both := Together(NewDepth(blueprints.Stack, 2), a)
	both.(state.GradientListener).Heard(func(int, int) []float64 { return []float64{3} })
	require.NotNil(t, a.heard)
	require.Equal(t, []float64{3}, a.heard(0, 0))
}
