//go:build linux || darwin || freebsd || netbsd

package sharedlib

import "github.com/ebitengine/purego"

// Open loads a shared library, given a path or a name for the system's loader to find.
func Open(path string) (uintptr, error) {
	return purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
}

// Lookup returns the address of a symbol.
func Lookup(library uintptr, symbol string) (uintptr, error) {
	return purego.Dlsym(library, symbol)
}
