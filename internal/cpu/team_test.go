package cpu

import (
	"bytes"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestHelpersAreBounded checks that there are at most as many helpers as cores, no matter how many
// goroutines call. Helpers from tests with more cores may remain.
func TestHelpersAreBounded(t *testing.T) {
	atLeastTwoCores(t)
	stayed := helpersAlive()
	const callers = 16
	ended := make(chan struct{})
	for range callers {
		go func() {
			for range 200 {
				Parallel(8, 1, func(int, int) { runtime.Gosched() }) // makes calls overlap
			}
			ended <- struct{}{}
		}()
	}

	most := 0
	for range callers {
		<-ended
		most = max(most, helpersAlive())
	}

	require.LessOrEqual(t, most, max(runtime.GOMAXPROCS(0), stayed))
	require.Positive(t, most, "nobody helped, so that nothing was shown")
}

// helpersAlive returns the number of goroutines that run help.
func helpersAlive() int {
	stacks := make([]byte, 1<<16)
	for {
		n := runtime.Stack(stacks, true)
		if n < len(stacks) {
			return bytes.Count(stacks[:n], []byte("internal/cpu.help("))
		}
		stacks = make([]byte, 2*len(stacks))
	}
}
