//go:build !linux

package cpu

// HugePages does nothing on this system.
func HugePages([]byte) {}
