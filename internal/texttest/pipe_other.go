//go:build !unix || aix || solaris || illumos

package texttest

import "testing"

// NamedPipe returns a path that does not exist, because this system has no named pipes in folders.
func NamedPipe(*testing.T) string { return "no pipe" }
