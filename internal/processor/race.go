//go:build race

package processor

// Race is whether the race detector watches, which takes a multiple of the time.
const Race = true
