//go:build !unix

package processor

import (
	"testing"
	"time"
)

var began = time.Now()

// Time returns the time by the clock, where the system does not tell that of the processors.
func Time(testing.TB) time.Duration { return time.Since(began) }
