//go:build unix

package launch

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// forwarded lists the signals to forward, and requests those among them that request termination.
var (
	forwarded = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1,
		syscall.SIGUSR2}
	requests = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP}
)

// send signals a process and its descendants. It is not an error if the process has already exited.
func send(p *os.Process, s os.Signal) {
	if number, ok := s.(syscall.Signal); ok {
		_ = syscall.Kill(-p.Pid, number)
	}
}

func terminate(p *os.Process) { send(p, syscall.SIGTERM) }
func kill(p *os.Process)      { send(p, syscall.SIGKILL) }

// outcome returns a process's exit code, or the signal that terminated it.
func outcome(s *os.ProcessState) (code int, by os.Signal) {
	if w, ok := s.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		return -1, w.Signal()
	}
	return s.ExitCode(), nil
}

// brokenPipe reports whether f is the write end of a pipe or connection without a reader.
func brokenPipe(f *os.File) (broken bool) {
	raw, err := f.SyscallConn()
	if err != nil {
		return false
	}
	err = raw.Control(func(fd uintptr) {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		_, err := unix.Poll(poll, 0)
		broken = err == nil && poll[0].Revents&(unix.POLLERR|unix.POLLHUP) != 0
	})
	return err == nil && broken
}
