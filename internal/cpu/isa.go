package cpu

import (
	"os"
	"strings"
)

// isa is a level of vector instructions.
type isa int

const (
	generic isa = iota // portable Go
	avx2               // AVX2 and FMA
	avx512             // AVX-512F and AVX-512DQ
	neon               // of arm64
)

func (l isa) String() string { return [...]string{"generic", "avx2", "avx512", "neon"}[l] }

// ISA is the name of the vector instructions that kernels use.
func ISA() string { return level.String() }

// level is what the kernels of this process use: the best the CPU and the system support, or less if the environment
// variable KASMINA_CPU asks for it (avx512, avx2, neon or generic; anything else counts as unset). It is read once, at start.
var level = chooseISA(os.Getenv("KASMINA_CPU"), detectISA())

func init() {
	useISA(level)
	rounding.Store(os.Getenv("KASMINA_CPU_BF16") == "1" && gemmBF16 != nil)
}

// useISA switches every kernel to l, which the machine must have.
func useISA(l isa) {
	level = l
	gemm32.kernels, gemm64.kernels = gemmKernelsFor(l)
	useBF16(gemm32.kernels)
	rows32 = rowKernelsFor(l)
	for _, use := range users {
		use()
	}
}

// users are told when tests change the instruction set.
var users []func()

// OnISA calls use now, and whenever EachISA changes the instruction set.
func OnISA(use func()) {
	users = append(users, use)
	use()
}

// EachISA calls f with the kernels of every instruction set that this machine has, for tests. Nothing
// else may compute meanwhile.
func EachISA(f func(isa string)) {
	defer useISA(level)
	for _, l := range levels(detectISA()) {
		useISA(l)
		f(l.String())
	}
}

func chooseISA(wish string, best isa) isa {
	for _, l := range levels(best) {
		if strings.EqualFold(wish, l.String()) {
			return l
		}
	}
	return best
}

// levels returns what a machine has whose best level is given, in ascending order.
func levels(best isa) []isa {
	if best == neon {
		return []isa{generic, neon}
	}
	return []isa{generic, avx2, avx512}[:best+1]
}
