//go:build !linux

package memory

func ofComputer() uint64 { return 0 }
