package cpu

import "unsafe"

// Slab hands out memory from large pieces, so that the system can use large pages. Memory cannot be returned.
// The zero value is ready to use.
type Slab struct{ free []byte }

const (
	slabBytes = 16 << 20
	cacheLine = 64
)

// Take returns n bytes of zeros that start at a cache line.
func (s *Slab) Take(n int) []byte {
	rounded := CeilDiv(n, cacheLine) * cacheLine
	if rounded > len(s.free) {
		raw := make([]byte, max(slabBytes, rounded)+cacheLine)
		HugePages(raw)
		skip := -int(uintptr(unsafe.Pointer(unsafe.SliceData(raw)))) & (cacheLine - 1)
		s.free = raw[skip : len(raw)-cacheLine+skip]
	}

	b := s.free[:n:n]
	s.free = s.free[rounded:]
	return b
}
