// Package gemm has matrix products for Hopper that either are faster than cuBLASLt's or fuse other
// work into the product: gates, RoPE, the statistics of attention, and the cross-entropy of an
// output layer. [Symmetric] and [NewtonSchulz] serve the Muon optimizer.
//
// cuBLASLt computes all other products. NOTES.md and NEWTON-SCHULZ.md explain the structure and
// performance.
package gemm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// SiLUProduct computes AB = X·Weightsᵀ and H = silu(A) ⊙ B, where A and B are the left and right
// halves of AB. X is [Rows, D], Weights [2F, D], AB [Rows, 2F] and H [Rows, F]. H is computed from
// the rounded A and B.
type SiLUProduct struct {
	H, AB, X, Weights gpu.Ptr
	Gate
	Term Term // added to X·Weightsᵀ
}

// SiLUProductBackward computes DH = G·Down, which is never stored, and from it the two halves of
// DAB, DA = DH ⊙ B ⊙ σ(A)(1 + A(1 − σ(A))) and DB = DH ⊙ silu(A). It also recomputes H, unless H is
// null.
//
// G is [Rows, D], Down [D, F], AB and DAB [Rows, 2F] and H [Rows, F]. DH is rounded before it is
// used. DAB may be AB.
type SiLUProductBackward struct {
	H, DAB, G, Down, AB gpu.Ptr
	Gate
	Term Term // added to G·Down
}

// Term is a second product, of depth D, that a kernel adds to its first one before rounding: X·Wᵀ or
// X·W, with W laid out like the right operand of the first product. There is none if D is 0.
type Term struct {
	X, W gpu.Ptr
	D    int
}

// takes reports whether a kernel accepts the term.
func (t Term) takes() bool { return t.D%8 == 0 }

// matrices returns the operands for a launch, where w describes W. Without a term, it returns stand-ins
// that are never read.
func (t Term) matrices(rows int, w gemmMatrix, standIn gpu.Ptr) []gemmMatrix {
	if t.D == 0 {
		t.X, w.ptr, t.D = standIn, standIn, gemmDepth
		w.dims[0], w.dims[1] = max(w.dims[0], gemmDepth), max(w.dims[1], 1)
	}
	return []gemmMatrix{matrix(t.X, t.D, rows, gemmDepth, gemmRows), w}
}

// shape describes the term for [kernel.Tuned].
func (t Term) shape() string { return kernel.With(t.D > 0, fmt.Sprint("plus depth ", t.D)) }

// Gate holds the sizes and type of a SiLUProduct or a SiLUProductBackward.
type Gate struct {
	Rows, F, D int
	Type       gpu.DType
	Variant    kernel.Variant
}

// Variants returns the variants that accept the launch if all addresses are multiples of 16. Hopper
// has one for 2-byte types if F and D are multiples of 8.
func (g Gate) Variants(k *kernel.Set) []kernel.Variant {
	return onHopper(k, fused, g.Type.Size() == 2 && g.F%8 == 0 && g.D%8 == 0)
}

// fused is the variant that fuses other work into a product.
var fused = kernel.Variant{Family: "fused"}

// onHopper returns the given variant if the GPU has compute capability 9.0 and the variant takes
// the launch.
func onHopper(k *kernel.Set, variant kernel.Variant, takes bool) []kernel.Variant {
	if takes && k.Info.Capability() == 90 {
		return []kernel.Variant{variant}
	}
	return nil
}

// The shape of gemm_hopper.cuh: the rows and depth of a block's tile, the blocks of a cluster, and
// the rows of clusters in a section. The shape of gemm_hopper.cu: the columns of a tile, the
// stages, the bytes of a warp's panels, and the number of parts into which a tile of gate and up is
// divided.
const (
	gemmRows, gemmDepth, gemmCluster, gemmSection     = 128, 64, 2, 8
	gateColumns, gateStages, gateWarpBytes, gateParts = 256, 4, 2 * 16 * 128, 8
)

// warpShared returns the shared memory of a block, with warpBytes for each multiplying warp.
func warpShared(columns, stages, warpBytes int) int {
	return stages*(2*gemmDepth*(gemmRows+columns)+16) + gemmRows/16*(warpBytes+16)
}

// float8MinDepth is the depth that a float8 product must exceed. With fewer steps per tile than
// stages, the copy engine would overwrite a tile's factors while they are still being read.
const float8MinDepth = (plainStages - 1) * 2 * gemmDepth

// float8Product reports whether kernels based on gemm_hopper.cuh accept a float8 product with the
// given number of columns and depth d, and results of type t.
func float8Product(columns, d int, t gpu.DType) bool {
	return columns%16 == 0 && d%16 == 0 && d > float8MinDepth && t == gpu.BFloat16
}

// factorBytes returns the shared memory for the column factors of two tiles.
func factorBytes(columns int) int { return 2 * 4 * columns }

// Variants returns the variants that accept the launch if all addresses are multiples of 16. The depth
// of the term must be a multiple of 8.
func (a SiLUProduct) Variants(k *kernel.Set) []kernel.Variant {
	if !a.Term.takes() {
		return nil
	}
	return a.Gate.Variants(k)
}

// Variants returns the variants that accept the launch if all addresses are multiples of 16. The depth
// of the term must be a multiple of 8.
func (a SiLUProductBackward) Variants(k *kernel.Set) []kernel.Variant {
	if !a.Term.takes() {
		return nil
	}
	return a.Gate.Variants(k)
}

// Launch enqueues one kernel.
func (a SiLUProduct) Launch(q *kernel.Queue) {
	right := matrix(a.Weights, a.D, a.F, gemmDepth, gateColumns/2).times(2, 1)
	more := right
	more.ptr, more.dims[0] = a.Term.W, a.Term.D
	a.launch(q, "gemm_hopper_silu_mul", a.Term, append([]gemmMatrix{
		matrix(a.X, a.D, a.Rows, gemmDepth, gemmRows), right,
		matrix(a.AB, a.F, 2, 64, 1).times(a.Rows, 16).storing(),
		matrix(a.H, a.F, a.Rows, 64, 16).storing(),
	}, a.Term.matrices(a.Rows, more, a.Weights)...))
}

// Launch enqueues one kernel.
func (a SiLUProductBackward) Launch(q *kernel.Queue) {
	pair := matrix(a.AB, a.F, 2, gateColumns/gateParts, 1).times(a.Rows, 16)
	gradient := pair
	gradient.ptr, gradient.stored = a.DAB, a.DAB != a.AB // otherwise poisoning would destroy the input
	symbol, matrices := "gemm_hopper_silu_mul_backward_without_h", []gemmMatrix{
		matrix(a.G, a.D, a.Rows, gemmDepth, gemmRows),
		matrix(a.Down, a.F, a.D, 64, gemmDepth), pair, gradient}
	if a.H != 0 {
		symbol = "gemm_hopper_silu_mul_backward"
		matrices = append(matrices, matrix(a.H, a.F, a.Rows, 64, 16).storing())
	}

	more := matrix(a.Term.W, a.F, a.Term.D, 64, gemmDepth)
	a.launch(q, symbol, a.Term, append(matrices, a.Term.matrices(a.Rows, more, a.Down)...))
}

// launch enqueues a kernel of gemm_hopper.cu.
func (g Gate) launch(q *kernel.Queue, symbol string, t Term, matrices []gemmMatrix) {
	gemmLaunch{unit: "gemm_hopper", symbol: symbol + kernel.Suffix(g.Type), dtype: g.Type,
		matrices: matrices, shared: warpShared(gateColumns, gateStages, gateWarpBytes),
		params: kernel.Struct{g.Rows, g.F, g.D, t.D, gemmSection}}.run(q)
}

// gemmLaunch describes a launch of a kernel based on gemm_hopper.cuh.
type gemmLaunch struct {
	unit, symbol string
	shared       int
	params       kernel.Struct
	dtype        gpu.DType
	matrices     []gemmMatrix
	clusters     int // 0 for as many persistent clusters as run at once
}

// gemmMatrix describes one or more consecutive matrices that the copy engine moves in boxes. dims
// lists the extents, innermost first, without padding.
type gemmMatrix struct {
	ptr    gpu.Ptr
	dims   [3]int
	box    [3]uint32
	stored bool // entirely, by the copy engine
}

func matrix(p gpu.Ptr, columns, rows, boxColumns, boxRows int) gemmMatrix {
	return gemmMatrix{ptr: p, dims: [3]int{columns, rows, 1},
		box: [3]uint32{uint32(boxColumns), uint32(boxRows), 1}}
}

// times returns a stack of n such matrices, which are moved `box` at a time.
func (m gemmMatrix) times(n, box int) gemmMatrix {
	m.dims[2], m.box[2] = n, uint32(box)
	return m
}

// storing marks the matrix as written by the copy engine.
func (m gemmMatrix) storing() gemmMatrix {
	m.stored = true
	return m
}

// run enqueues one kernel.
func (g gemmLaunch) run(q *kernel.Queue) {
	args := []any{g.params}
	for _, m := range g.matrices {
		row := uint64(m.dims[0] * g.dtype.Size())
		args = append(args, q.Tiled(gpu.TiledTensor{Type: g.dtype, Address: m.ptr, Box: m.box[:],
			Dims:    []uint64{uint64(m.dims[0]), uint64(m.dims[1]), uint64(m.dims[2])},
			Strides: []uint64{row, row * uint64(m.dims[1])}}))
		if m.stored {
			q.Poison(m.ptr, m.dims[0]*m.dims[1]*m.dims[2]*g.dtype.Size())
		}
	}

	l := kernel.Line(gemmCluster, 384)
	l.Cluster, l.Shared = gpu.Dim{X: gemmCluster}, g.shared
	if g.clusters == 0 {
		q.RunAll(g.unit, g.symbol, l, args...)
		return
	}

	l.Grid.X, l.Overlap = g.clusters*gemmCluster, true
	q.Run(g.unit, g.symbol, l, args...)
}

// Tuning implements [kernel.Tuned].
func (a SiLUProduct) Tuning() (op, shape string) {
	return "SiLUProduct", fmt.Sprintf("%dx%dx%d %v", a.Rows, a.F, a.D, a.Type) + a.Term.shape()
}

// Tuning implements [kernel.Tuned].
func (a SiLUProductBackward) Tuning() (op, shape string) {
	return "SiLUProductBackward", fmt.Sprintf("%dx%dx%d %v", a.Rows, a.F, a.D, a.Type) +
		kernel.With(a.H == 0, "without h") + a.Term.shape()
}

// SetVariant sets the variant chosen by tuning.
func (g *Gate) SetVariant(w kernel.Variant) { g.Variant = w }
