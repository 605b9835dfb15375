package runtest_test

import (
	"testing"
	"time"

	"github.com/kasmina-go/kasmina/internal/runtest"
)

var flags = runtest.AddFlags()

// TestRandomRuns makes random runs and checks that they keep the promises of package llm.
func TestRandomRuns(t *testing.T) {
	usual := 40 * time.Second
	if testing.Short() {
		usual = 15 * time.Second
	}
	runtest.Campaign(t, runtest.CPU(), *flags, runtest.Plan{Usual: usual})
}

// TestRandomFailures makes runs in each of which one thing fails. Each must report the failure, and
// the next attempt must end with the bits of a run in which nothing failed. With -cases 1000 it
// goes on until something has failed in so many runs.
func TestRandomFailures(t *testing.T) {
	usual := 20 * time.Second
	if testing.Short() {
		usual = 5 * time.Second
	}
	m := runtest.CPU()
	runtest.Campaign(t, m, *flags, runtest.Plan{Usual: usual, Failing: true,
		Change: func(c *runtest.Case) bool { return runtest.OnlyFault(c, m) }})
}
