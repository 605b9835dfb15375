//go:build race

package processor

// Race reports whether the race detector, which makes programs several times slower, is enabled.
const Race = true
