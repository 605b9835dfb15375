//go:build race

package processor

// Race reports whether the race detector is enabled, which multiplies the time.
const Race = true
