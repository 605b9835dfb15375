package splitmix

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMix compares Mix with the first outputs published by the generator's authors for the seed
// 1234567. Output n belongs to the state seed + n·0x9e3779b97f4a7c15.
func TestMix(t *testing.T) {
	state := uint64(1234567)
	for _, want := range []uint64{6457827717110365317, 3203168211198807973, 9817491932198370423} {
		require.Equal(t, want, Mix(state))
		state += 0x9e3779b97f4a7c15
	}
}
