//go:build !unix

package main

import "runtime"

// peakMemory returns the bytes of memory that the process has from the system.
func peakMemory() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.Sys
}
