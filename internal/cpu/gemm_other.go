//go:build !amd64 && !arm64

package cpu

func gemmKernelsFor(isa) (gemmKernels[float32], gemmKernels[float64]) {
	return portableKernels[float32](), portableKernels[float64]()
}

func fmaPeakLoop() (flops int, run func(rounds int)) { return 0, nil }
