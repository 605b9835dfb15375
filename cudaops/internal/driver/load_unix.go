//go:build linux || darwin || freebsd || netbsd

package driver

import "github.com/ebitengine/purego"

// openLibrary loads a shared library: a path, or a name that the system's loader looks up.
func openLibrary(path string) (uintptr, error) {
	return purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
}

func lookup(library uintptr, symbol string) (uintptr, error) { return purego.Dlsym(library, symbol) }
