package gemm

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// NewtonSchulz is Muon's iteration, of X normalised, where products are known to be symmetric:
//
//	Steps times:  A = X·Xᵀ,  P = a·I + b·A + c·A²,  X ← P·X
//
// or for tall matrices A = Xᵀ·X, X ← X·P. All that is made of A commutes. So the next A can be had
// without X, as P·A·P, and X is multiplied by the product of the P:
//
//	A = X·Xᵀ,  Q = I;   Together times:  P = a·I + b·A + c·A²,  Q ← Q·P,  A ← P·A·P;   X ← Q·X
//
// which for wide matrices takes less, since these products are of small squares. The identity is
// behind Jack Zhang, Noah Amsel, Berlin Chen, Tri Dao, "Gram Newton-Schulz", 2026. What rounding
// makes of the eigenvalues of A next to 0 grows like a² with every step, a² ≈ 12, until A is formed
// anew. So up to three steps go together.
//
// Of types of 16 bits float16 is the one: numbers are at most some tens, and bfloat16 is eight
// times as coarse.
type NewtonSchulz struct {
	// Batch matrices [Rows, Columns], one behind the other: X at first, and room for the next
	X                    [2]gpu.Ptr
	Squares              [4]gpu.Ptr // room for Batch matrices [N, N], N = min(Rows, Columns), each
	Rows, Columns, Batch int
	Steps, Together      int
	Type                 gpu.DType
}

// The coefficients of the iteration's polynomial.
const SchulzA, SchulzB, SchulzC = 3.4445, -4.7750, 2.0315

// Symmetric is the products that are known to be symmetric, without their operands: that of
// squares, and A's.
func (a NewtonSchulz) Symmetric() (square, gram Symmetric) {
	n := min(a.Rows, a.Columns)
	square = Symmetric{Alpha: 1, N: n, Depth: n, Batch: a.Batch, Type: a.Type}
	gram = square
	gram.Depth, gram.Tall = max(a.Rows, a.Columns), a.Rows > a.Columns
	return square, gram
}

// NewtonSchulzTogether is how many steps go together in a way that should be the fastest for one
// matrix, 0 where cuBLASLt's products alone are faster.
func NewtonSchulzTogether(rows, columns int) int {
	switch side := min(rows, columns); {
	case side < 1536: // too small for the kernel to fill the GPU
		return 0
	case 2*max(rows, columns) < 3*side:
		return 1
	}
	return 3
}

// Segments is how often X is formed.
func (a NewtonSchulz) Segments() int { return kernel.CeilDiv(a.Steps, a.Together) }

// Run has the squares multiplied by symmetric, and X by apply: y = q·x, or x·q for a tall x.
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

// Symmetric computes products that are known to be symmetric, with sums in float32,
//
//	D = Alpha·Left·Rightᵀ + Beta·C + Delta·I
//
// for Batch triples of matrices, one behind the other: Left and Right are [N, Depth] or, if Tall,
// stored as [Depth, N], C and D [N, N]. C may be null; where it is not, it is symmetric. D is none
// of the operands, and symmetric to the bit: of the product what is on the diagonal and below is
// computed.
type Symmetric struct {
	D, Left, Right, C  gpu.Ptr
	Alpha, Beta, Delta float64
	N, Depth, Batch    int
	Tall               bool
	Type               gpu.DType
}

// Variants lists the variants that take the launch at addresses that are multiples of 16, or none: Hopper
// has one for float16 and multiples of 8.
func (a Symmetric) Variants(k *kernel.Set) []kernel.Variant {
	return onHopper(k, kernel.Variant{Family: "half"},
		a.Type == gpu.Float16 && a.N%8 == 0 && a.Depth%8 == 0)
}

// The columns of gemm_symmetric.cu's tiles, and its stages.
const symmetricColumns, symmetricStages = 160, 5

// Launch launches one kernel.
func (a Symmetric) Launch(q *kernel.Queue) {
	clusters := 0 // as gemm_symmetric.cu counts them
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
