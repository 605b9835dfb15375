package gemm

import "github.com/kasmina-go/kasmina/internal/cpu"

//go:generate go -C ../asm run . -part compact -pkg gemm -out ../gemm/compact_amd64.s

// The kernels of compact_amd64.s, which the program in internal/cpu/asm generates.

//go:noescape
func compactF32AVX512(s *strip)

//go:noescape
func compactF32AVX2(s *strip)

//go:noescape
func compactBF16AVX512(s *strip)

//go:noescape
func compactQ8AVX512(s *strip)

//go:noescape
func compactBF16AVX2(s *strip)

//go:noescape
func compactQ8AVX2(s *strip)

func compactKernelsFor(l cpu.ISA) compactKernels {
	switch l {
	case cpu.AVX512:
		return compactKernels{[...]func(*strip){compactF32AVX512, compactBF16AVX512, compactQ8AVX512}, 8, 8, [3]bool{BFloat16: true}}
	case cpu.AVX2:
		return compactKernels{[...]func(*strip){compactF32AVX2, compactBF16AVX2, compactQ8AVX2}, 6, 2, [3]bool{BFloat16: true}}
	}
	return portableCompact()
}
