//go:build !race

package kasmina

import (
	"testing"

	"github.com/kasmina-go/kasmina/internal/allocs"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// The race detector makes sync.Pool drop values at random, so this test is excluded from such
// builds.

// TestAllocations checks that a pass allocates nothing after the first time.
func TestAllocations(t *testing.T) {
	p, _ := newLayerRun(t, randtest.New(t), 300, 64, 16, 0, 1)
	if n := allocs.PerRun(20, func() {
		p.Forward(p.y, p.x, p.weights, p.scales)
		p.Backward(p.dx, p.dw, p.da, p.g, p.x, p.weights, p.scales)
	}); n > 1 {
		t.Errorf("two passes make %v allocations", n)
	}
}
