package cpu

import "golang.org/x/sys/cpu"

// detectISA returns the best level that the machine supports.
func detectISA() ISA {
	x := &cpu.X86
	switch {
	case x.HasAVX2 && x.HasFMA && x.HasAVX512F && x.HasAVX512DQ:
		return AVX512
	case x.HasAVX2 && x.HasFMA:
		return AVX2
	}
	return Generic
}

// HasBF16 reports whether the machine has AVX-512 instructions for bfloat16 pairs.
func HasBF16() bool { return cpu.X86.HasAVX512BF16 && cpu.X86.HasAVX512BW }
