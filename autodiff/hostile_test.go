package autodiff_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
)

// TestHostileArguments checks that nil nodes and panicking functions are errors.
func TestHostileArguments(t *testing.T) {
	var missing *gorgonia.Node
	model := []gorgonia.ValueGrad{missing}
	_, err := autodiff.GlobalNorm(model)
	require.ErrorContains(t, err, "nil")
	_, err = autodiff.ClipGlobalNorm(model, 1)
	require.ErrorContains(t, err, "nil")
	_, _, found := autodiff.FirstNonFinite(model)
	require.False(t, found)
	x := gorgonia.NewMatrix(gorgonia.NewGraph(), tensor.Float64, gorgonia.WithShape(2, 2),
		gorgonia.WithName("x"))
	_, err = autodiff.Recompute(gorgonia.Nodes{x},
		func(gorgonia.Nodes) (*gorgonia.Node, error) { panic("boom") })
	require.ErrorContains(t, err, "boom")
	require.ErrorContains(t, err, "hostile_test.go")
}
