package gpu

import (
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
)

// TestUpdated wants what a machine says of an update to become what a trainer is to know of it, and
// the parameters to be fetched unless they are as before.
func TestUpdated(t *testing.T) {
	errDevice := errors.New("the device is gone")
	for name, c := range map[string]struct {
		from, want error
		changed    bool
	}{
		"an update": {nil, nil, true},
		"none, of gradients that are not finite": {fmt.Errorf("machine: %w", cudaops.ErrNonFinite),
			llm.ErrGradients, false},
		"another error": {errDevice, errDevice, true},
	} {
		t.Run(name, func(t *testing.T) {
			e := &engine{}
			norm, err := e.updated(math.Inf(1), c.from)
			if !errors.Is(err, c.want) || c.want != llm.ErrGradients &&
				errors.Is(err, llm.ErrGradients) || !math.IsInf(norm, 1) || e.changed != c.changed {
				t.Errorf("norm %v, changed %v, %v; want %v and %v", norm, e.changed,
					err, c.changed, c.want)
			}
			e.changed = true // by an update before
			if e.updated(math.Inf(1), c.from); !e.changed {
				t.Error("what has changed before is forgotten")
			}
		})
	}
}
