package cpu

import (
	"bytes"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// Helpers are no more than cores, however many goroutines call; those of tests with more cores have
// stayed.
func TestHelpersAreBounded(t *testing.T) {
	atLeastTwoCores(t)
	stayed := helpersAlive()
	const callers = 16
	ended := make(chan struct{})
	for range callers {
		go func() {
			for range 200 {
				Parallel(8, 1, func(int, int) { runtime.Gosched() }) // so that calls overlap
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

// helpersAlive counts the goroutines that run help.
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
