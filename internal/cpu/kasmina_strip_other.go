//go:build !amd64

package cpu

func fastStrips() *stripKernels { return nil }
