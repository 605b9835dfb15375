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
// where Columns and D are multiples of 8. All tiles of a row are worked on at once: there is none where clusters that keep to one column of
// tiles would take more turns than others, with all multiprocessors or without those that [Kernels.Leave] leaves to a late update.
func (k *Kernels) ProductNormWays(rows, columns, d int, t driver.DType) []Way {
	if len(k.ProductWays(ProductShape{Rows: rows, Columns: columns, D: d, TransW: true}, t)) == 0 {
		return nil
	}
	suf, err := suffix("ProductNormWays", t)
	if err != nil {
		return nil
	}
	most, err := normLaunch(suf).most(k)
	if err != nil {
		return nil
	}
	across, deep := normTiles(rows, columns)
	for _, n := range []int{most, most - LateMultiprocessors/gemmCluster} {
		if n < across || ceilDiv(deep, n/across) > ceilDiv(across*deep, n) {
			return nil
		}
	}
	return normWays
}

var normWays = []Way{{Family: "fused"}}

// normTiles is how many tiles a row has, and how many there are below each other, those of a cluster counting as one.
func normTiles(rows, columns int) (across, deep int) {
	return ceilDiv(columns, plainColumns), ceilDiv(rows, gemmCluster*gemmRows)
}

func normLaunch(suf string) gemmLaunch {
	return gemmLaunch{unit: "gemm_hopper_norm", kernel: "gemm_hopper_norm" + suf, threads: 384,
		shared: warpShared(plainColumns, plainStages, plainWarpBytes) + factorBytes(plainColumns)/2}
}

// ProductNormWorkspace is the bytes of workspace that a ProductNorm takes: two numbers, and what a tile tells the others of each of its
// rows, Launches and Tagged of gemm_hopper_norm.cu.
func ProductNormWorkspace(rows, columns int) int {
	return 8 + 8*16*ceilDiv(rows, 16)*ceilDiv(columns, plainColumns)
}

// ProductNorm launches one kernel, also where it is too slow to be a way.
func (k *Kernels) ProductNorm(s driver.Stream, a ProductNorm) error {
	const op = "ProductNorm"
	if empty, err := checkSizes(op, a.Rows, a.Columns, a.D); err != nil || empty {
		return err
	}
	takes := len(k.ProductWays(ProductShape{Rows: a.Rows, Columns: a.Columns, D: a.D, TransW: true}, a.Type)) > 0
	if !takes || a.C == 0 || a.Workspace == 0 || !aligned(a.Y, a.Rstd, a.Sum, a.X, a.W, a.C, a.G, a.Workspace) {
		return fmt.Errorf("kernels.%s: got %d rows, %d columns, D %d, %v, want compute capability 9.0, columns and D multiples of 8, "+
			"float16 or bfloat16, a C, a workspace, and addresses that are multiples of 16", op, a.Rows, a.Columns, a.D, a.Type)
	}
	if _, err := a.Way.of(op, normWays); err != nil {
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
	g := normLaunch(suf)
	g.dtype, g.stored, g.elements = a.Type, a.Y, a.Rows*a.Columns
	g.matrices = []gemmMatrix{
		{a.X, [3]int{a.D, a.Rows, 1}, [2]uint64{depth, 8}, [3]uint32{gemmDepth, gemmRows, 1}},
		{a.W, [3]int{a.D, a.Columns, 1}, [2]uint64{depth, 8}, [3]uint32{gemmDepth, plainColumns / gemmCluster, 1}},
		result, added, normed,
	}
	most, err := g.most(k)
	if err != nil {
		return err
	}
	across, deep := normTiles(a.Rows, a.Columns)
	down := min(deep, most/across)
	if down == 0 {
		return fmt.Errorf("kernels.%s: %d columns take %d clusters at once, and %d run", op, a.Columns, across, most)
	}
	g.clusters = down * across
	g.params = args().Ptr(a.Workspace).Ptr(a.Rstd).Ptr(a.G).Int32(a.Rows).Int32(a.Columns).Int32(a.D).Int32(down).Float32(float32(a.Eps))
	if a.C != a.Sum { // else what is stored to would be lost
		if err := k.poison(s, a.Sum, a.Rows*a.Columns*a.Type.Size()); err != nil {
			return err
		}
	}
	return g.launch(k, s)
}
