package cpuops

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// hugePages asks for large pages where b covers whole ones: fewer address translations are missed
// then. The kernel is free to refuse.
func hugePages(b []byte) {
	const size = 2 << 20
	skip := -int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) & (size - 1)
	if n := (len(b) - skip) &^ (size - 1); n > 0 {
		_ = unix.Madvise(b[skip:skip+n], unix.MADV_HUGEPAGE)
	}
}
