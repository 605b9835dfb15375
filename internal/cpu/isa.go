package cpu

import (
	"os"
	"strings"
)

// ISA is a level of vector instructions.
type ISA int

// The levels.
const (
	Generic ISA = iota // portable Go
	AVX2               // AVX2 and FMA
	AVX512             // AVX-512F and AVX-512DQ
	Neon               // of arm64
)

// String returns the name that KASMINA_CPU takes.
func (l ISA) String() string { return [...]string{"generic", "avx2", "avx512", "neon"}[l] }

// Level returns the vector instructions that kernels use.
func Level() ISA { return level }

// ISAs returns those that this machine has, in ascending order.
func ISAs() []ISA { return levels(detectISA()) }

// level is what the kernels of this process use: the best that the CPU and the system support, or
// less where KASMINA_CPU asks for it. The values of that variable are avx512, avx2, neon and
// generic; anything else counts as unset. It is read once, at start.
var level = chooseISA(os.Getenv("KASMINA_CPU"), detectISA())

// users are what chooses kernels by the level.
var users []func(ISA)

// OnISA calls f with the level in use, and again when it changes. Packages call it while they are
// initialised.
func OnISA(f func(ISA)) {
	users = append(users, f)
	f(level)
}

// UseISA switches every kernel to l, which the machine must have. Tests call it.
func UseISA(l ISA) {
	level = l
	for _, f := range users {
		f(l)
	}
}

func chooseISA(wish string, best ISA) ISA {
	for _, l := range levels(best) {
		if strings.EqualFold(wish, l.String()) {
			return l
		}
	}
	return best
}

// levels returns what a machine has whose best level is given, in ascending order.
func levels(best ISA) []ISA {
	if best == Neon {
		return []ISA{Generic, Neon}
	}
	return []ISA{Generic, AVX2, AVX512}[:best+1]
}
