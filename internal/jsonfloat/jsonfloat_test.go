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

func TestFloatFromJSON(t *testing.T) {
	var got struct {
		Plain   []Float
		Pointer *Float
	}
	require.NoError(t, json.Unmarshal([]byte(`{"Plain":[1.5,null,-2],"Pointer":null}`), &got))
	require.Len(t, got.Plain, 3)
	require.True(t, got.Plain[0] == 1.5 && math.IsNaN(float64(got.Plain[1])) && got.Plain[2] == -2)
	require.Nil(t, got.Pointer)
	require.Error(t, json.Unmarshal([]byte(`["x"]`), &got.Plain))
}
