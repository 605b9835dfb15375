//go:build amd64 || arm64

package cpu

// pause lets the core rest for some 50 nanoseconds and its other hardware thread run.
func pause()
