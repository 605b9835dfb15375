package run

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// TestConvert wants numbers of one type to become the nearest ones of another, ties to even, and
// what lies behind them to stay.
func TestConvert(t *testing.T) {
	const n = 5
	third := map[gpu.DType]float32{gpu.Float32: 1. / 3, gpu.Float16: 0.33325195,
		gpu.BFloat16: 0.33398438} // the nearest to 1/3
	for from, v := range third {
		stored := make([]byte, n*from.Size())
		gpu.Encode(stored, from, []float32{v, -2 * v, 0, 1.5, -3})
		for to, w := range third {
			t.Run(fmt.Sprintf("%v to %v", from, to), func(t *testing.T) {
				raw, got := make([]byte, (n+1)*to.Size()), make([]float32, n+1)
				convert(raw, to, stored, from)
				gpu.Decode(got, to, raw)
				if to == gpu.Float32 || from == gpu.BFloat16 { // which has no more digits
					w = v
				}
				require.Equal(t, []float32{w, -2 * w, 0, 1.5, -3, 0}, got)
			})
		}
	}
}
