package runtest_test

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/runtest"
)

var flags = runtest.AddFlags()

// TestRandomRuns checks that random runs keep the guarantees of package llm.
func TestRandomRuns(t *testing.T) {
	plan := runtest.Plan{Usual: 2 * time.Second, Fixed: 4}
	runtest.Campaign(t, runtest.CPU(), *flags, plan)
}

// TestRandomFailures checks runs with one failing operation each. Each run must report the failure,
// and the result of the next attempt must be bit-identical to that of a run without failures. With
// -cases 1000, the test continues until an operation has failed in 1,000 runs.
func TestRandomFailures(t *testing.T) {
	m := runtest.CPU()
	plan := runtest.Plan{Usual: time.Second, Fixed: 3, Failing: true,
		Change: func(c *runtest.Case) bool { return runtest.OnlyFault(c, m) }}
	runtest.Campaign(t, m, *flags, plan)
}

// TestKnownCases checks a minimal case for each past fault of the trainer.
func TestKnownCases(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("testdata", "cases.json"))
	require.NoError(t, err)
	var cases map[string]runtest.Case
	require.NoError(t, json.Unmarshal(text, &cases))
	for _, name := range slices.Sorted(maps.Keys(randtest.Sample(t, 8, cases))) {
		t.Run(name, func(t *testing.T) {
			r := runtest.Check(cases[name], runtest.CPU(), t.TempDir())
			require.NoError(t, r.Skipped)
			if r.Failure != nil {
				t.Error(r.Failure)
			}
			if cases[name].Fault != nil && r.Outcome == "" {
				t.Error("nothing has failed")
			}
		})
	}
}
