//go:build !unix || aix || solaris || illumos

package texttest

import "testing"

// NamedPipe returns a path where there is none: this system has no pipes in folders.
func NamedPipe(*testing.T) string { return "no pipe" }
