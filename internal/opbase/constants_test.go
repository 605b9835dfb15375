package opbase

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestConstants differentiates graphs on several goroutines in a separate process. The race
// detector finds unsynchronized access to shared constants.
func TestConstants(t *testing.T) {
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			for _, dtype := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
				g := gorgonia.NewGraph()
				x := gorgonia.NewMatrix(g, dtype, gorgonia.WithShape(2, 3))
				for _, f := range []func(*gorgonia.Node) (*gorgonia.Node, error){gorgonia.Square,
					gorgonia.Cube, gorgonia.Log2, gorgonia.Sigmoid, gorgonia.Tanh} {
					_, err := gorgonia.Grad(gorgonia.Must(gorgonia.Sum(gorgonia.Must(f(x)))), x)
					assert.NoError(t, err)
				}
			}
		})
	}

	group.Wait()
}
