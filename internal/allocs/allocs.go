// Package allocs counts allocations for tests.
package allocs

import (
	"runtime/debug"
	"testing"
)

// PerRun returns the number of allocations per call of f, averaged over runs calls like
// [testing.AllocsPerRun], which counts allocations of the whole process. Other activity only adds
// to the count, and garbage collections only empty pools. PerRun therefore disables collections and
// returns the minimum of several measurements.
func PerRun(runs int, f func()) float64 {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	least := testing.AllocsPerRun(runs, f)
	for range 4 {
		if least == 0 {
			break
		}
		least = min(least, testing.AllocsPerRun(runs, f))
	}
	return least
}
