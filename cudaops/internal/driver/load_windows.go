package driver

import "syscall"

// openLibrary loads a DLL: a path, or a name that the system's loader looks up.
func openLibrary(path string) (uintptr, error) {
	h, err := syscall.LoadLibrary(path)
	return uintptr(h), err
}

func lookup(library uintptr, symbol string) (uintptr, error) {
	return syscall.GetProcAddress(syscall.Handle(library), symbol)
}
