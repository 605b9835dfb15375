//go:build unix

package main

import (
	"runtime"
	"syscall"
)

// peakMemory returns the peak resident memory of the process in bytes, or 0 if it is unknown.
func peakMemory() uint64 {
	var use syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &use); err != nil {
		return 0
	}
	if runtime.GOOS == "darwin" || runtime.GOOS == "ios" {
		return uint64(use.Maxrss)
	}
	return uint64(use.Maxrss) << 10
}
