//go:build unix

package processor

import (
	"syscall"
	"testing"
	"time"
)

// Time returns the processor time this process has used, which other programs do not affect.
func Time(t testing.TB) time.Duration {
	t.Helper()
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		t.Fatal(err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
