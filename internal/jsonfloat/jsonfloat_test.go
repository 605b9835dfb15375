package jsonfloat

import (
	"encoding/json"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFloat(t *testing.T) {
	for _, c := range []struct {
		x    float64
		want string
	}{{1.5, "1.5"}, {math.Inf(1), "null"}, {math.Inf(-1), "null"}, {math.NaN(), "null"}, {0, "0"}} {
		got, err := json.Marshal(Float(c.x))
		require.NoError(t, err)
		require.Equal(t, c.want, string(got))
	}
}
