//go:build unix

package processor

import (
	"syscall"
	"testing"
	"time"
)

// Time returns what the process has used of all processors, on which other programs have no part.
func Time(t testing.TB) time.Duration {
	t.Helper()
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		t.Fatal(err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
