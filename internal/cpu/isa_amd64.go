package cpu

import (
	"golang.org/x/sys/cpu"
)

func detectISA() isa {
	x := &cpu.X86
	switch {
	case x.HasAVX2 && x.HasFMA && x.HasAVX512F && x.HasAVX512DQ:
		return avx512
	case x.HasAVX2 && x.HasFMA:
		return avx2
	}
	return generic
}
