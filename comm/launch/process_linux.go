package launch

import "syscall"

// attributes put a process into a group of its own, and end it should this program die.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
