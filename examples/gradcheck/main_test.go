package main

import (
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

func TestEveryGradientIsRight(t *testing.T) {
	seed := randtest.Seed(t)
	var out strings.Builder
	// The command checks all modes, and so does the long test. Otherwise, each seed checks another mode.
	some := modes
	if !randtest.Long() {
		some = []mode{modes[seed%uint64(len(modes))]}
	}
	ok, err := run(&out, append(opChecks(), kasminaChecks(some)...), seed, 1e-6)
	if err != nil || !ok {
		t.Fatalf("seed %d: error %v\n%s", seed, err, out.String())
	}

	if got := strings.Count(out.String(),
		"\nKasmina "); got != 11*len(blueprints.KindsAt(blueprints.Chunk)) {
		t.Errorf("%d rows for Kasmina, want 11 stages × %d kinds", got,
			len(blueprints.KindsAt(blueprints.Chunk)))
	}
}

func TestErrorsAboveTheToleranceShow(t *testing.T) {
	var out strings.Builder
	ok, err := run(&out, opChecks()[:1], 1, 1e-18)
	if ok || err != nil || !strings.Contains(out.String(), "not below 1e-18: RMSNorm") {
		t.Errorf("a tolerance that nothing can meet: ok %v, error %v\n%s", ok, err, out.String())
	}
}
