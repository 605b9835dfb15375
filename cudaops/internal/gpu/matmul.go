package gpu

import (
	"cmp"
	"fmt"
	"os"
)

// MatmulSpec describes products of row-major matrices,
//
//	D = alpha · op(A) op(B) + beta · C
//
// with op(A) [M, K], op(B) [K, N], C and D [M, N], all without gaps. Zero values mean: no
// transposition, one product, pointers aligned to 256 bytes. Sums are in float32 always.
//
// Float8 has a range so small that numbers are divided by a factor of their own before they are
// rounded to it. Of a product of float8 row i of op(A) is multiplied by factor i of M, and column j
// of op(B) by factor j of N. Factors are float32; it takes compute capability 9.0 and cuBLASLt
// 12.9. It is added up with fewer bits than float32 has, where that takes less time. cuBLASLt
// multiplies it only where both operands lie along K (TransB alone). K is a multiple of 16 then and
// N of 8, and all is aligned to 16 bytes.
type MatmulSpec struct {
	M, N, K        int
	TransA, TransB bool  // A is stored as [K, M], B as [N, K]
	A, B, D        DType // C has D's type
	Batch          int   // products, whose matrices lie one behind the other
	Align          int   // bytes that every pointer is a multiple of
}

// Scaled reports whether factors go with the operands.
func (m MatmulSpec) Scaled() bool { return m.A == Float8E4M3 }

// Normal fills in what zero values mean and refuses what makes no sense.
func (m MatmulSpec) Normal() (MatmulSpec, error) {
	m.Batch, m.Align = cmp.Or(m.Batch, 1), cmp.Or(m.Align, 256)
	if min(m.M, m.N, m.K, m.Batch) < 1 || m.Align&(m.Align-1) != 0 || m.Align < m.A.Size() ||
		m.Scaled() && m.Batch > 1 {
		return m, NewError("cublasLtMatmul", BlasInvalidValue, "", fmt.Sprintf("%+v: want sizes of "+
			"at least 1, an alignment that is a power of two and at least an element, and with "+
			"scales one product", m))
	}
	return m, nil
}

// FLOPs is the multiplications and additions of all products of a batch.
func (m MatmulSpec) FLOPs() float64 {
	return 2 * float64(m.M) * float64(m.N) * float64(m.K) * float64(m.Batch)
}

// Work is a batch of products as an [Observer] sees it.
func (m MatmulSpec) Work() Work {
	letters := map[bool]string{false: "n", true: "t"} // as BLAS writes transpositions
	name := fmt.Sprintf("cublasLt %dx%dx%d %s%s %v", m.M, m.N, m.K, letters[m.TransA],
		letters[m.TransB], m.D)
	if m.Batch > 1 {
		name += fmt.Sprintf(" x%d", m.Batch)
	}
	return Work{name, m.FLOPs()}
}

// MatmulArgs is the operands of one run. C may be zero, which means D.
type MatmulArgs struct {
	Alpha, Beta    float32
	A, B, C, D     Ptr
	ScaleA, ScaleB Ptr // factors of float8
	Workspace      Ptr
	WorkspaceSize  int
}

// Algo is a variant to compute a product.
type Algo struct {
	Workspace int       // bytes it needs
	ID        [8]uint64 // tells the same variant again, for one version of the library
}

// Blas is cuBLASLt.
type Blas interface {
	Version() int // 10000·major + 100·minor + patch
	// Plan prepares a product and asks for up to want variants to compute it, the one thought fastest
	// first. They have a workspace of at most that many bytes. None at all is an error with the
	// status BlasNotSupported.
	Plan(m MatmulSpec, workspace, want int) (MatmulPlan, error)
}

// MatmulPlan is a prepared product.
type MatmulPlan interface {
	Algos() []Algo
	// Run enqueues the product, computed in the variant with that index.
	Run(algo int, a MatmulArgs, s Stream) error
}

// Ready refuses operands that do not go with a plan, has C be D where it is null, and poisons what
// the run is about to write, where [Poison] says so.
func (m MatmulSpec) Ready(c Context, algos []Algo, algo int, a *MatmulArgs, s Stream) error {
	detail := ""
	switch {
	case algo < 0 || algo >= len(algos) || a.WorkspaceSize < algos[algo].Workspace:
		detail = fmt.Sprintf("algorithm %d of %v with a workspace of %d bytes", algo, algos,
			a.WorkspaceSize)
	case m.Scaled() != (a.ScaleA != 0) || m.Scaled() != (a.ScaleB != 0) ||
		(a.ScaleA|a.ScaleB)%16 != 0 || (a.A|a.B|a.C|a.D)%Ptr(m.Align) != 0:
		detail = fmt.Sprintf("A, B, C, D at %#x and scales at %#x: want multiples of %d and 16, and "+
			"two scales with scaled operands alone", []Ptr{a.A, a.B, a.C, a.D},
			[]Ptr{a.ScaleA, a.ScaleB}, m.Align)
	}

	if detail != "" {
		return NewError("cublasLtMatmul", BlasInvalidValue, "", detail)
	}

	if a.C = cmp.Or(a.C, a.D); !Poison {
		return nil
	}

	err := c.Memset8(a.Workspace, 0xff, algos[algo].Workspace, s)
	if err == nil && (a.Beta == 0 || a.C != a.D) {
		err = c.Memset8(a.D, 0xff, m.Batch*m.M*m.N*m.D.Size(), s)
	}

	return err
}

// Poison has what a product or a kernel of the copy engine is about to write filled with NaN, on
// its stream. That is D, where nothing of it is read, and what cuBLASLt needs of its workspace. It
// is also what this module's kernels for Hopper store with the engine. What the writer leaves out
// then shows in what is computed from it, and so does a product that reads where it writes. It is
// for tests, which set it or the environment variable KASMINA_POISON. Under compute-sanitizer's
// initcheck it takes the place of the tool's own bookkeeping. That does not see what the copy
// engine stores, and reports every later read of it.
var Poison = os.Getenv("KASMINA_POISON") != ""
