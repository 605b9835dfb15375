package cpu

import (
	"testing"
	"unsafe"
)

// TestSlab checks that memory starts at a cache line, contains zeros, and does not overlap, also when it is
// larger than a piece of the slab.
func TestSlab(t *testing.T) {
	var s Slab
	var all [][]byte
	for _, n := range []int{1, 63, 64, 65, slabBytes, 3, slabBytes + 1, 0, 100} {
		b := s.Take(n)
		if len(b) != n || cap(b) != n {
			t.Fatalf("Take(%d) has %d bytes and a capacity of %d", n, len(b), cap(b))
		}
		if at := uintptr(unsafe.Pointer(unsafe.SliceData(b))); at%cacheLine != 0 {
			t.Errorf("Take(%d) starts at %#x", n, at)
		}
		for i := range b {
			if b[i] != 0 {
				t.Fatalf("Take(%d): byte %d is %d", n, i, b[i])
			}
			b[i] = byte(len(all) + 1)
		}
		all = append(all, b)
	}

	for i, b := range all {
		for j := range b {
			if b[j] != byte(i+1) {
				t.Fatalf("slice %d, byte %d is %d: slices overlap", i, j, b[j])
			}
		}
	}
}
