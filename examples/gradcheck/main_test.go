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
	// one of the modes that observe gradients, a different one for each seed
	some := []mode{modes[0], modes[1+seed%uint64(len(modes)-1)]}
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
