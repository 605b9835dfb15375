package randtest_test

import (
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
)

// TestSeed checks that the seed is random by default, depends only on the name of the test if CI is set, and is
// that of KASMINA_SEED if this variable is set.
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

// TestSample checks that samples contain the required cases, that every other case is in some sample, and
// that long tests check all cases.
func TestSample(t *testing.T) {
	t.Setenv("KASMINA_SEED", "")
	t.Setenv("CI", "")
	t.Setenv("KASMINA_LONG", "")
	cases := map[string]int{"a": 1, "b": 2, "c": 3, "d": 4}
	list := []int{1, 2, 3, 4}

	seen, listed := map[string]int{}, map[int]bool{}
	for range 200 {
		sample := randtest.Sample(t, 2, cases, "c")
		require.Len(t, sample, 2)
		require.Equal(t, 3, sample["c"])
		maps.Copy(seen, sample)

		some := randtest.SampleOf(t, 2, list)
		require.Len(t, some, 2)
		require.Equal(t, 1, some[0])
		require.True(t, slices.IsSorted(some))
		listed[some[1]] = true
	}
	require.Equal(t, cases, seen)
	require.Equal(t, map[int]bool{2: true, 3: true, 4: true}, listed)
	require.Equal(t, cases, randtest.Sample(t, 9, cases))
	require.Equal(t, []int{2, 3, 4}, randtest.Ints(t, 3, 2, 4))

	t.Run("given seed", func(t *testing.T) {
		t.Setenv("KASMINA_SEED", "3")
		require.Equal(t, cases, randtest.Sample(t, 1, cases))
		require.Equal(t, list, randtest.SampleOf(t, 1, list))
	})

	t.Run("short", func(t *testing.T) {
		defer func() { require.True(t, t.Skipped()) }()
		randtest.NeedsLong(t, "")
	})

	t.Setenv("KASMINA_LONG", "1")
	require.Equal(t, cases, randtest.Sample(t, 1, cases))
	require.Equal(t, list, randtest.SampleOf(t, 1, list))
	randtest.NeedsLong(t, "")
	require.False(t, t.Skipped())
}
