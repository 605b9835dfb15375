//go:build !unix

package state_test

import (
	"testing"
	"time"
)

var began = time.Now()

// processorTime returns the time by the clock, where the system does not tell that of the processors.
func processorTime(testing.TB) time.Duration { return time.Since(began) }
