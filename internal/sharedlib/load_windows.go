package sharedlib

import (
	"fmt"
	"path/filepath"

	"golang.org/x/sys/windows"
)

// Open loads a DLL, given an absolute path or a name in System32. The DLL's dependencies are loaded
// from its directory and System32. The working directory and PATH, where an attacker could plant a
// DLL, are never searched.
func Open(path string) (uintptr, error) {
	flags := uintptr(windows.LOAD_LIBRARY_SEARCH_SYSTEM32)
	switch {
	case filepath.IsAbs(path):
		path = filepath.Clean(path) // the loader does not accept forward slashes
		flags |= windows.LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR
	case filepath.Base(path) != path || filepath.VolumeName(path) != "":
		return 0, fmt.Errorf("%s: want an absolute path, or a name in System32", path)
	}
	h, err := windows.LoadLibraryEx(path, 0, flags)
	return uintptr(h), err
}

// Lookup returns the address of a symbol.
func Lookup(library uintptr, symbol string) (uintptr, error) {
	return windows.GetProcAddress(windows.Handle(library), symbol)
}
