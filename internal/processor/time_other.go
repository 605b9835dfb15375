//go:build !unix

package processor

import (
	"testing"
	"time"
)

var began = time.Now()

// Time returns the elapsed time, because the system does not report processor time.
func Time(testing.TB) time.Duration { return time.Since(began) }
