package cpu

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// HugePages suggests large pages to the kernel for the part of b that covers whole ones, which saves
// address translations. The kernel may ignore the suggestion.
func HugePages(b []byte) {
	const size = 2 << 20
	skip := -int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) & (size - 1)
	if n := (len(b) - skip) &^ (size - 1); n > 0 {
		_ = unix.Madvise(b[skip:skip+n], unix.MADV_HUGEPAGE)
	}
}
