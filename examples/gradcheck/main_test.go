package main

import (
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

func TestMain(m *testing.M) {
	randtest.CollectRarely()
	m.Run()
}

// TestGradientsAreRight checks the command on a sixth of its rows in one mode, which both depend on the seed.
// The tests of package op check all of them at several sizes, as does this test if it is long.
func TestGradientsAreRight(t *testing.T) {
	seed := randtest.Seed(t)
	checks := append(opChecks(), kasminaChecks(modes)...)
	if !randtest.Long() {
		some := []mode{modes[seed%uint64(len(modes))]}
		var drawn []check
		for i, c := range append(opChecks(), kasminaChecks(some)...) {
			if uint64(i)%6 == seed%6 {
				drawn = append(drawn, c)
			}
		}
		checks = drawn
	}

	var out strings.Builder
	ok, err := run(&out, checks, seed, 1e-6)
	if err != nil || !ok {
		t.Fatalf("seed %d: error %v\n%s", seed, err, out.String())
	}
	if got := strings.Count(out.String(), "\n") - 1; got != len(checks) {
		t.Errorf("%d rows for %d checks:\n%s", got, len(checks), out.String())
	}
}

func TestEveryStageAndKindHasARow(t *testing.T) {
	if got, want := len(kasminaChecks(modes)), 11*len(blueprints.KindsAt(blueprints.Chunk)); got != want {
		t.Errorf("%d rows for Kasmina, want %d: 11 stages with each kind", got, want)
	}
}

func TestErrorsAboveTheToleranceShow(t *testing.T) {
	var out strings.Builder
	ok, err := run(&out, opChecks()[:1], 1, 1e-18)
	if ok || err != nil || !strings.Contains(out.String(), "not below 1e-18: RMSNorm") {
		t.Errorf("a tolerance that nothing can meet: ok %v, error %v\n%s", ok, err, out.String())
	}
}
