package opbase

import (
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// All graphs share some of Gorgonia's constants, which it hashes when a graph first asks for them,
// without a lock. Derivatives that ask for them here let graphs be made on several goroutines. Where
// one fails, its constants are hashed later, as ever.
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
