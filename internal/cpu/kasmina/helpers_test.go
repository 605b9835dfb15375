package kasmina

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// eachISA runs f with the kernels of every instruction set that this machine has.
func eachISA(t *testing.T, f func(t *testing.T)) {
	cpu.EachISA(func(isa string) { t.Run(isa, f) })
}

// newRand returns a fresh source and logs its seed when the test fails.
func newRand(t *testing.T) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	})
	return rand.New(rand.NewPCG(seed, 1))
}

func widen(x []float32) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}
