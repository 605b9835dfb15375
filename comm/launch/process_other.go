//go:build unix && !linux

package launch

import "syscall"

// attributes puts a process into a separate process group.
func attributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
