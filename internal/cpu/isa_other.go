//go:build !amd64 && !arm64

package cpu

func detectISA() isa { return generic }
