package cpu

import (
	"os"
	"strings"
)

// ISA is a level of vector instructions.
type ISA int

// Levels.
const (
	Generic ISA = iota // portable Go
	AVX2               // AVX2 and FMA
	AVX512             // AVX-512F and AVX-512DQ
	Neon               // NEON of arm64
)

// String returns the level's name, as used in KASMINA_CPU.
func (l ISA) String() string { return [...]string{"generic", "avx2", "avx512", "neon"}[l] }

// Level returns the level that kernels use.
func Level() ISA { return level }

// ISAs returns the levels that this machine supports, in ascending order.
func ISAs() []ISA { return levels(detectISA()) }

// level is the level used by this process: the best that the CPU and the system support, or the
// lower one given by the environment variable KASMINA_CPU, which is read once at startup. Its
// values are avx512, avx2, neon and generic; any other value is ignored.
var level = chooseISA(os.Getenv("KASMINA_CPU"), detectISA())

// users are the functions registered with OnISA.
var users []func(ISA)

// OnISA calls f with the current level, and again when it changes. Packages call it during
// initialization.
func OnISA(f func(ISA)) {
	users = append(users, f)
	f(level)
}

// UseISA switches all kernels to l, which the machine must support. It is meant for tests.
func UseISA(l ISA) {
	level = l
	for _, f := range users {
		f(l)
	}
}

// chooseISA returns the level named wish if the machine supports it, otherwise best.
func chooseISA(wish string, best ISA) ISA {
	for _, l := range levels(best) {
		if strings.EqualFold(wish, l.String()) {
			return l
		}
	}
	return best
}

// levels returns all levels of a machine with the given best level, in ascending order.
func levels(best ISA) []ISA {
	if best == Neon {
		return []ISA{Generic, Neon}
	}
	return []ISA{Generic, AVX2, AVX512}[:best+1]
}
