//go:build !unix || aix || solaris || illumos

package llm

import "testing"

// namedPipe returns a path where there is none: this system has no pipes in folders.
func namedPipe(*testing.T) string { return "no pipe" }
