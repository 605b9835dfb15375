package parallel_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/llm/parallel"
)

// TestMeetRefuses checks that impossible settings are rejected before the process waits for the other
// ranks.
func TestMeetRefuses(t *testing.T) {
	ranks := func(name string) string {
		return map[string]string{"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1",
			"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
			comm.SecretVariable: "a secret that only the ranks know"}[name]
	}
	_, err := parallel.Meet(t.Context(), ranks, 3, 0)
	require.ErrorContains(t, err, "--accumulate 4")
	_, err = parallel.Meet(t.Context(), ranks, 4, -time.Second)
	require.ErrorContains(t, err, "a deadline of -1s")
	w, err := parallel.Meet(t.Context(), func(string) string { return "" }, 1, 0)
	require.NoError(t, err)
	require.Nil(t, w, "a process that is alone has no world")
}
