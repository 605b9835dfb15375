package kernels

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
)

// ProductNorm computes Sum = X·Wᵀ + C, rounded once, Rstd = 1/sqrt(mean(Sum²) + Eps) of its rows, and Y = Sum·Rstd ⊙ G: X is [Rows, D],
// W [Columns, D], Sum, C and Y [Rows, Columns]; Rstd [Rows] and G [Columns] are float32. Sum may be the memory of C.
//
// Workspace is memory of [ProductNormWorkspace] bytes, zeros before the first launch, to be kept from one to the next. Launches of any
// sizes may share it if they follow one another.
type ProductNorm struct {
	Y, Rstd, Sum, X, W, C, G driver.Ptr
	Rows, Columns, D         int
	Eps                      float64
	Type                     driver.DType // of Y, Sum, X, W and C
	Workspace                driver.Ptr
	Way                      Way
}

// ProductNormWays lists the ways to compute ProductNorm at addresses that are multiples of 16, or none: Hopper has one for two-byte types
// where Columns and D are multiples of 8.
func (k *Kernels) ProductNormWays(rows, columns, d int, t driver.DType) []Way {
	if len(k.ProductWays(ProductShape{Rows: rows, Columns: columns, D: d, TransW: true}, t)) == 0 {
		return nil
	}
	return []Way{{Family: "fused"}}
}

// ProductNormWorkspace is the bytes of workspace that a ProductNorm takes: two numbers, and what a tile tells the others of each of its
// rows, Launches and Tagged of gemm_hopper_norm.cu.
func ProductNormWorkspace(rows, columns int) int {
	return 8 + 8*16*ceilDiv(rows, 16)*ceilDiv(columns, plainColumns)
}

// ProductNorm launches one kernel.
func (k *Kernels) ProductNorm(s driver.Stream, a ProductNorm) error {
	const op = "ProductNorm"
	if empty, err := checkSizes(op, a.Rows, a.Columns, a.D); err != nil || empty {
		return err
	}
	ways := k.ProductNormWays(a.Rows, a.Columns, a.D, a.Type)
	if len(ways) == 0 || a.C == 0 || a.Workspace == 0 || !aligned(a.Y, a.Rstd, a.Sum, a.X, a.W, a.C, a.G, a.Workspace) {
		return fmt.Errorf("kernels.%s: got %d rows, %d columns, D %d, %v, want compute capability 9.0, columns and D multiples of 8, "+
			"float16 or bfloat16, a C, a workspace, and addresses that are multiples of 16", op, a.Rows, a.Columns, a.D, a.Type)
	}
	if _, err := a.Way.of(op, ways); err != nil {
		return err
	}
	suf, err := suffix(op, a.Type)
	if err != nil {
		return err
	}
	depth, columns := uint64(a.D), uint64(a.Columns)
	result := gemmMatrix{a.Sum, [3]int{a.Columns, a.Rows, 1}, [2]uint64{columns, 8}, [3]uint32{64, 16, 1}}
	added, normed := result, result
	added.ptr, normed.ptr = a.C, a.Y
	g := gemmLaunch{unit: "gemm_hopper_norm", kernel: "gemm_hopper_norm" + suf, threads: 384, dtype: a.Type,
		shared: warpShared(plainColumns, plainStages, plainWarpBytes), stored: a.Y, elements: a.Rows * a.Columns,
		matrices: []gemmMatrix{
			{a.X, [3]int{a.D, a.Rows, 1}, [2]uint64{depth, 8}, [3]uint32{gemmDepth, gemmRows, 1}},
			{a.W, [3]int{a.D, a.Columns, 1}, [2]uint64{depth, 8}, [3]uint32{gemmDepth, plainColumns / gemmCluster, 1}},
			result, added, normed,
		}}
	most, err := g.most(k)
	if err != nil {
		return err
	}
	var section int
	var whole bool
	g.clusters, section, whole = wholeRows(a.Rows, a.Columns, most)
	g.params = args().Ptr(a.Workspace).Ptr(a.Rstd).Ptr(a.G).Int32(a.Rows).Int32(a.Columns).Int32(a.D).Int32(section).Float32(float32(a.Eps)).
		Int32(int(bit(whole)))
	if a.C != a.Sum { // else what is stored to would be lost
		if err := k.poison(s, a.Sum, a.Rows*a.Columns*a.Type.Size()); err != nil {
			return err
		}
	}
	return g.launch(k, s)
}

// wholeRows chooses how many clusters, of so many that run at once, work on a product and how many rows of them are a section, so that
// the tiles of a row are of one turn where that takes no more turns: other rows take another pass over the sum. whole is whether there are
// none of these.
func wholeRows(rows, columns, most int) (clusters, section int, whole bool) {
	across := ceilDiv(columns, plainColumns)
	tiles := across * ceilDiv(rows, gemmCluster*gemmRows)
	clusters, section = most, 1
	if n := most / across * across; n > 0 && ceilDiv(tiles, n) == ceilDiv(tiles, most) {
		clusters = n
	}
	for s := 2; s < 2*gemmSection; s++ {
		if clusters%(s*across) == 0 && max(s-gemmSection, gemmSection-s) <= max(section-gemmSection, gemmSection-section) {
			section = s
		}
	}
	return clusters, section, clusters%(section*across) == 0 || tiles <= clusters
}
