//go:build !race

package kasmina

import (
	"testing"

	"github.com/kasmina-go/kasmina/internal/allocs"
)

// A pass allocates nothing once it has run.
func TestKasminaAllocations(t *testing.T) {
	p, _ := newKasminaRun(t, newRand(t), 300, 64, 16, 0, 1)
	if n := allocs.PerRun(20, func() {
		p.Forward(p.y, p.x, p.weights, p.scales)
		p.Backward(p.dx, p.dw, p.da, p.g, p.x, p.weights, p.scales)
	}); n > 1 {
		t.Errorf("two passes make %v allocations", n)
	}
}
