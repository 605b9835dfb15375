//go:build !race

// Package processor measures the processor time that tests take.
package processor

// Race is whether the race detector watches, which takes a multiple of the time.
const Race = false
