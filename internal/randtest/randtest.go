// Package randtest provides reproducible random test inputs that differ from run to run, and controls how
// many cases tests check, how often they repeat their checks, and how many resources they use.
package randtest

import (
	"flag"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/internal/processor"
)

// Seed returns a seed for the test's random inputs. It logs the seed, which go test shows if the test
// fails.
//
// Every run of a test uses a new seed, unless the environment variable KASMINA_SEED specifies one. If
// the variable CI is set, each test's seed depends only on its name, so that a failure there was
// caused by the change under test and can be reproduced.
func Seed(t testing.TB) uint64 {
	t.Helper()
	seed := newSeed(t)
	if given := os.Getenv(seedVariable); given != "" {
		n, err := strconv.ParseUint(given, 10, 64)
		if err != nil {
			t.Fatalf("%s is %q, want a number from 0 to 2⁶⁴-1", seedVariable, given)
		}
		seed = n
	}

	t.Logf("random seed: %s=%d", seedVariable, seed)
	return seed
}

// seedVariable is the environment variable with the seed of a test that is repeated.
const seedVariable = "KASMINA_SEED"

// newSeed returns a seed that depends only on the test's name if CI is set, and a new one otherwise.
func newSeed(t testing.TB) uint64 {
	if os.Getenv("CI") == "" {
		return rand.Uint64()
	}
	name := fnv.New64a()
	name.Write([]byte(t.Name()))
	return name.Sum64()
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

// CollectRarely lets garbage grow to four times the live memory before it is collected, as GOGC=400 does. Tests with
// small models have little live memory and create much garbage, so that collecting it at the usual rate takes up to a
// third of their processor time. TestMain calls CollectRarely before it runs the tests.
//
// It has no effect on long tests, benchmarks and tests with flags of their own, or if the environment variable GOGC is
// set.
func CollectRarely() {
	if !Long() && !special() && os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400)
		os.Setenv("GOGC", "400") // for processes that tests start
	}
}

// OneProcessor limits the tests of a package to one processor, except for [Concurrent] ones. go test runs the tests of
// as many packages at a time as there are processors, and dividing the work of small models among processors costs
// processor time without saving any time. TestMain calls OneProcessor before it runs the tests.
//
// It has no effect on long tests, benchmarks and tests with flags of their own, or if the environment variable
// GOMAXPROCS is set. It has none with the race detector either, which only finds races in work that is divided.
func OneProcessor() {
	if !Long() && !special() && !processor.Race && os.Getenv("GOMAXPROCS") == "" {
		limited = true
		runtime.GOMAXPROCS(1)
		os.Setenv("GOMAXPROCS", "1") // for processes that tests start
	}
}

// limited is set if tests use one processor.
var limited bool

// Concurrent lets a test use all processors until it ends, even after [OneProcessor], because it checks work that
// several goroutines do at the same time. Processes that the test starts still use one. Parallel tests must not call
// Concurrent.
func Concurrent(t testing.TB) {
	if limited {
		runtime.SetDefaultGOMAXPROCS()
		t.Cleanup(func() { runtime.GOMAXPROCS(1) })
	}
}

// OverlapWaits lets 16 parallel tests of a package run at a time, unless the flag -parallel says otherwise. It is meant
// for packages whose parallel tests mostly wait for deadlines and other programs, so that go test can start on other
// packages sooner. TestMain calls OverlapWaits before it runs the tests.
func OverlapWaits() {
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if given {
		return
	}
	if err := flag.Set("test.parallel", "16"); err != nil {
		panic(err)
	}
}

// special reports whether the test binary runs benchmarks, or was given flags that its package defines, such as
// -duration. It reads the arguments because flags are not parsed yet when TestMain starts.
func special() bool {
	return slices.ContainsFunc(os.Args[1:], func(a string) bool {
		name := strings.TrimLeft(a, "-")
		return strings.HasPrefix(name, "test.bench") || len(name) < len(a) && !strings.HasPrefix(name, "test.")
	})
}

// all reports whether a test checks all of its cases, because tests are [Long] or the seed is given. A given seed
// means that a failed test is being repeated, and the case that failed must be among its cases.
func all() bool { return Long() || os.Getenv(seedVariable) != "" }

// Sample returns the cases of a table that a test checks. These are the cases named by always, and others
// drawn at random, n in total. Long tests, and tests that are repeated with a given seed, check all of them.
func Sample[Case any](t testing.TB, n int, cases map[string]Case, always ...string) map[string]Case {
	t.Helper()
	if all() || n >= len(cases) {
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
	for _, i := range rand.New(rand.NewPCG(newSeed(t), 0)).Perm(len(names)) {
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
	var numbers []int
	for i := first; i <= last; i++ {
		numbers = append(numbers, i)
	}
	return SampleOf(t, n, numbers)
}

// SampleOf is like [Sample] for a list, which keeps its order. The first of the cases is always in the sample.
func SampleOf[Case any](t testing.TB, n int, cases []Case) []Case {
	t.Helper()
	if all() || n >= len(cases) {
		return cases
	}

	indices := []int{0}
	for _, i := range rand.New(rand.NewPCG(newSeed(t), 0)).Perm(len(cases) - 1)[:n-1] {
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
