//go:build unix

package regular

import "syscall"

// nonBlocking makes opening a named pipe return at once. Reading a regular file is the same with
// and without it.
const nonBlocking = syscall.O_NONBLOCK
