package gemm

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// NewtonSchulz is Muon's iteration on a normalized X, using the symmetry of its products:
//
//	Steps times:  A = X·Xᵀ,  P = a·I + b·A + c·A²,  X ← P·X
//
// For tall matrices it computes A = Xᵀ·X and X ← X·P.
//
// All polynomials in A commute. The next A can therefore be computed without X, as P·A·P, and X
// multiplied just once by the product of several P:
//
//	A = X·Xᵀ,  Q = I;   Together times:  P = a·I + b·A + c·A²,  Q ← Q·P,  A ← P·A·P;   X ← Q·X
//
// For wide matrices this takes less work, because the additional products are between small
// squares. The identity underlies Jack Zhang, Noah Amsel, Berlin Chen, Tri Dao, "Gram
// Newton-Schulz", 2026. Until A is recomputed from X, however, rounding errors in the eigenvalues
// of A near 0 grow by a factor of a² ≈ 12 with every step, so at most three steps should go
// together.
//
// Of the 16-bit types, use float16: the numbers never exceed a few tens, and bfloat16 is eight
// times as coarse.
type NewtonSchulz struct {
	// Batch consecutive matrices [Rows, Columns]: the initial X, and space for the next
	X                    [2]gpu.Ptr
	Squares              [4]gpu.Ptr // space for Batch matrices [N, N] each, N = min(Rows, Columns)
	Rows, Columns, Batch int
	Steps, Together      int
	Type                 gpu.DType
}

// The coefficients of the iteration's polynomial.
const SchulzA, SchulzB, SchulzC = 3.4445, -4.7750, 2.0315

// Symmetric returns the shapes of the symmetric products, without operands: the product of squares,
// and the product of X with itself.
func (a NewtonSchulz) Symmetric() (square, gram Symmetric) {
	n := min(a.Rows, a.Columns)
	square = Symmetric{Alpha: 1, N: n, Depth: n, Batch: a.Batch, Type: a.Type}
	gram = square
	gram.Depth, gram.Tall = max(a.Rows, a.Columns), a.Rows > a.Columns
	return square, gram
}

// NewtonSchulzTogether returns the number of steps that should be computed together for a single
// matrix, or 0 if cuBLASLt's products alone should be faster.
func NewtonSchulzTogether(rows, columns int) int {
	switch side := min(rows, columns); {
	case side < 1536: // too small for the kernel to fill the GPU
		return 0
	case 2*max(rows, columns) < 3*side:
		return 1
	}
	return 3
}

// Segments returns the number of times X is multiplied.
func (a NewtonSchulz) Segments() int { return kernel.CeilDiv(a.Steps, a.Together) }

// Run runs the iteration. It calls symmetric for products of squares and of X with itself, and
// apply to compute y = q·x, or y = x·q if x is tall.
func (a NewtonSchulz) Run(symmetric func(Symmetric), apply func(y, q, x gpu.Ptr)) {
	square, first := a.Symmetric()
	multiply := func(p Symmetric, d, left, right gpu.Ptr) {
		p.D, p.Left, p.Right = d, left, right
		symmetric(p)
	}
	poly := square
	poly.Alpha, poly.Beta, poly.Delta = SchulzC, SchulzB, SchulzA
	x, y, left := a.X[0], a.X[1], a.Steps
	for segments := a.Segments(); segments > 0; segments-- {
		steps := kernel.CeilDiv(left, segments)
		left -= steps
		gram, p, q, room := a.Squares[0], a.Squares[1], a.Squares[2], a.Squares[3]
		multiply(first, gram, x, x)
		for i := range steps {
			poly.C = gram
			multiply(poly, p, gram, gram)
			if i < steps-1 {
				multiply(square, room, gram, p)
				multiply(square, gram, room, p)
			}
			if i == 0 {
				p, q = q, p
			} else {
				multiply(square, room, q, p)
				q, room = room, q
			}
		}
		apply(y, q, x)
		x, y = y, x
	}
}

// Symmetric computes products that are known to be symmetric, with float32 sums:
//
//	D = Alpha·Left·Rightᵀ + Beta·C + Delta·I
//
// It does so for Batch consecutive triples of matrices. Left and Right are [N, Depth] or, if Tall,
// stored as [Depth, N]; C and D are [N, N]. C is symmetric, or null. D must not overlap an operand.
//
// Only the part of the product on and below the diagonal is computed, so D is exactly symmetric.
type Symmetric struct {
	D, Left, Right, C  gpu.Ptr
	Alpha, Beta, Delta float64
	N, Depth, Batch    int
	Tall               bool
	Type               gpu.DType
}

// Variants returns the variants that accept the launch if all addresses are multiples of 16. Hopper
// has one for float16 if N and Depth are multiples of 8.
func (a Symmetric) Variants(k *kernel.Set) []kernel.Variant {
	return onHopper(k, kernel.Variant{Family: "half"},
		a.Type == gpu.Float16 && a.N%8 == 0 && a.Depth%8 == 0)
}

// The columns of a tile of gemm_symmetric.cu, and its stages.
const symmetricColumns, symmetricStages = 160, 5

// Launch enqueues one kernel.
func (a Symmetric) Launch(q *kernel.Queue) {
	clusters := 0 // must match clustersIn in gemm_symmetric.cu
	const rows = gemmCluster * gemmRows
	for row := rows; row < a.N+rows; row += rows {
		clusters += kernel.CeilDiv(min(row, a.N), symmetricColumns)
	}

	symbol, columns := "gemm_symmetric", symmetricColumns
	left := matrix(a.Left, a.Depth, a.N, gemmDepth, gemmRows)
	right := matrix(a.Right, a.Depth, a.N, gemmDepth, symmetricColumns/gemmCluster)
	if a.Tall {
		symbol, columns = "gemm_symmetric_tall", kernel.CeilDiv(columns, 64)*64
		left = matrix(a.Left, a.N, a.Depth, 64, gemmDepth)
		right = matrix(a.Right, a.N, a.Depth, 64, gemmDepth/gemmCluster)
	}

	gemmLaunch{unit: "gemm_symmetric", symbol: symbol, dtype: a.Type,
		shared:   symmetricStages * (2*gemmDepth*(gemmRows+columns) + 16),
		params:   kernel.Struct{a.D, a.C, a.N, a.Depth, clusters, a.Alpha, a.Beta, a.Delta},
		matrices: []gemmMatrix{left.times(a.Batch, 1), right.times(a.Batch, 1)},
		clusters: clusters * a.Batch}.run(q)
}
