package gemm

import (
	"unsafe"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// This is the float32 kernel for arm64. It has been tested under emulation only, and never timed. Its
// shape of eight rows of two vectors, which leaves room for the operands in 32 registers, was derived
// from the register file alone.

// neonTile describes the work of gemmTileNEON: sums[i][j] = Σ rows[i][p·step]·b[p·stride + j] for p
// < k. Strides are in bytes. The assembly depends on the offsets of the fields.
type neonTile struct {
	sums    [8][8]float32
	rows    [8]*float32
	step, k int
	b       *float32
	stride  int
}

//go:noescape
func gemmTileNEON(t *neonTile)

// tileNEON is the tile kernel. It also computes elements outside the tile, reading only valid memory,
// and discards them.
func tileNEON(t *tile[float32]) {
	var n neonTile
	for i := range n.rows {
		n.rows[i] = &t.a[min(i, t.m-1)*t.rs]
	}

	n.step, n.k, n.b, n.stride = 4*t.cs, t.k, unsafe.SliceData(t.b), 4*t.bs
	if len(t.b) < (t.k-1)*t.bs+len(n.sums[0]) { // the last columns of a matrix that is read in place
		gemmLastColumns(&n, t)
	} else {
		gemmTileNEON(&n)
	}

	for i := range t.m {
		c := t.c[i*t.ldc:][:t.n]
		for j := range c {
			if t.beta == 0 {
				c[j] = t.alpha * n.sums[i][j]
			} else {
				c[j] = t.alpha*n.sums[i][j] + t.beta*c[j]
			}
			if t.d != nil {
				c[j] += t.d[i*t.ldd+j]
			}
		}
	}
}

// gemmLastColumns runs the kernel on a copy of B. It copies the tile as well, since otherwise the
// copy of B would escape to the heap.
func gemmLastColumns(n *neonTile, t *tile[float32]) {
	var b [gemmKC][8]float32
	for p := range t.k {
		copy(b[p][:t.n], t.b[p*t.bs:])
	}
	tile := *n
	tile.b, tile.stride = &b[0][0], 4*len(b[0])
	gemmTileNEON(&tile)
	n.sums = tile.sums
}

// kernelsFor returns the kernels of an instruction set.
func kernelsFor(l cpu.ISA) (kernels[float32], kernels[float64]) {
	k32 := portableKernels[float32]()
	if l == cpu.Neon {
		const size = 8
		k32.mr, k32.nr, k32.lanes = size, size, size
		k32.tile = func(t *tile[float32]) { t.sweep(size, tileNEON) }
	}
	return k32, portableKernels[float64]()
}

// fmaLoopNEON runs n rounds of 16 independent multiply-adds of whole float32 vectors.
func fmaLoopNEON(n int)

// fmaPeakLoop returns a loop of multiply-adds and its number of float32 operations per round.
func fmaPeakLoop() (flops int, run func(rounds int)) {
	if cpu.Level() == cpu.Neon {
		return 16 * 2 * 4, fmaLoopNEON
	}
	return 0, nil
}
