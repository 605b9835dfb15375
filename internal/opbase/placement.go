//go:build !cuda

package opbase

import "gorgonia.org/gorgonia"

// placement determines where Gorgonia's own machines run an op: here, on the CPU. Gorgonia's
// compiler places every gorgonia.CUDADoer on a GPU, even in builds without CUDA, so the methods
// that make ops CUDADoers exist only with Gorgonia's build tag cuda.
type placement struct{}

func (placement) place(gorgonia.Op) {}

// CallsExtern reports that no cgo or device code runs.
func (placement) CallsExtern() bool { return false }
