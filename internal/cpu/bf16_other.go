//go:build !amd64

package cpu

func useBF16(gemmKernels[float32]) {}
