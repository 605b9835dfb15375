package gpu

import (
	"cmp"
	"fmt"
	"os"
)

// MatmulSpec describes a product of row-major matrices, or a batch of such products:
//
//	D = alpha · op(A) op(B) + beta · C
//
// Here op(A) is [M, K], op(B) is [K, N], and C and D are [M, N], all contiguous. Zero values mean no
// transposition, a single product, and pointers aligned to 256 bytes. Sums are always in float32.
//
// The range of float8 is so small that numbers must be divided by a scale before rounding. In a float8
// product, row i of op(A) is multiplied by scale i of M, and column j of op(B) by scale j of N. Scales
// are float32. Such products need compute capability 9.0 and cuBLASLt 12.9, and may be accumulated with
// fewer bits than float32 where this is faster. cuBLASLt supports them only if both operands are
// contiguous along K (only TransB is set), K is a multiple of 16, N is a multiple of 8, and all pointers
// are aligned to 16 bytes.
type MatmulSpec struct {
	M, N, K        int
	TransA, TransB bool  // A is stored as [K, M], B as [N, K]
	A, B, D        DType // C has D's type
	Batch          int   // number of products with consecutive matrices
	Align          int   // alignment of every pointer in bytes
}

// Scaled reports whether the operands have scales.
func (m MatmulSpec) Scaled() bool { return m.A == Float8E4M3 }

// Normal returns the spec with zero values replaced by their meaning, or an error if the spec is invalid.
func (m MatmulSpec) Normal() (MatmulSpec, error) {
	m.Batch, m.Align = cmp.Or(m.Batch, 1), cmp.Or(m.Align, 256)
	if min(m.M, m.N, m.K, m.Batch) < 1 || m.Align&(m.Align-1) != 0 || m.Align < m.A.Size() ||
		m.Scaled() && m.Batch > 1 {
		return m, NewError("cublasLtMatmul", BlasInvalidValue, "", fmt.Sprintf("%+v: want sizes of "+
			"at least 1, an alignment that is a power of two and no less than the size of an element, "+
			"and a single product if it has scales", m))
	}
	return m, nil
}

// FLOPs returns the number of multiplications and additions in the whole batch.
func (m MatmulSpec) FLOPs() float64 {
	return 2 * float64(m.M) * float64(m.N) * float64(m.K) * float64(m.Batch)
}

// Work describes the batch for an [Observer].
func (m MatmulSpec) Work() Work {
	letters := map[bool]string{false: "n", true: "t"} // BLAS notation for transposition
	name := fmt.Sprintf("cublasLt %dx%dx%d %s%s %v", m.M, m.N, m.K, letters[m.TransA],
		letters[m.TransB], m.D)
	if m.Batch > 1 {
		name += fmt.Sprintf(" x%d", m.Batch)
	}
	return Work{name, m.FLOPs()}
}

// MatmulArgs are the operands of one run. A zero C means D.
type MatmulArgs struct {
	Alpha, Beta    float32
	A, B, C, D     Ptr
	ScaleA, ScaleB Ptr // scales of float8 operands
	Workspace      Ptr
	WorkspaceSize  int
}

// Algo is a variant of a product.
type Algo struct {
	Workspace int       // required workspace in bytes
	ID        [8]uint64 // identifies the variant within one version of the library
}

// Blas is cuBLASLt.
type Blas interface {
	Version() int // 10000·major + 100·minor + patch
	// Plan prepares a product and returns up to want variants for it, with the one expected to be fastest
	// first. The variants need at most workspace bytes of workspace. If there are none, Plan returns an
	// error with status BlasNotSupported.
	Plan(m MatmulSpec, workspace, want int) (MatmulPlan, error)
}

// MatmulPlan is a prepared product.
type MatmulPlan interface {
	Algos() []Algo
	// Run enqueues the product using the variant with index algo.
	Run(algo int, a MatmulArgs, s Stream) error
}

// Ready validates the operands of a run, replaces a null C with D and, if [Poison] is set, fills the
// memory that the run will write with NaN.
func (m MatmulSpec) Ready(c Context, algos []Algo, algo int, a *MatmulArgs, s Stream) error {
	detail := ""
	switch {
	case algo < 0 || algo >= len(algos) || a.WorkspaceSize < algos[algo].Workspace:
		detail = fmt.Sprintf("algorithm %d of %v with a workspace of %d bytes", algo, algos,
			a.WorkspaceSize)
	case m.Scaled() != (a.ScaleA != 0) || m.Scaled() != (a.ScaleB != 0) ||
		(a.ScaleA|a.ScaleB)%16 != 0 || (a.A|a.B|a.C|a.D)%Ptr(m.Align) != 0:
		detail = fmt.Sprintf("A, B, C, D at %#x and scales at %#x: want multiples of %d and 16, and "+
			"two scales for scaled operands, or else none", []Ptr{a.A, a.B, a.C, a.D},
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

// Poison fills memory with NaN, on the stream, before a product or a kernel that uses the copy engine
// writes to it. This covers D where the product doesn't read it, the workspace that cuBLASLt needs, and
// results that this module's Hopper kernels store through the copy engine. Elements that the writer
// misses then show up in all further results, as does a product that reads its own output.
//
// Poison is meant for tests, which set it or the environment variable KASMINA_POISON. Under
// compute-sanitizer's initcheck it also makes up for a gap in the tool's bookkeeping, which misses stores
// by the copy engine and therefore reports every later read of the results.
var Poison = os.Getenv("KASMINA_POISON") != ""
