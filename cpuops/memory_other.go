//go:build !linux

package cpuops

func hugePages([]byte) {}
