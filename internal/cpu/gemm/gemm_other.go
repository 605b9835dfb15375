//go:build !amd64 && !arm64

package gemm

import "github.com/kasmina-go/kasmina/internal/cpu"

func kernelsFor(cpu.ISA) (kernels[float32], kernels[float64]) {
	return portableKernels[float32](), portableKernels[float64]()
}

func fmaPeakLoop() (flops int, run func(rounds int)) { return 0, nil }
