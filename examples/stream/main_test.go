package main

import (
	"context"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestRun checks that the loop oscillates until the PID controllers start to work, then settles, and that averages
// calm it.
func TestRun(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run(context.Background(), &out))
	t.Log(out.String())
	found := regexp.MustCompile(`deviation (\S+), power moves by (\S+),`).FindAllStringSubmatch(out.String(), -1)
	require.Len(t, found, 3)
	var deviations, movements []float64
	for _, f := range found {
		d, err := strconv.ParseFloat(f[1], 64)
		require.NoError(t, err)
		m, err := strconv.ParseFloat(f[2], 64)
		require.NoError(t, err)
		deviations, movements = append(deviations, d), append(movements, m)
	}

	require.Greater(t, deviations[0], 0.3)
	require.Less(t, deviations[1], 0.1)
	require.Less(t, deviations[2], 0.1)
	require.Less(t, movements[2], movements[1]/2)
}

// TestCanceled checks that a canceled loop ends with the cause.
func TestCanceled(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	require.ErrorIs(t, run(ctx, new(strings.Builder)), context.Canceled)
}
