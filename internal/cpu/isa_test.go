package cpu

import "testing"

func TestChooseISA(t *testing.T) {
	for _, c := range []struct {
		wish       string
		best, want ISA
	}{{"", AVX512, AVX512}, {"generic", AVX512, Generic}, {"AVX2", AVX512, AVX2},
		{"avx512", AVX2, AVX2},
		{"avx512", Generic, Generic}, {"mmx", AVX2, AVX2}, {"", Neon, Neon},
		{"generic", Neon, Generic}, {"avx2", Neon, Neon}, {"neon", AVX2, AVX2}} {
		if got := chooseISA(c.wish, c.best); got != c.want {
			t.Errorf("chooseISA(%q, %v) = %v, want %v", c.wish, c.best, got, c.want)
		}
	}
}
