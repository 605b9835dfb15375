//go:build !cuda

package opbase

import "gorgonia.org/gorgonia"

// placement is where Gorgonia's own machines run an op: on the CPU. Gorgonia's compiler places
// every gorgonia.CUDADoer on a GPU, also in a build that has none. So the methods that make the ops
// CUDADoers exist only with Gorgonia's build tag cuda.
type placement struct{}

func (placement) place(gorgonia.Op) {}

// CallsExtern reports that no cgo or device code runs.
func (placement) CallsExtern() bool { return false }
