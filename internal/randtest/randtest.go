// Package randtest provides reproducible random test inputs that differ from run to run, and controls how
// many cases tests check and how often they repeat their checks.
package randtest

import (
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
)

// Seed returns a seed for the test's random inputs. It logs the seed, which go test shows if the test
// fails.
//
// Every run of a test uses a new seed, unless the environment variable KASMINA_SEED specifies one. If
// the variable CI is set, each test's seed depends only on its name, so that a failure there was
// caused by the change under test and can be reproduced.
func Seed(t testing.TB) uint64 {
	t.Helper()
	seed := rand.Uint64()
	switch given := os.Getenv("KASMINA_SEED"); {
	case given != "":
		n, err := strconv.ParseUint(given, 10, 64)
		if err != nil {
			t.Fatalf("KASMINA_SEED is %q, want a number from 0 to 2⁶⁴-1", given)
		}
		seed = n
	case os.Getenv("CI") != "":
		name := fnv.New64a()
		name.Write([]byte(t.Name()))
		seed = name.Sum64()
	}

	t.Logf("random seed: KASMINA_SEED=%d", seed)
	return seed
}

// Long reports whether tests should check all cases and repeat their checks with more inputs, because the
// environment variable KASMINA_LONG is set.
func Long() bool { return os.Getenv("KASMINA_LONG") != "" }

// NeedsLong skips a test unless [Long]. The reason says which shorter test covers the same code.
func NeedsLong(t testing.TB, reason string) {
	t.Helper()
	if !Long() {
		t.Skip("a long test, which runs with KASMINA_LONG=1: " + reason)
	}
}

// Sample returns the cases of a table that a test checks. If [Long], these are all of them. Otherwise, they
// are the cases named by always, and others drawn with the test's [Seed], n in total.
func Sample[Case any](t testing.TB, n int, cases map[string]Case, always ...string) map[string]Case {
	t.Helper()
	if Long() || n >= len(cases) {
		return cases
	}

	sample := map[string]Case{}
	for _, name := range always {
		c, ok := cases[name]
		if !ok {
			t.Fatalf("there is no case %q", name)
		}
		sample[name] = c
	}

	names := slices.Sorted(maps.Keys(cases))
	for _, i := range New(t).Perm(len(names)) {
		if len(sample) >= n {
			break
		}
		sample[names[i]] = cases[names[i]]
	}
	return sample
}

// Ints is like [SampleOf] for the integers from first to last.
func Ints(t testing.TB, n, first, last int) []int {
	t.Helper()
	var all []int
	for i := first; i <= last; i++ {
		all = append(all, i)
	}
	return SampleOf(t, n, all)
}

// SampleOf is like [Sample] for a list, which keeps its order. The first of the cases is always in the sample.
func SampleOf[Case any](t testing.TB, n int, cases []Case) []Case {
	t.Helper()
	if Long() || n >= len(cases) {
		return cases
	}

	indices := []int{0}
	for _, i := range New(t).Perm(len(cases) - 1)[:n-1] {
		indices = append(indices, 1+i)
	}
	slices.Sort(indices)

	var sample []Case
	for _, i := range indices {
		sample = append(sample, cases[i])
	}
	return sample
}

// New returns a source of random numbers with the test's [Seed].
func New(t testing.TB) *rand.Rand {
	t.Helper()
	return rand.New(rand.NewPCG(Seed(t), 0))
}
