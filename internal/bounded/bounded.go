// Package bounded is for the tests of what reads files. Whatever stands in a file, a reader takes
// memory in proportion to it, and comes to an end.
package bounded

import (
	"runtime"
	"testing"
	"time"
)

const (
	// PerByte is how much memory a reader may allocate for a byte of its file, all that is freed
	// again included.
	PerByte = 4
	// Constant is what it may allocate beside that, for a file of any size: buffers, tables,
	// errors.
	Constant = 4 << 20
	// patience is how long a reader may take for the files that tests make. It is a thousand times
	// what they take on an idle computer, so it tells a loop without end from a busy computer.
	patience = 2 * time.Minute
)

// Run calls read, which reads files of so many bytes together. It fails the test if that allocates
// more than [PerByte] times their size and [Constant]. If it does not come to an end, the program
// does. Nothing else may allocate meanwhile.
func Run(t testing.TB, size int64, read func()) {
	t.Helper()
	watchdog := time.AfterFunc(patience, func() {
		panic("a reader has not come to an end: " +
			t.Name())
	})
	defer watchdog.Stop()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	read()
	runtime.ReadMemStats(&after)
	if took, limit := after.TotalAlloc-before.TotalAlloc,
		uint64(PerByte*size+Constant); took > limit {
		t.Errorf("files of %d bytes together took %d bytes of memory to read, want at most %d",
			size, took, limit)
	}
}
