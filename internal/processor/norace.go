//go:build !race

// Package processor measures the processor time used by tests.
package processor

// Race reports whether the race detector is enabled, which multiplies the time.
const Race = false
