//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package main

import (
	"fmt"
	"os"
	"syscall"
)

// claim makes a folder that of this run until it is released, which the kernel does for a process that dies. It is an error
// when another run has it: both would write to the same checkpoint. Where folders cannot be locked, they are nobody's.
func claim(dir string) (release func(), err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == syscall.EWOULDBLOCK {
		f.Close()
		return nil, fmt.Errorf("another run is writing to %s now; name another folder for this one", dir)
	}
	return func() { f.Close() }, nil
}
