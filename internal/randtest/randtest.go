// Package randtest provides reproducible random test inputs that differ from run to run, and controls how
// often tests repeat their checks.
package randtest

import (
	"hash/fnv"
	"math/rand/v2"
	"os"
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

// Long reports whether tests should repeat their checks with more inputs, because the environment variable
// KASMINA_LONG is set.
func Long() bool { return os.Getenv("KASMINA_LONG") != "" }

// New returns a source of random numbers with the test's [Seed].
func New(t testing.TB) *rand.Rand {
	t.Helper()
	return rand.New(rand.NewPCG(Seed(t), 0))
}
