// Package bounded tests functions that read files. Whatever a file contains, a reader must terminate
// and must use memory in proportion to the file's size.
package bounded

import (
	"runtime"
	"testing"
	"time"
)

const (
	// PerByte is the number of bytes a reader may allocate per byte of its file, including memory it
	// frees again.
	PerByte = 4
	// Constant is the number of bytes a reader may allocate in addition, for buffers, tables and
	// errors.
	Constant = 4 << 20
	// patience is the time limit for reading the files that tests create. It is a thousand times what
	// an idle computer needs, so only an endless loop exceeds it.
	patience = 2 * time.Minute
)

// Run calls read, which reads files of size bytes in total. It fails the test if read allocates more
// than [PerByte]·size + [Constant] bytes, and panics if read does not finish. No other goroutine may
// allocate memory at the same time.
func Run(t testing.TB, size int64, read func()) {
	t.Helper()
	watchdog := time.AfterFunc(patience, func() {
		panic("a reader has not finished: " +
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
