package opbase

import (
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// All graphs share some of Gorgonia's constants, which it hashes when a graph first asks for them,
// without a lock. Derivatives that ask for them here let graphs be made on several goroutines.
func init() {
	g := gorgonia.NewGraph()
	for _, t := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		x := gorgonia.NewScalar(g, t)
		for _, f := range []func(*gorgonia.Node) (*gorgonia.Node, error){gorgonia.Square,
			gorgonia.Cube, gorgonia.Log2, gorgonia.Sigmoid, gorgonia.Rectify} {
			if _, err := gorgonia.Grad(gorgonia.Must(f(x)), x); err != nil {
				panic(err)
			}
		}
	}
}
