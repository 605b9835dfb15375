package opbase

import (
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// All graphs share certain constants of Gorgonia, which Gorgonia hashes without a lock when a graph
// first uses them. Using them here, in derivatives, allows graphs to be built on several goroutines.
// If a derivative fails, its constants are hashed later as usual.
func init() {
	for _, dtype := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		for _, f := range []func(*gorgonia.Node) (*gorgonia.Node, error){gorgonia.Square,
			gorgonia.Cube, gorgonia.Log2, gorgonia.Sigmoid} {
			x := gorgonia.NewScalar(gorgonia.NewGraph(), dtype)
			if y, err := f(x); err == nil {
				_, _ = gorgonia.Grad(y, x)
			}
		}
	}
}
