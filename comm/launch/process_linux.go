package launch

import "syscall"

// attributes puts a process into a separate process group, and makes the kernel kill it if this program
// dies.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
