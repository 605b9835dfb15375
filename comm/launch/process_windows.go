package launch

import (
	"os"
	"syscall"

	"golang.org/x/sys/windows"
)

// forwarded lists the signals to forward, and requests those among them that request termination.
var (
	forwarded = []os.Signal{os.Interrupt, syscall.SIGTERM}
	requests  = forwarded
)

func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{CreationFlags: windows.CREATE_NEW_PROCESS_GROUP}
}

// send interrupts a process and its descendants in the process group. Windows supports only one such
// signal, which Go programs receive as an interrupt.
func send(p *os.Process, _ os.Signal) { terminate(p) }

func terminate(p *os.Process) {
	_ = windows.GenerateConsoleCtrlEvent(windows.CTRL_BREAK_EVENT, uint32(p.Pid)) // the process may be gone
}

func kill(p *os.Process) { _ = p.Kill() } // the process may be gone

func outcome(s *os.ProcessState) (code int, by os.Signal) { return s.ExitCode(), nil }

// brokenPipe reports false: Windows does not signal broken pipes.
func brokenPipe(*os.File) bool { return false }
