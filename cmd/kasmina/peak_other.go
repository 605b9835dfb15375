//go:build !unix

package main

import "runtime"

// peakMemory returns the memory in bytes that Go has obtained from the system, which is an estimate of the peak.
func peakMemory() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.Sys
}
