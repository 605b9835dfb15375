//go:build !race

// Package processor measures the processor time used by tests.
package processor

// Race reports whether the race detector, which makes programs several times slower, is enabled.
const Race = false
