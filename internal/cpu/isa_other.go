//go:build !amd64

package cpu

func detectISA() isa { return generic }
