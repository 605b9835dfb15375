package layer

import (
	"math"
	"testing"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// TestGELUFar checks numbers with squares or cubes that overflow float32: there, GELU and its slope
// equal max(x, 0) and its slope.
func TestGELUFar(t *testing.T) {
	t.Run("float32", func(t *testing.T) { testGELUFar[float32](t) })
	t.Run("float64", func(t *testing.T) { testGELUFar[float64](t) })
}

func testGELUFar[T cpu.Float](t *testing.T) {
	x := []T{20, 99, 101, 1e6, 1e20, 3e38, -20, -99, -101, -1e6, -1e20, -3e38}
	y, dx, dy := make([]T, len(x)), make([]T, len(x)), make([]T, len(x))
	for i := range dy {
		dy[i] = 3
	}

	GELU(y, x)
	GELUBackward(dx, dy, x)

	for i, v := range x {
		want, slope := max(0, float64(v)), 3.0
		if v < 0 {
			slope = 0
		}
		if !(math.Abs(float64(y[i])-want) <= 1e-6*want+1e-30) ||
			!(math.Abs(float64(dx[i])-slope) <= 1e-6) {
			t.Errorf("gelu(%v) is %v with a gradient of %v, want %v and %v", v, y[i], dx[i], want,
				slope)
		}
	}
}
