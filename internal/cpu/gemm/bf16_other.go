//go:build !amd64

package gemm

func useBF16(kernels[float32]) {}
