package enum

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestName(t *testing.T) {
	names := []string{"", "Red"}
	require.Equal(t, "Red", Name(uint8(1), "Colour", names))
	for _, none := range []uint8{0, 2, 255} {
		require.Equal(t, "Colour("+map[uint8]string{0: "0", 2: "2", 255: "255"}[none]+")",
			Name(none, "Colour", names))
	}
}
