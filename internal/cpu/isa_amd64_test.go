package cpu

import (
	"testing"

	"golang.org/x/sys/cpu"
)

// TestDetectISA checks that each level requires all features that its kernels use.
func TestDetectISA(t *testing.T) {
	was := cpu.X86
	defer func() { cpu.X86 = was }()
	cpu.X86.HasAVX2, cpu.X86.HasFMA, cpu.X86.HasAVX512F, cpu.X86.HasAVX512DQ = true, true, true,
		true
	if l := detectISA(); l != AVX512 {
		t.Errorf("with all features: %v", l)
	}

	for _, c := range []struct {
		feature *bool
		want    ISA
	}{
		{&cpu.X86.HasAVX512DQ, AVX2}, {&cpu.X86.HasAVX512F, AVX2}, {&cpu.X86.HasFMA, Generic},
		{&cpu.X86.HasAVX2, Generic},
	} {
		*c.feature = false
		if l := detectISA(); l != c.want {
			t.Errorf("%+v: %v, want %v", cpu.X86, l, c.want)
		}
		*c.feature = true
	}
}
