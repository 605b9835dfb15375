package randtest_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
)

// TestSeed checks that the given seed is fixed, as are the seeds derived from test names if CI is
// set.
func TestSeed(t *testing.T) {
	t.Setenv("KASMINA_SEED", "")
	t.Setenv("CI", "")
	require.NotEqual(t, randtest.Seed(t), randtest.Seed(t))

	t.Setenv("CI", "true")
	own := randtest.Seed(t)
	require.Equal(t, own, randtest.Seed(t))
	t.Run("another name", func(t *testing.T) { require.NotEqual(t, own, randtest.Seed(t)) })

	t.Setenv("KASMINA_SEED", "18446744073709551615")
	require.Equal(t, ^uint64(0), randtest.Seed(t))
	require.Equal(t, randtest.New(t).Uint64(), randtest.New(t).Uint64())
}
