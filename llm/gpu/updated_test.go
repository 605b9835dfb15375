package gpu

import (
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
)

// TestUpdated checks which error an engine returns for each error that its machine reports after an
// update. It also checks that the engine fetches parameters only if they have changed.
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
			require.ErrorIs(t, err, c.want)
			require.Equal(t, c.want == llm.ErrGradients, errors.Is(err, llm.ErrGradients))
			require.True(t, math.IsInf(norm, 1))
			require.Equal(t, c.changed, e.changed)
			e.changed = true // by an update before
			e.updated(math.Inf(1), c.from)
			require.True(t, e.changed, "what has changed before is forgotten")
		})
	}
}
