package run

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// TestConvert checks that convert rounds to the nearest number of the target type, ties to even, and
// writes nothing past the end.
func TestConvert(t *testing.T) {
	const n = 5
	third := map[gpu.DType]float32{gpu.Float32: 1. / 3, gpu.Float16: 0.33325195,
		gpu.BFloat16: 0.33398438} // the numbers nearest to 1/3
	for from, v := range third {
		stored := make([]byte, n*from.Size())
		gpu.Encode(stored, from, []float32{v, -2 * v, 0, 1.5, -3})
		for to, w := range third {
			t.Run(fmt.Sprintf("%v to %v", from, to), func(t *testing.T) {
				raw, got := make([]byte, (n+1)*to.Size()), make([]float32, n+1)
				convert(raw, to, stored, from)
				gpu.Decode(got, to, raw)
				if to == gpu.Float32 || from == gpu.BFloat16 { // neither conversion adds a rounding error
					w = v
				}
				require.Equal(t, []float32{w, -2 * w, 0, 1.5, -3, 0}, got)
			})
		}
	}
}
