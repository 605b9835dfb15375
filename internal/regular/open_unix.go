//go:build unix

package regular

import "syscall"

// nonBlocking makes opening a named pipe return at once. It does not affect regular files.
const nonBlocking = syscall.O_NONBLOCK
