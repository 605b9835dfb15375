package launch

import (
	"os"
	"syscall"

	"golang.org/x/sys/windows"
)

// forwarded are the signals that are handed on, and requests those of them that ask to end.
var (
	forwarded = []os.Signal{os.Interrupt, syscall.SIGTERM}
	requests  = forwarded
)

func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{CreationFlags: windows.CREATE_NEW_PROCESS_GROUP}
}

// send interrupts a process and what it has started in its group. Windows knows one such signal,
// which Go programs see as an interrupt.
func send(p *os.Process, _ os.Signal) { terminate(p) }

func terminate(p *os.Process) {
	_ = windows.GenerateConsoleCtrlEvent(windows.CTRL_BREAK_EVENT, uint32(p.Pid)) // it may be gone
}

func kill(p *os.Process) { _ = p.Kill() } // it may be gone

func outcome(s *os.ProcessState) (code int, by os.Signal) { return s.ExitCode(), nil }

// brokenPipe reports false: Windows does not signal broken pipes.
func brokenPipe(*os.File) bool { return false }
