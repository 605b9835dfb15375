//go:build !unix || aix || solaris || illumos

package texttest

import "testing"

// NamedPipe returns a path that does not exist, because this system does not support named pipes in
// directories.
func NamedPipe(*testing.T) string { return "no pipe" }
