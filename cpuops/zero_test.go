package cpuops_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cpuops"
)

// TestZeroMachine checks that the methods of a zero Machine return an error or an empty result.
func TestZeroMachine(t *testing.T) {
	var m cpuops.Machine
	require.ErrorContains(t, m.RunAll(), "cpuops.NewMachine")
	_, err := m.Value(nil)
	require.ErrorContains(t, err, "cpuops.NewMachine")
	require.Zero(t, m.Memory())
	require.Empty(t, m.ValueGrads())
	require.Empty(t, m.Choices())
	m.Release()
	require.NoError(t, m.Close())
	require.ErrorContains(t, m.RunAll(), "cpuops.NewMachine")
}
