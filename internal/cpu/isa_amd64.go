package cpu

import "golang.org/x/sys/cpu"

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

// HasBF16 reports whether AVX-512 has instructions for pairs of bfloat16.
func HasBF16() bool { return cpu.X86.HasAVX512BF16 && cpu.X86.HasAVX512BW }
